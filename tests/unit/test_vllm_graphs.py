"""Passes replayed as CUDA graphs compute what passes without do; on stand-ins for vLLM's wrappers, which need a GPU.

The stand-ins keep what makes graphs treacherous: capturing computes nothing and leaves garbage, and replaying computes
with the tensors of the captured pass, whatever it is called with.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.compilation import monitor
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_tokentiming.engine import vllm_graphs
from vllm_tokentiming.engine.vllm_forward import DraftForward
from vllm_tokentiming.engine.vllm_graphs import DraftGraphs, resolve_graph_mode

BLOCK_SIZE, WIDTH, MAX_ROWS, MAX_TOKENS = 4, 16, 6, 200
BLOCKS_PER_ROW = 32


class Wrapper:
    """Stands in for ``CUDAGraphWrapper``."""

    has_memory = True

    def __init__(self, runnable: Callable[..., torch.Tensor], config: Any, runtime_mode: CUDAGraphMode) -> None:
        del config
        self.runnable, self.mode = runnable, runtime_mode
        self.recorded: dict[Any, tuple[Any, torch.Tensor]] = {}
        self.replays = 0

    def __call__(self, **tensors: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.mode:
            return self.runnable(**tensors)
        key = context.batch_descriptor
        if key not in self.recorded:
            assert monitor.cudagraph_capturing_enabled
            if not self.has_memory:
                raise torch.OutOfMemoryError("none left")
            garbage = torch.full((key.num_tokens, WIDTH), math.nan)
            self.recorded[key] = ((tensors, context), garbage)
            return garbage
        (then, context_then), result = self.recorded[key]
        for name, tensor in tensors.items():
            if self.mode == CUDAGraphMode.FULL or name != "attended":
                assert tensor.data_ptr() == then[name].data_ptr(), f"{name} lies elsewhere than when it was captured"
        if self.mode == CUDAGraphMode.PIECEWISE:
            then = {name: tensors[name] if name == "attended" else tensor for name, tensor in then.items()}
        self.replays += 1
        with override_forward_context(context_then):
            result.copy_(self.runnable(**then))
        return result


class Toy:
    """A model of one attention between two pieces, whose hidden states tell the whole context of a token."""

    def __init__(self) -> None:
        self.kv = torch.zeros((MAX_ROWS * BLOCKS_PER_ROW + 1) * BLOCK_SIZE, WIDTH)
        weights = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(50, WIDTH, generator=weights)
        self.before = Wrapper(self._before, None, CUDAGraphMode.PIECEWISE)
        self.after = Wrapper(self._after, None, CUDAGraphMode.PIECEWISE)

    def __call__(self, *, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedded = self.before(input_ids=input_ids, positions=positions)
        return self.after(attended=self._attend(embedded), positions=positions)

    def _before(self, *, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.embedding[input_ids] + 0.01 * positions.unsqueeze(1)

    def _after(self, *, attended: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return attended * (1.0 + positions.unsqueeze(1))

    def _attend(self, embedded: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        result = torch.zeros_like(embedded)
        if context.attn_metadata is not None:
            told, slots = context.attn_metadata["layer"], context.slot_mapping["layer"]
            assert len(slots) == len(embedded)
            self.kv[slots[slots >= 0]] = embedded[slots >= 0]
            for row in range(told.num_reqs):
                first, end = told.query_start_loc[row : row + 2].tolist()
                length = int(told.seq_lens[row])
                assert end - first <= told.max_query_len
                assert length <= told.max_seq_len
                assert end > first or length == 0
                places = torch.arange(length)
                slots_of_row = told.block_table_tensor[row][places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
                for token in range(first, end):
                    seen = self.kv[slots_of_row[: length - (end - 1 - token)]]
                    result[token] = seen.cumsum(0).sum(0) / len(seen)
        return result

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Cache:
    block_size = BLOCK_SIZE

    def build_metadata(self, common: Any, *, for_capture: bool = False) -> dict[str, Any]:
        if for_capture:
            assert common.max_seq_len == BLOCKS_PER_ROW * BLOCK_SIZE
            common.seq_lens.fill_(1)  # as vLLM's Triton backend does
        return {"layer": common}

    def layer_names(self) -> list[str]:
        return ["layer"]


def make_config(mode: CUDAGraphMode, *, sizes: tuple[int, ...] = (1, 2, 4, 6, 8, 16, 32)) -> Any:
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=list(sizes),
        max_cudagraph_capture_size=sizes[-1],
    )
    compilation.set_splitting_ops_for_v1(all2all_backend="", data_parallel_size=1)
    return SimpleNamespace(
        compilation_config=compilation,
        num_speculative_tokens=0,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_ROWS),
        model_config=SimpleNamespace(max_model_len=BLOCKS_PER_ROW * BLOCK_SIZE),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, use_sequence_parallel_moe=False, is_moe_model=False, enable_dbo=False
        ),
    )


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    yield


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(vllm_graphs, "CUDAGraphWrapper", Wrapper)
    monkeypatch.setattr(vllm_graphs, "_capturing_on_a_stream_of_its_own", capturing)


def make_forward(mode: CUDAGraphMode) -> tuple[DraftForward, Toy]:
    model, cache = Toy(), Cache()
    forward = DraftForward(
        model=model,
        config=make_config(mode),
        cache=cache,  # type: ignore[arg-type]
        device=torch.device("cpu"),
        max_tokens=MAX_TOKENS,
        max_requests=MAX_ROWS,
    )
    if mode != CUDAGraphMode.NONE:
        forward.use_graphs()
    return forward, model


def play(forward: DraftForward) -> list[torch.Tensor]:
    """Cycles of requests that come and go, roll back and stop drafting at different steps: the logits of all passes."""
    random = np.random.default_rng(3)
    logits = []
    lengths = [0] * MAX_ROWS
    blocks = [[1 + row * BLOCKS_PER_ROW + i for i in range(BLOCKS_PER_ROW)] for row in range(MAX_ROWS)]
    for cycle in range(40):
        present = sorted(random.choice(MAX_ROWS, size=random.integers(1, MAX_ROWS + 1), replace=False).tolist())
        new = [int(random.integers(1, 40 if cycle % 5 == 0 else 5)) for _ in present]
        for place, row in enumerate(present):
            lengths[row] = 0 if lengths[row] + new[place] + 8 > BLOCKS_PER_ROW * BLOCK_SIZE else lengths[row]
            lengths[row] = max(0, lengths[row] - int(random.integers(0, 3)))
        of_present = [blocks[row] for row in present]
        ids = [random.integers(50, size=number).tolist() for number in new]
        starts = [lengths[row] for row in present]
        logits.append(forward.prefill(ids=ids, starts=starts, block_ids=of_present).clone())
        for place, row in enumerate(present):
            lengths[row] += new[place]
        steps = sorted(random.integers(0, 6, size=len(present)).tolist(), reverse=True)
        forward.begin_decode(lengths=[lengths[row] for row in present], block_ids=of_present)
        for step in range(steps[0]):
            drafting = sum(1 for number in steps if number > step)
            logits.append(forward.decode_step(torch.from_numpy(random.integers(50, size=drafting))).clone())
            for row in present[:drafting]:
                lengths[row] += 1
    return logits


@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.PIECEWISE]
)
def test_passes_are_what_they_are_without_graphs(mode: CUDAGraphMode) -> None:
    expected = play(make_forward(CUDAGraphMode.NONE)[0])
    forward, model = make_forward(mode)
    found = play(forward)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert forward.graphs is not None
    whole = forward.graphs.model
    if mode.has_full_cudagraphs():
        assert isinstance(whole, Wrapper)
        assert whole.replays > 60
        assert {key.num_tokens for key in whole.recorded} == {1, 2, 4, 6}
    else:
        assert whole is model
    assert (model.before.replays > 20) == mode.has_piecewise_cudagraphs()
    assert model.before.replays == model.after.replays


def test_a_size_is_captured_once_and_by_a_pass_that_is_not_lost(caplog) -> None:
    caplog.set_level(logging.INFO, logger=vllm_graphs.logger.name)
    graphs = DraftGraphs(
        None, config=make_config(CUDAGraphMode.FULL_AND_PIECEWISE), max_tokens=MAX_TOKENS, max_rows=MAX_ROWS
    )
    taken, captures = [], []
    graph = graphs.of_step(3)
    assert graph is not None
    assert (graph.num_tokens, graph.is_full) == (4, True)
    for _ in range(3):
        graphs.run(graph, take=lambda mode: taken.append(mode) or torch.zeros(0), capture=lambda: captures.append(1))
    assert taken == [CUDAGraphMode.NONE, CUDAGraphMode.FULL, CUDAGraphMode.FULL]
    assert captures == [1]
    assert caplog.text.count("captured a FULL CUDA graph of 4 tokens") == 1


def test_which_passes_are_graphs() -> None:
    sizes = (1, 2, 4, 8, 256)
    config = make_config(CUDAGraphMode.FULL_AND_PIECEWISE, sizes=sizes)
    graphs = DraftGraphs(None, config=config, max_tokens=MAX_TOKENS, max_rows=MAX_ROWS)
    assert [graph.num_tokens for rows in (1, 2, 3, 4) if (graph := graphs.of_step(rows)) is not None] == [1, 2, 4, 4]
    wide = graphs.of_step(5)  # vLLM has no whole graph for more rows than there may be requests
    assert wide is not None
    assert (wide.num_tokens, wide.is_full) == (8, False)
    short = graphs.of_pass(3)
    assert short is not None
    assert (short.num_tokens, short.is_full) == (4, False)
    assert graphs.of_pass(9) is None  # padded to 256, more than the buffers hold
    larger = DraftGraphs(None, config=config, max_tokens=1000, max_rows=MAX_ROWS)
    assert larger.of_pass(128) is not None
    assert larger.of_pass(129) is None
    whole = DraftGraphs(None, config=make_config(CUDAGraphMode.FULL), max_tokens=MAX_TOKENS, max_rows=MAX_ROWS)
    assert whole.of_pass(3) is None
    step = whole.of_step(3)
    assert step is not None
    assert step.is_full
    assert whole.of_step(7) is None


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.PIECEWISE])
def test_a_failed_capture_costs_the_graphs_and_no_request(mode: CUDAGraphMode, monkeypatch, caplog) -> None:
    expected = play(make_forward(CUDAGraphMode.NONE)[0])
    monkeypatch.setattr(Wrapper, "has_memory", False)
    forward, model = make_forward(mode)
    found = play(forward)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert caplog.text.count("goes on without CUDA graphs") == 1
    assert "none left" in caplog.text
    assert forward.graphs is not None
    assert forward.graphs.of_step(1) is None
    assert model.before.replays == 0


@pytest.mark.parametrize(
    ("support", "asked", "left"),
    [
        ("UNIFORM_SINGLE_TOKEN_DECODE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"),
        ("NEVER", "FULL_AND_PIECEWISE", "PIECEWISE"),
        ("ALWAYS", "FULL", "FULL"),
        ("UNIFORM_BATCH", "FULL", "FULL_AND_PIECEWISE"),
        ("NEVER", "FULL", "NONE"),
        ("NEVER", "NONE", "NONE"),
    ],
)
def test_graphs_are_those_that_every_backend_of_the_draft_supports(support: str, asked: str, left: str) -> None:
    def group(name: str, support: AttentionCGSupport) -> Any:
        builder = SimpleNamespace(get_cudagraph_support=lambda _config, _spec: support)
        return SimpleNamespace(
            backend=SimpleNamespace(get_builder_cls=lambda: builder, get_name=lambda: name), kv_cache_spec=None
        )

    config = make_config(CUDAGraphMode[asked])
    groups = [group("able", AttentionCGSupport.ALWAYS), group("other", AttentionCGSupport[support])]
    resolve_graph_mode(config, groups)
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode[left]


def test_capturing_is_allowed_while_it_lasts(monkeypatch) -> None:
    monkeypatch.undo()
    waits: list[tuple[str, str]] = []

    class Stream:
        def __init__(self, name: str = "own") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            waits.append((self.name, other.name))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", False)

    def fail() -> None:
        with vllm_graphs._capturing_on_a_stream_of_its_own():
            monitor.validate_cudagraph_capturing_enabled()
            raise ValueError("of a kernel")

    with pytest.raises(ValueError, match="of a kernel"):
        fail()
    assert monitor.cudagraph_capturing_enabled is False
    assert waits == [("own", "current"), ("current", "own")]
