"""Does the hand-written decode step give the logits, and leave the KV, that vLLM's own layers do?"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_harness as harness
import numba
import pytest
import torch

from vllm_tokentiming.engine import attention_kernels, int8_dot, openmp
from vllm_tokentiming.engine.int8_checkpoint import int8_checkpoint
from vllm_tokentiming.tiny_pair import tiny_pair

pytest.importorskip("vllm")

from vllm_tokentiming.engine import vllm_int8_layers

BLOCK = 128
KV_ERROR = {"float32": 1e-5, "bfloat16": 0.01, "int8 bfloat16": 0.03, "int8 float32": 0.03}
"""Of the first two layers; int8 activations amplify the rounding of each norm."""
CORRELATION = {"float32": 0.999999, "bfloat16": 0.999, "int8 bfloat16": 0.99, "int8 float32": 0.99}
"""Beside vLLM's layers, which have float weights where int8 ones are for steps alone."""
REAL_CASE: dict[str, Any] = {"lengths": [200, 126, 3, 60], "rows_by_step": [4, 4, 1]}


def _options(kind: str) -> dict[str, Any]:
    dtype = kind.rsplit(maxsplit=1)[-1]
    return {"draft_dtype": dtype, "draft_quantization": "int8" if kind.startswith("int8") else None}


def _needs_own_kernels(kind: str) -> None:
    if kind == "int8 float32" and not _own_kernels_run_here():
        pytest.skip("int8 weights with float32 activations need kernels of our own")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TOKENTIMING_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8 bfloat16", "int8 float32"])
