"""One forward pass of the draft on vLLM's layers: ragged prefill and decode through the same path.

A pass of few tokens may have a shorter path, ``hand_step``; without one it takes vLLM's. A step with weights of its own
takes every pass. Short passes on a GPU may be CUDA graphs, ``graphs``. Owns the input buffers. On CPU the host and
device sides of a buffer are one tensor. A decode loop updates positions, lengths and slots on the device, so nothing is
synchronised between its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.utils import CpuGpuBuffer

from vllm_tokentiming.engine.vllm_graphs import DraftGraphs, Graph
from vllm_tokentiming.engine.vllm_kv_cache import DraftKVCache

_SHORT_PASS = 32
"""Tokens up to which the dispatch of vLLM's layers, and not their arithmetic, is what a pass waits for. A pass by hand
has no more."""


class HandStep(Protocol):
    """A pass of few tokens, or any, without the dispatch of vLLM's layers."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it takes."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the model and its KV."""

    @property
    def is_quantized(self) -> bool:
        """Whether inputs are rounded to few bits."""

    @property
    def has_int8_layers(self) -> bool:
        """Whether it runs on int8 kernels of our own."""

    @property
    def takes_every_pass(self) -> bool:
        """Whether its weights are others than the model's, which must then compute none of a request's tokens."""

    def __call__(
        self,
        ids: torch.Tensor,
        *,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slots: torch.Tensor,
        query_start: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the KV of ``ids`` and return the hidden states after them, [N, H]: a buffer that the next call reuses.

        Args:
            ids: int32 or int64 [N], row after row.
            positions: int64 [N], of these tokens.
            seq_lens: int32 [B], these tokens included.
            block_table: int32 [B, width].
            slots: int64 [N], room for where the KV goes.
            query_start: int32 [B + 1], where each row's tokens begin; None: a row has one, so N = B.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] of hidden states after a pass, [rows, H]."""


def _buffer(*shape: int, dtype: torch.dtype, device: torch.device) -> CpuGpuBuffer:
    buffer = CpuGpuBuffer(*shape, dtype=dtype, device=device)
    if device.type == "cpu":
        buffer.gpu = buffer.cpu
    return buffer


class DraftForward:
    """Runs the draft model on prepared batches.

    Args:
        model: the draft, loaded by vLLM.
        config: its own config.
        cache: its KV.
        max_tokens: most tokens in one pass.
        max_requests: most rows in one pass.
    """

    def __init__(
        self,
        *,
        model: Any,
        config: VllmConfig,
        cache: DraftKVCache,
        device: torch.device,
        max_tokens: int,
        max_requests: int,
    ) -> None:
        self._model = model
        self._config = config
        self._cache = cache
        self._device = device
        self.max_tokens = max_tokens
        self.max_requests = max_requests
        self.hand_step: HandStep | None = None
        self.graphs: DraftGraphs | None = None
        # One block more than the longest context: the slots of tokens past it are computed, though never used.
        self._width = -(-config.model_config.max_model_len // cache.block_size) + 1
        self._layer_names = cache.layer_names()
        self._input_ids = _buffer(max_tokens, dtype=torch.int32, device=device)
        self._positions = _buffer(max_tokens, dtype=torch.int64, device=device)
        self._slots = _buffer(max_tokens, dtype=torch.int64, device=device)
        self._query_start = _buffer(max_requests + 1, dtype=torch.int32, device=device)
        self._seq_lens = _buffer(max_requests, dtype=torch.int32, device=device)
        # What backends plan with on the host. Not the staging side of the buffer, which a copy may still read.
        on_cpu = device.type == "cpu"
        self._host_seq_lens = self._seq_lens.cpu if on_cpu else torch.zeros(max_requests, dtype=torch.int32)
        self._copied = None if on_cpu else torch.Event(device)
        self._block_table = _buffer(max_requests, self._width, dtype=torch.int32, device=device)
        self._one_each = torch.arange(max_requests + 1, dtype=torch.int32)
        self._one_each_on_device = self._one_each.to(device)
        self._step_start = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_requests, device=device)

    @torch.inference_mode()
    def prefill(
        self, *, ids: Sequence[Sequence[int]], starts: Sequence[int], block_ids: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Append ``ids[i]`` at position ``starts[i]`` of row i; return the logits after its last token, [B, V]."""
        self._await_copies()
        lengths = np.fromiter((len(row) for row in ids), dtype=np.int64, count=len(ids))
        first = np.asarray(starts, dtype=np.int64)
        rows, tokens = len(ids), int(lengths.sum())
        self._fill_block_table(block_ids)
        ends = np.cumsum(lengths)
        of_row = np.repeat(np.arange(rows), lengths)
        positions = np.arange(tokens) - (ends - lengths)[of_row] + first[of_row]
        self._positions.np[:tokens] = positions
        block, offset = np.divmod(positions, self._cache.block_size)
        self._slots.np[:tokens] = self._block_table.np[of_row, block].astype(np.int64) * self._cache.block_size + offset
        self._input_ids.np[:tokens] = np.fromiter((i for row in ids for i in row), dtype=np.int32, count=tokens)
        self._query_start.np[0] = 0
        self._query_start.np[1 : rows + 1] = ends
        self._seq_lens.np[:rows] = first + lengths
        self._to_device(tokens=tokens, rows=rows)
        query_start = self._query_start.gpu[: rows + 1]
        if self.hand_step is not None and self.hand_step.takes_every_pass:
            return self._prefill_by_hand(self.hand_step, of_row=of_row)
        if self.hand_step is not None and tokens <= _SHORT_PASS:
            hidden = self._run_by_hand(self.hand_step, tokens=tokens, rows=rows, query_start=query_start)
            return self.hand_step.logits(hidden[(query_start[1:] - 1).long()])
        common = self._common(
            tokens=tokens,
            rows=rows,
            query_start=(query_start, self._query_start.cpu[: rows + 1]),
            max_query_len=int(lengths.max()),
            max_seq_len=int((first + lengths).max()),
        )
        graph = None if self.graphs is None else self.graphs.of_pass(tokens)
        hidden = self._run(common, tokens=tokens, graph=graph)
        return self._logits(hidden[(query_start[1:] - 1).long()])

    def _prefill_by_hand(self, step: HandStep, *, of_row: npt.NDArray[np.int64]) -> torch.Tensor:
        """The tokens of the input buffers in several passes; on CPU, where host and device are one.

        Args:
            step: takes the passes, and computes each token alike whatever else is in its pass.
            of_row: [tokens], the row of each.
        """
        last: list[torch.Tensor] = []
        for begin in range(0, len(of_row), _SHORT_PASS):
            tokens = slice(begin, min(begin + _SHORT_PASS, len(of_row)))
            first, end = int(of_row[tokens.start]), int(of_row[tokens.stop - 1]) + 1
            row_edges = self._query_start.np[first : end + 1]
            edges = np.clip(row_edges, tokens.start, tokens.stop) - tokens.start
            hidden = step(
                self._input_ids.gpu[tokens],
                positions=self._positions.gpu[tokens],
                seq_lens=(self._positions.gpu[tokens][torch.from_numpy(edges[1:] - 1)] + 1).int(),
                block_table=self._block_table.gpu[first:end],
                slots=self._slots.gpu[tokens],
                query_start=torch.from_numpy(edges),
            )
            last += [hidden[edge - begin - 1].clone() for edge in row_edges[1:].tolist() if edge <= tokens.stop]
        return step.logits(torch.stack(last))

    @torch.inference_mode()
    def begin_decode(self, *, lengths: Sequence[int], block_ids: Sequence[Sequence[int]]) -> None:
        """Prepare rows whose caches hold ``lengths`` tokens for :meth:`decode_step`."""
        self._await_copies()
        rows = len(lengths)
        self._fill_block_table(block_ids)
        self._seq_lens.np[:rows] = lengths
        self._positions.np[:rows] = np.asarray(lengths, dtype=np.int64) - 1
        self._to_device(tokens=rows, rows=rows)
        self._longest = max(lengths)

    @torch.inference_mode()
    def decode_step(self, ids: torch.Tensor) -> torch.Tensor:
        """Append one token to each of the first ``len(ids)`` rows; return their logits, [B', V], not synchronised."""
        rows = len(ids)
        positions, slots = self._positions.gpu[:rows], self._slots.gpu[:rows]
        self._input_ids.gpu[:rows].copy_(ids)
        positions.add_(1)
        self._seq_lens.gpu[:rows].add_(1)
        if self._copied is not None:
            self._host_seq_lens[:rows].add_(1)
        self._longest += 1
        if self.hand_step is not None:
            return self.hand_step.logits(self._run_by_hand(self.hand_step, tokens=rows, rows=rows))
        block = torch.div(positions, self._cache.block_size, rounding_mode="floor")
        torch.add(
            self._block_table.gpu[self._rows[:rows], block].long() * self._cache.block_size,
            positions % self._cache.block_size,
            out=slots,
        )
        graph = None if self.graphs is None else self.graphs.of_step(rows)
        padded, query_start = rows, (self._one_each_on_device[: rows + 1], self._one_each[: rows + 1])
        if graph is not None and graph.is_full:
            padded = graph.num_tokens
            query_start = self._pad_step(rows, padded)
        common = self._common(
            tokens=padded, rows=padded, query_start=query_start, max_query_len=1, max_seq_len=self._longest
        )
        return self._logits(self._run(common, tokens=rows, graph=graph)[:rows])

    def use_graphs(self) -> None:
        """Capture and replay short passes as CUDA graphs from now on; the draft's config says which."""
        self.graphs = DraftGraphs(
            self._model, config=self._config, max_tokens=self.max_tokens, max_rows=self.max_requests
        )

    def _pad_step(self, rows: int, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Put rows of no tokens and no context behind a step's own, as vLLM pads what a whole graph takes.

        Returns:
            where each row's tokens begin, int32 [padded + 1], on the device and on the host.
        """
        self._seq_lens.gpu[rows:padded].fill_(0)
        self._host_seq_lens[rows:padded].fill_(0)
        query_start = self._step_start[: padded + 1]
        torch.clamp(self._one_each_on_device[: padded + 1], max=rows, out=query_start)
        return query_start, self._one_each[: padded + 1].clamp(max=rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile for any shape: one pass without attention metadata, which writes no KV."""
        tokens = min(self.max_tokens, self._config.scheduler_config.max_num_batched_tokens)
        with set_forward_context(None, self._config, num_tokens=tokens):
            self._model(input_ids=self._input_ids.gpu[:tokens], positions=self._positions.gpu[:tokens])

    def _common(
        self,
        *,
        tokens: int,
        rows: int,
        query_start: tuple[torch.Tensor, torch.Tensor],
        max_query_len: int,
        max_seq_len: int,
    ) -> CommonAttentionMetadata:
        """What attention is told of a pass; ``query_start`` on the device and on the host."""
        return CommonAttentionMetadata(
            query_start_loc=query_start[0],
            query_start_loc_cpu=query_start[1],
            seq_lens=self._seq_lens.gpu[:rows],
            num_reqs=rows,
            num_actual_tokens=tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            block_table_tensor=self._block_table.gpu[:rows],
            slot_mapping=self._slots.gpu[:tokens],
            causal=True,
            positions=self._positions.gpu[:tokens],
            seq_lens_cpu_upper_bound=self._host_seq_lens[:rows],
        )

    def _run(self, common: CommonAttentionMetadata, *, tokens: int, graph: Graph | None) -> torch.Tensor:
        """The tokens of the input buffers, and as many of padding behind them as the graph wants: [tokens, H]."""
        padded = tokens
        if graph is not None:
            padded = graph.num_tokens
            self._slots.gpu[tokens:padded].fill_(PAD_SLOT_ID)
        slot_mapping = dict.fromkeys(self._layer_names, self._slots.gpu[:padded])
        model = self._model if self.graphs is None else self.graphs.model

        def take(mode: CUDAGraphMode, metadata: dict[str, Any] | None) -> torch.Tensor:
            # Without slot_mapping in the context nothing is written to the cache, silently.
            with set_forward_context(
                metadata,
                self._config,
                num_tokens=padded,
                cudagraph_runtime_mode=mode,
                batch_descriptor=None if graph is None else graph.descriptor,
                slot_mapping=None if metadata is None else slot_mapping,
            ):
                hidden: torch.Tensor = model(
                    input_ids=self._input_ids.gpu[:padded], positions=self._positions.gpu[:padded]
                )
            return hidden

        metadata = self._cache.build_metadata(common)
        if graph is None or self.graphs is None:
            return take(CUDAGraphMode.NONE, metadata)

        def capture() -> None:
            if not graph.is_full:
                # Attention is not recorded but run, on what has not been computed: it must write no KV.
                take(graph.mode, None)
                return
            # A graph keeps what its kernels are told of the longest context. Some backends set lengths to their liking.
            seq_lens = self._seq_lens.gpu.clone()
            longest = common.replace(max_seq_len=self._config.model_config.max_model_len)
            try:
                take(graph.mode, self._cache.build_metadata(longest, for_capture=True))
            finally:
                self._seq_lens.gpu.copy_(seq_lens)

        return self.graphs.run(graph, take=lambda mode: take(mode, metadata), capture=capture)

    def _run_by_hand(
        self, step: HandStep, *, tokens: int, rows: int, query_start: torch.Tensor | None = None
    ) -> torch.Tensor:
        return step(
            self._input_ids.gpu[:tokens],
            positions=self._positions.gpu[:tokens],
            seq_lens=self._seq_lens.gpu[:rows],
            block_table=self._block_table.gpu[:rows],
            slots=self._slots.gpu[:tokens],
            query_start=query_start,
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.compute_logits(hidden)
        return logits

    def _fill_block_table(self, block_ids: Sequence[Sequence[int]]) -> None:
        for row, blocks in enumerate(block_ids):
            self._block_table.np[row, : len(blocks)] = blocks

    def _to_device(self, *, tokens: int, rows: int) -> None:
        if self._copied is None:
            return
        self._host_seq_lens[:rows].copy_(self._seq_lens.cpu[:rows])
        for buffer in (self._input_ids, self._positions, self._slots):
            buffer.copy_to_gpu(tokens)
        for buffer in (self._seq_lens, self._block_table):
            buffer.copy_to_gpu(rows)
        self._query_start.copy_to_gpu(rows + 1)
        self._copied.record()

    def _await_copies(self) -> None:
        # The copies are asynchronous: what they read must not be overwritten before they are done.
        if self._copied is not None:
            self._copied.synchronize()
