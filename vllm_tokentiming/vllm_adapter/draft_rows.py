"""Sparse rows into the shape in which vLLM's rejection sampler reads draft probabilities.

Owns one flat buffer, float32 [max_rows, vocabulary], allocated once, on first use. It is all zeros between cycles: a
cycle's entries are taken back before the next cycle writes its own, so nothing dense is cleared or allocated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_tokentiming.transfer.interface import Proposal

DEFAULT_BUFFER_BYTES = 256 << 20


class RaggedRows:
    """What ``GPUModelRunner._draft_probs[request_row, :n]`` reads: that request's first n rows, [n, V]."""

    def __init__(self, buffer: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        self._buffer = buffer
        self._starts = starts
        self._counts = counts

    def __getitem__(self, key: tuple[int, slice]) -> torch.Tensor:
        row, wanted = key
        stop = wanted.stop if wanted.stop is not None else self._counts[row]
        if wanted.start not in (None, 0) or wanted.step not in (None, 1) or stop > self._counts[row]:
            raise IndexError(f"request row {row} has {self._counts[row]} draft rows, not {wanted}")
        start = self._starts[row]
        return self._buffer[start : start + stop]


class DraftRows:
    """Turns proposals into :class:`RaggedRows`.

    Args:
        vocab_size: width of the target's logits.
        device: the sampler's.
        max_rows: most proposed tokens in a cycle (batch × num_speculative_tokens).
        max_bytes: bound on the buffer.

    Attributes:
        capacity: rows that it holds.
    """

    def __init__(
        self, *, vocab_size: int, device: torch.device, max_rows: int, max_bytes: int = DEFAULT_BUFFER_BYTES
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.capacity = max(1, min(max_rows, max_bytes // (4 * vocab_size)))
        self._buffer: torch.Tensor | None = None
        self._written: tuple[torch.Tensor, torch.Tensor] | None = None

    def fill(self, proposals: Sequence[Proposal]) -> RaggedRows | None:
        """Rows for all proposals of a batch.

        Returns:
            None where every proposal is a point mass, which is what the sampler assumes without rows.

        Raises:
            ValueError: more rows than the capacity. The caller must not let it come to that: whether rows are used has
                to be decided before anything is drawn.
        """
        if not any(p.rows is not None for p in proposals):
            return None
        counts = [len(p.ids_in_target_vocab) for p in proposals]
        starts = np.cumsum([0, *counts])
        if starts[-1] > self.capacity:
            raise ValueError(f"{starts[-1]} rows, room for {self.capacity}")
        rows, ids, probs = [], [], []
        for start, proposal in zip(starts, proposals, strict=False):
            sparse, count = proposal.rows, len(proposal.ids_in_target_vocab)
            if sparse is None:
                # vLLM drops the rows of the whole batch when one proposed request has none.
                rows.append(np.arange(start, start + count))
                ids.append(np.asarray(proposal.ids_in_target_vocab, dtype=np.int64))
                probs.append(np.ones(count, dtype=np.float32))
            else:
                rows.append(start + np.repeat(np.arange(count), np.diff(sparse.offsets)))
                ids.append(sparse.ids_in_target_vocab.astype(np.int64))
                probs.append(sparse.probs)
        buffer = self._cleared_buffer()
        where = (self._tensor(np.concatenate(rows)), self._tensor(np.concatenate(ids)))
        buffer.index_put_(where, self._tensor(np.concatenate(probs)))
        self._written = where
        return RaggedRows(buffer, [int(s) for s in starts[:-1]], counts)

    def _cleared_buffer(self) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.zeros(self.capacity, self._vocab_size, dtype=torch.float32, device=self._device)
        elif self._written is not None:
            self._buffer.index_put_(self._written, self._buffer.new_zeros(()))
        self._written = None
        return self._buffer

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