def tiny(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    _needs_own_kernels(request.param)
    with harness.vllm_engine(tiny_pair().draft, **_options(request.param)) as engine:
        yield engine, request.param


def _run(
    engine: Any,
    *,
    lengths: list[int],
    rows_by_step: list[int],
    by_hand: bool,
    prompt_by_hand: bool = False,
    missed: tuple[int, ...] = (),
) -> tuple[Any, Any]:
    """Logits of every step, and the KV of the first two layers, from a cache that held nothing.

    With ``missed``, rows catch up with so many tokens before they decode.
    """
    forward, width = engine._forward, 3
    step, vocab_size = forward.hand_step, engine.vocab_size
    assert step is not None
    blocks = [[1 + width * row + i for i in range(width)] for row in range(len(lengths))]
    used = [block for row in blocks for block in row]
    generator = torch.Generator().manual_seed(sum(lengths))
    contexts = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
    try:
        forward.hand_step = step if prompt_by_hand else None
        engine._cache.clear(used)
        forward.prefill(ids=contexts, starts=[0] * len(lengths), block_ids=blocks)
        forward.hand_step = step if by_hand else None
        logits = []
        if missed:
            tokens = [torch.randint(vocab_size, (count,), generator=generator).tolist() for count in missed]
            logits.append(forward.prefill(ids=tokens, starts=lengths, block_ids=blocks).double())
            lengths = [length + count for length, count in zip(lengths, missed, strict=True)]
        forward.begin_decode(lengths=lengths, block_ids=blocks)
        logits += [
            forward.decode_step(torch.randint(vocab_size, (rows,), generator=generator)).double()
            for rows in rows_by_step
        ]
        return logits, [kv[used].double() for kv in engine._cache.tensors[:2]]
    finally:
        forward.hand_step = step
        engine._cache.clear(used)


def _compare(
    engine: Any, kind: str, *, lengths: list[int], rows_by_step: list[int], missed: tuple[int, ...] = ()
) -> None:
    case = {"lengths": lengths, "rows_by_step": rows_by_step, "missed": missed}
    expected, expected_kv = _run(engine, by_hand=False, **case)
    found, found_kv = _run(engine, by_hand=True, **case)
    if missed:
        rows_by_step = [len(lengths), *rows_by_step]
    for layer, (kv, hand_kv) in enumerate(zip(expected_kv, found_kv, strict=True)):
        assert kv.norm() > 0
        assert (hand_kv - kv).norm() / kv.norm() < KV_ERROR[kind], f"layer {layer}"
    for number, (logits, hand_logits) in enumerate(zip(expected, found, strict=True)):
        assert logits.shape == hand_logits.shape == (rows_by_step[number], engine.vocab_size)
        for row in range(len(logits)):
            correlation = torch.corrcoef(torch.stack([logits[row], hand_logits[row]]))[0, 1]
            assert correlation > CORRELATION[kind], f"step {number}, row {row}"
            # The hand step's choice is the layers' own, or as good as that within the noise.
            worst = (hand_logits[row] - logits[row]).abs().max()
            assert logits[row, hand_logits[row].argmax()] >= logits[row].max() - 2 * worst


@pytest.mark.parametrize("length", [1, 5, 125, 127, 128, 255])
def test_one_row_across_a_block_boundary(tiny: tuple[Any, str], length: int) -> None:
    _compare(*tiny, lengths=[length], rows_by_step=[1] * 6)


@pytest.mark.parametrize("lengths", [[7, 7, 7, 7], [3, 126, 60, 255], [1, 2, 3, 4, 5, 126, 127, 128]])
def test_ragged_rows_that_finish_one_by_one(tiny: tuple[Any, str], lengths: list[int]) -> None:
    rows = len(lengths)
    _compare(*tiny, lengths=lengths, rows_by_step=[rows, rows, rows - 1, 2, 1])


@pytest.mark.parametrize(
    ("lengths", "missed"),
    [([40], (1,)), ([127], (3,)), ([5, 126, 200], (2, 5, 1)), ([1, 2, 3, 250], (8, 8, 8, 8)), ([9, 60], (20, 13))],
)
def test_catching_up_with_a_few_tokens_each(tiny: tuple[Any, str], lengths: list[int], missed: tuple[int, ...]) -> None:
    """Up to 32 tokens in all; the last case is one more, which goes through the layers either way."""
    _compare(*tiny, lengths=lengths, rows_by_step=[len(lengths)] * 2, missed=missed)


@pytest.mark.parametrize("length", [3, 40, 126, 300])
def test_own_weights_give_the_same_bits_whoever_else_is_there(tiny: tuple[Any, str], length: int) -> None:
    """A seed could not give the same output again otherwise: int8 inputs amplify any difference."""
    engine, _ = tiny
    if not engine._forward.hand_step.takes_every_pass:
        pytest.skip("its weights are the model's")
    forward = engine._forward
    ids = torch.randint(engine.vocab_size, (5, 400), generator=torch.Generator().manual_seed(length)).tolist()
    blocks = [[1 + 4 * row + i for i in range(4)] for row in range(5)]

    def said(*others: int) -> list[torch.Tensor]:
        """What the first row's passes give, beside rows of other lengths."""
        lengths, kept = [length, *others], blocks[: 1 + len(others)]
        engine._cache.clear([block for row in blocks for block in row])

        def read(begins: list[int], counts: list[int]) -> torch.Tensor:
            tokens = [row[b : b + n] for row, b, n in zip(ids, begins, counts, strict=False)]
            return forward.prefill(ids=tokens, starts=begins, block_ids=kept)[0].clone()

        found = [read([0] * len(lengths), lengths)]
        found.append(read(lengths, [3, *(1 + n for n in range(len(others)))]))
        forward.begin_decode(lengths=[length + 3, *(other + 1 + n for n, other in enumerate(others))], block_ids=kept)
        steps = [torch.full((len(lengths),), token) for token in (7, 8)]
        return [*found, *(forward.decode_step(tokens)[0].clone() for tokens in steps)]

    alone = said()
    for others in ((5,), (90, 2, 33), (300, 40, 31, 1)):
        for one, other in zip(alone, said(*others), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("model", ["qwen2", "biased llama"])
def test_layers_with_biases(tmp_path: Path, model: str) -> None:
    if model == "qwen2":
        folder = _random_qwen2(tmp_path)
    else:
        folder = harness.make_random_llama(tmp_path, attention_bias=True, mlp_bias=False)
    with harness.vllm_engine(folder) as engine:
        attention = engine._model.model.layers[0].self_attn
        attention.qkv_proj.bias.data.normal_(generator=torch.Generator().manual_seed(1))
        _compare(engine, "float32", lengths=[3, 127], rows_by_step=[2, 2, 1])


def _random_qwen2(folder: Path) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=harness.VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=harness.MAX_MODEL_LEN,
        initializer_range=0.3,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def test_another_architecture_goes_through_the_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=harness.VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=harness.MAX_MODEL_LEN,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    caplog.set_level(logging.INFO, logger="vllm_tokentiming")
    with harness.vllm_engine(tmp_path) as engine:
        assert engine._forward.hand_step is None
    assert "through vLLM's layers: Gemma3ForCausalLM is not one of" in caplog.text


def _broken(name: str, replacement: Callable[..., Any]) -> Any:
    """A stand-in for ``torch`` in the step's module: one kernel is another."""
    kernels = {
        kernel: SimpleNamespace(default=getattr(torch.ops._C, kernel).default)
        for kernel in (
            "fused_add_rms_norm", "rms_norm", "rotary_embedding", "silu_and_mul", "cpu_attn_reshape_and_cache",
            "cpu_attention_with_kv_cache", "compute_slot_mapping_kernel_impl", "get_scheduler_metadata",
        )
    }  # fmt: skip
    original = kernels[name].default
    kernels[name] = SimpleNamespace(default=lambda *arguments: replacement(original, *arguments))
    names = ("index_select", "zeros", "arange", "int32", "split", "unflatten")
    return SimpleNamespace(
        **{name: getattr(torch, name) for name in names}, ops=SimpleNamespace(_C=SimpleNamespace(**kernels))
    )


@pytest.mark.parametrize(
    ("kernel", "replacement", "said"),
    [
        ("rotary_embedding", lambda run, positions, *rest: run(positions + 1, *rest), "layer 0 differs"),
        ("cpu_attn_reshape_and_cache", lambda run, *rest: None, "layer 0 differs"),
        ("cpu_attn_reshape_and_cache", lambda run, k, v, *rest: run(v, k, *rest), "layer 0 differs"),
        ("fused_add_rms_norm", lambda run, x, r, w, e: run(x, r, torch.ones_like(w), e), "layer 1 differs"),
        ("rms_norm", lambda run, *rest: run(*rest, "one too many"), "its check failed with"),
    ],
)
def test_a_step_that_does_something_else_is_not_taken(
    tiny: tuple[Any, str],
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    replacement: Callable[..., Any],
    said: str,
) -> None:
    from vllm_tokentiming.engine import vllm_decode_step
    from vllm_tokentiming.engine.vllm_decode_check import disagreement

    engine, _ = tiny
    kept = engine._forward.hand_step
    # Kernels of our own would stand for some of vLLM's.
    step = vllm_decode_step.LlamaDecodeStep(engine._model, cache=engine._cache) if kept.has_int8_layers else kept
    try:
        assert disagreement(engine._forward, step, engine._cache) is None
        monkeypatch.setattr(vllm_decode_step, "torch", _broken(kernel, replacement))
        reason = disagreement(engine._forward, step, engine._cache)
    finally:
        engine._forward.hand_step = kept
    assert reason is not None
    assert said in reason


def test_another_vllm_is_not_trusted(tiny: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from vllm_tokentiming.engine.vllm_decode_step import why_unfit

    engine, _ = tiny
    assert why_unfit(engine._model, engine._cache) is None
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    assert "0.33.0" in str(why_unfit(engine._model, engine._cache))


def _own_kernels_run_here() -> bool:
    return int8_dot.INSTRUCTIONS is not None and openmp.runtime() is not None


def test_int8_weights_are_read_by_kernels_of_our_own(tiny: tuple[Any, str]) -> None:
    engine, kind = tiny
    assert engine._forward.hand_step.has_int8_layers is (kind.startswith("int8") and _own_kernels_run_here())
    packed_by_vllm = kind == "int8 bfloat16" and torch.cpu.get_capabilities().get("amx_tile", False)
    assert (engine._model.quant_config is not None) is packed_by_vllm or not _own_kernels_run_here()


def test_own_kernels_that_do_something_else_are_not_taken(
    tiny: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is then that on vLLM's kernels."""
    from vllm_tokentiming.engine.vllm_decode_check import agreed_step
    from vllm_tokentiming.engine.vllm_int8_layers import Int8Layers

    engine, _ = tiny
    step, describe = engine._forward.hand_step, attention_kernels.describe
    if not step.has_int8_layers:
        pytest.skip("this draft has no kernels of our own here")
    caplog.set_level(logging.INFO, logger="vllm_tokentiming")
    monkeypatch.setattr(Int8Layers, "after_attention", lambda _layers, _region: None)
    monkeypatch.setattr(
        attention_kernels, "describe", lambda fields: describe({**fields, attention_kernels.NUM_LAYERS: 1})
    )
    try:
        found = agreed_step(
            engine._model,
            cache=engine._cache,
            forward=engine._forward,
            int8_weights=None if engine._model.quant_config else int8_checkpoint(tiny_pair().draft),
        )
    finally:
        engine._forward.hand_step = step
    assert found is not None
    assert not found.has_int8_layers
    assert "without int8 kernels of its own: the KV that it writes in layer 1 differs" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda patch: patch.setattr(openmp, "runtime", lambda: None), "OpenMP runtime is not to be found"),
        (lambda patch: patch.setattr(numba.config, "DISABLE_JIT", 1), "numba is told not to compile"),
        (lambda patch: patch.setattr(numba.config, "CPU_NAME", "generic"), "or to compile for another CPU"),
        (lambda patch: patch.setattr(vllm_int8_layers, "INSTRUCTIONS", None), "neither AVX2 nor AVX-512 VNNI"),
    ],
)
def test_where_own_kernels_cannot_run(
    tiny: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], said: str
) -> None:
    from vllm_tokentiming.engine.vllm_int8_layers import why_unfit

    engine, kind = tiny
    is_packed = engine._model.quant_config is not None
    if kind.startswith("int8") and engine._forward.hand_step.has_int8_layers:
        assert why_unfit(engine._model.model, is_packed=is_packed) is None
    change(monkeypatch)
    assert said in str(why_unfit(engine._model.model))


