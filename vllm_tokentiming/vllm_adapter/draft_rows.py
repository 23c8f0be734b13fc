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

from vllm_tokentiming.transfer.interface import Proposals

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
        self._flat: npt.NDArray[np.float32] = np.empty(0, dtype=np.float32)
        self._written: npt.NDArray[np.int64] | None = None
        self._written_on_device: torch.Tensor | None = None

    def fill(self, proposals: Proposals) -> RaggedRows | None:
        """Rows for all proposals of a batch.

        Returns:
            None where every proposal is a point mass, which is what the sampler assumes without rows.

        Raises:
            ValueError: rows of another width, or more rows than the capacity. The caller must not let it come to that:
                whether rows are used has to be decided before anything is drawn.
        """
        rows = proposals.rows
        if rows is None or not len(rows.places):
            return None
        counts = [len(ids) for ids in proposals.ids_in_target_vocab]
        starts = [0, *accumulate(counts)]
        if starts[-1] > self.capacity or rows.vocab_size != self._vocab_size:
            raise ValueError(
                f"{starts[-1]} rows over {rows.vocab_size} tokens, room for {self.capacity} over {self._vocab_size}"
            )
        return RaggedRows(self._write(rows.places, rows.probs), starts[:-1], counts)

    def _write(self, where: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> torch.Tensor:
        """Put values at places of the flat buffer, in place of those of the last cycle."""
        if self._buffer is None:
            self._buffer = torch.zeros(self.capacity, self._vocab_size, dtype=torch.float32, device=self._device)
            if self._through_numpy:
                self._flat = self._buffer.view(-1).numpy()
        if self._through_numpy:
            # Through numpy: PyTorch's index_put_ costs ten times as much for so few values.
            if self._written is not None:
                self._flat[self._written] = 0.0
            self._written = None
            self._flat[where] = values
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
