"""Sparse rows into the shape in which vLLM's rejection sampler reads draft probabilities.

Owns one flat buffer, float32 [max_rows, vocabulary], allocated once, on first use. It is all zeros between cycles: a
cycle's entries are taken back before the next cycle writes its own, so nothing dense is cleared or allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
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
        self._through_numpy = device.type == "cpu"
        self._buffer: torch.Tensor | None = None
        self._written: npt.NDArray[np.int64] | None = None
        self._written_on_device: torch.Tensor | None = None

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
        starts = [0, *accumulate(counts)]
        if starts[-1] > self.capacity:
            raise ValueError(f"{starts[-1]} rows, room for {self.capacity}")
        offsets, ids, probs = [], [], []
        for proposal in proposals:
            rows, count = proposal.rows, len(proposal.ids_in_target_vocab)
            if rows is not None:
                offsets.append(rows.offsets)
                ids.append(rows.ids_in_target_vocab)
                probs.append(rows.probs)
            elif count:
                # vLLM drops the rows of the whole batch when one proposed request has none.
                offsets.append(np.arange(count + 1, dtype=np.int32))
                ids.append(np.array(proposal.ids_in_target_vocab, dtype=np.int32))
                probs.append(np.ones(count, dtype=np.float32))
        lengths = np.concatenate([each[1:] - each[:-1] for each in offsets])
        where = np.repeat(np.arange(len(lengths), dtype=np.int64) * self._vocab_size, lengths)
        where += np.concatenate(ids)
        return RaggedRows(self._write(where, np.concatenate(probs)), starts[:-1], counts)

    def _write(self, where: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> torch.Tensor:
        """Put values at places of the flat buffer, in place of those of the last cycle."""
        if self._buffer is None:
            self._buffer = torch.zeros(self.capacity, self._vocab_size, dtype=torch.float32, device=self._device)
        if self._through_numpy:
            # Through numpy: PyTorch's index_put_ costs ten times as much for so few values.
            flat = self._buffer.view(-1).numpy()
            if self._written is not None:
                flat[self._written] = 0.0
            self._written = None
            flat[where] = values
            self._written = where
            return self._buffer
        if self._written_on_device is not None:
            self._buffer.view(-1).index_fill_(0, self._written_on_device, 0.0)
        self._written_on_device = None
        places = self._tensor(where)
        self._buffer.view(-1).index_copy_(0, places, self._tensor(values))
        self._written_on_device = places
        return self._buffer

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