def test_weights_that_are_not_int8_have_no_own_kernels(tiny: tuple[Any, str]) -> None:
    from vllm_tokentiming.engine.vllm_int8_layers import why_unfit

    engine, _ = tiny
    if engine._model.quant_config is not None or not _own_kernels_run_here():
        pytest.skip("of the other kinds, where nothing else is missing")
    assert "its weights are not int8" in str(why_unfit(engine._model.model))


def test_int8_weights_of_another_shape_are_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The steps then go on with float weights."""
    if not _own_kernels_run_here():
        pytest.skip("no int8 kernels of our own run here")
    folder = harness.make_random_llama(tmp_path, intermediate_size=96 + 8)
    caplog.set_level(logging.INFO, logger="vllm_tokentiming")
    with harness.vllm_engine(folder, draft_quantization="int8") as engine:
        assert not engine._forward.hand_step.has_int8_layers
        assert engine.describe().startswith("vllm (float32, KV")
        _compare(engine, "float32", lengths=[3, 127], rows_by_step=[2, 1])
    assert "without int8 kernels of its own: 104 output channels" in caplog.text or "208 output" in caplog.text


def test_a_head_that_does_not_divide_into_blocks(tmp_path: Path) -> None:
    if not _own_kernels_run_here():
        pytest.skip("no int8 kernels of our own run here")
    folder = harness.make_random_llama(tmp_path, vocab_size=331, tie_word_embeddings=True)
    with harness.vllm_engine(folder, draft_quantization="int8") as engine:
        assert engine._forward.hand_step.has_int8_layers
        assert engine.describe().startswith("vllm (float32, int8, KV")
        _compare(engine, "int8 float32", lengths=[3, 127], rows_by_step=[2, 1], missed=(1, 2))


@pytest.fixture(scope="module")
def layers_in_float32(model_folder: Callable[[str], Path]) -> Callable[[str], list[torch.Tensor]]:
    """Logits of a model's float weights, by its name."""

    @functools.cache
    def logits(name: str) -> list[torch.Tensor]:
        with harness.vllm_engine(model_folder(name), draft_max_model_len=1024, **_options("float32")) as engine:
            return _run(engine, **REAL_CASE, by_hand=False)[0]

    return logits


@pytest.mark.real_models
@pytest.mark.parametrize("kind", ["bfloat16", "int8 bfloat16", "int8 float32"])
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"])
def test_real_models(
    model_folder: Callable[[str], Path],
    layers_in_float32: Callable[[str], list[torch.Tensor]],
    name: str,
    kind: str,
) -> None:
    _needs_own_kernels(kind)
    with harness.vllm_engine(model_folder(name), draft_max_model_len=1024, **_options(kind)) as engine:
        step = engine._forward.hand_step
        assert step is not None
        assert step.has_int8_layers is (kind.startswith("int8") and _own_kernels_run_here())
        found, _ = _run(engine, **REAL_CASE, by_hand=True, prompt_by_hand=step.takes_every_pass)
        expected = [] if step.takes_every_pass else _run(engine, **REAL_CASE, by_hand=False)[0]
    # Layers in bfloat16 are themselves off by as much in places, so own weights are measured by those in float32.
    expected = expected or layers_in_float32(name)
    # Random tokens, the worst there is for int8 activations over 30 layers.
    least = 0.99 if kind == "bfloat16" else 0.93
    for logits, hand_logits in zip(expected, found, strict=True):
        for pair in zip(logits, hand_logits, strict=True):
            assert torch.corrcoef(torch.stack(pair))[0, 1] > least
