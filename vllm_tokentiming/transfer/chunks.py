"""What each chunk of draft tokens becomes in the target's vocabulary, computed once and kept for the kernel.

Owns: :class:`ChunkTable` owns the encodings of every chunk seen. Chunks of a single token are kept for good (the whole
vocabulary may be filled at start-up); those with a run before their last token share a bounded part, emptied when it is
full.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.errors import ConfigError, VocabularyError
from vllm_tokentiming.transfer.chunk_kernel import insert_many, key_slots

Run = tuple[int, ...]


class ChunkEncoder(Protocol):
    """The target's encoding of chunks: a pure function of its arguments."""

    def __call__(self, run: Run, lasts: Sequence[int], /) -> Sequence[tuple[int, ...]]:
        """For each last token d the target ids of bytes(run) + bytes(d); () where they cannot be encoded exactly.

        A draft token that means the end of the text is encoded as the target's end token.
        """


class LinkCertifier(Protocol):
    """Which proxy tokens may carry the law of their chunk's last draft token: a pure function of its arguments."""

    def __call__(
        self, run: Run, lasts: Sequence[int], encodings: Sequence[tuple[int, ...]], /
    ) -> Sequence[Sequence[bool]]:
        """For each last token, for each of its proxy tokens: the alignment links them and the chunk's bytes agree."""


def every_link(_run: Run, _lasts: Sequence[int], encodings: Sequence[tuple[int, ...]], /) -> Sequence[Sequence[bool]]:
    """A certifier that trusts the encoder."""
    return [(True,) * len(encoding) for encoding in encodings]


class ChunkTable:
    """Encodings and links by (run, last token), in flat arrays that the kernel reads.

    Entry e holds ``proxies[starts[e]:starts[e + 1]]`` and as many flags in ``linked``.

    Args:
        draft_vocab_size: rows of the draft's logits.
        target_vocab_size: rows of the target's logits.
        encode: the target's encoding of chunks.
        certify: which links carry laws.
        max_run_chunks: how many chunks with a run are kept, give or take those of one cycle.

    Raises:
        ConfigError: a size below 1.
    """

    def __init__(
        self,
        *,
        draft_vocab_size: int,
        target_vocab_size: int,
        encode: ChunkEncoder,
        certify: LinkCertifier = every_link,
        max_run_chunks: int = 1 << 18,
    ) -> None:
        if min(draft_vocab_size, target_vocab_size, max_run_chunks) < 1:
            raise ConfigError(
                f"draft_vocab_size is {draft_vocab_size}, target_vocab_size {target_vocab_size}, max_run_chunks "
                f"{max_run_chunks}; each must be at least 1."
            )
        self.draft_vocab_size = draft_vocab_size
        self.target_vocab_size = target_vocab_size
        self._encode = encode
        self._certify = certify
        self._max_run_chunks = max_run_chunks
        self.entry_of_single: npt.NDArray[np.int32] = np.full(draft_vocab_size, -1, dtype=np.int32)
        self.keys: npt.NDArray[np.int64]
        self.entries: npt.NDArray[np.int32]
        self._num_run_chunks: int
        self._run_numbers: dict[Run, int]
        self.starts: npt.NDArray[np.int32] = np.zeros(1025, dtype=np.int32)
        self.proxies: npt.NDArray[np.int32] = np.zeros(1024, dtype=np.int32)
        self.linked: npt.NDArray[np.bool_] = np.zeros(1024, dtype=np.bool_)
        self._num_entries = 0
        self._forget_runs()

    @property
    def num_run_chunks(self) -> int:
        """Chunks with a run that are kept now."""
        return self._num_run_chunks

    def number_of(self, run: Run) -> int:
        """The number by which the kernel knows a run; 0 for the empty one. Numbers hold until chunks are forgotten."""
        number = self._run_numbers.get(run)
        if number is None:
            number = len(self._run_numbers)
            self._run_numbers[run] = number
        return number

    def add(self, run: Run, lasts: Sequence[int]) -> None:
        """Encode and keep chunks that are not in the table yet.

        Raises:
            VocabularyError: the encoder answered with ids that the target does not have, or the certifier with flags of
                another
                number than there are proxy tokens.
        """
        encodings = [tuple(encoding) for encoding in self._encode(run, lasts)]
        links = self._certify(run, lasts, encodings)
        if len(encodings) != len(lasts) or len(links) != len(lasts):
            raise VocabularyError(
                f"{len(lasts)} chunks were asked for; the encoder gave {len(encodings)}, the certifier {len(links)}."
            )
        first = self._append(encodings, links)
        if not run:
            self.entry_of_single[list(lasts)] = np.arange(first, first + len(lasts))
            return
        kept = self._num_run_chunks + len(lasts)
        if kept * 2 > len(self.keys):
            self._rehash(key_slots(kept))
        insert_many(
            self.keys,
            self.entries,
            self.number_of(run) * self.draft_vocab_size + np.array(lasts, dtype=np.int64),
            np.arange(first, first + len(lasts), dtype=np.int32),
        )
        self._num_run_chunks = kept

    def make_room(self) -> None:
        """Forget the chunks with a run if they are too many.

        Between two transfers only: the numbers of runs are void after it.
        """
        if self._num_run_chunks >= self._max_run_chunks or len(self._run_numbers) > self._max_run_chunks:
            self._keep_singles_only()

    def warm_up(self) -> None:
        """Compile what adding chunks takes."""
        self._rehash(len(self.keys))

    def add_singles(self, limit: int | None = None) -> None:
        """Fill the table of single-token chunks (at start-up): of the first ``limit`` draft tokens, or of all."""
        missing = np.flatnonzero(self.entry_of_single[:limit] < 0).tolist()
        if missing:
            self.add((), missing)

    def _append(self, encodings: Sequence[tuple[int, ...]], links: Sequence[Sequence[bool]]) -> int:
        """Store entries, one after the other; the number of the first."""
        for encoding, flags in zip(encodings, links, strict=True):
            if len(flags) != len(encoding):
                raise VocabularyError(
                    f"the certifier gave {len(flags)} flags for the {len(encoding)} proxy tokens {encoding}."
                )
        stored = np.fromiter(chain.from_iterable(encodings), dtype=np.int64)
        if len(stored) and not (stored.min() >= 0 and stored.max() < self.target_vocab_size):
            raise VocabularyError(
                f"the encoder gave ids from {stored.min()} to {stored.max()}; they must be 0 or more and below the "
                f"target's {self.target_vocab_size}."
            )
        first, start = self._num_entries, int(self.starts[self._num_entries])
        last, stop = first + len(encodings), start + len(stored)
        if last + 1 > len(self.starts):
            self.starts = np.resize(self.starts, max(2 * len(self.starts), last + 1))
        if stop > len(self.proxies):
            size = max(2 * len(self.proxies), stop)
            self.proxies = np.resize(self.proxies, size)
            self.linked = np.resize(self.linked, size)
        self.proxies[start:stop] = stored
        self.linked[start:stop] = np.fromiter(chain.from_iterable(links), dtype=np.bool_)
        np.cumsum(np.fromiter(map(len, encodings), dtype=np.int32), out=self.starts[first + 1 : last + 1])
        self.starts[first + 1 : last + 1] += start
        self._num_entries = last
        return first

    def _forget_runs(self) -> None:
        slots = key_slots(min(self._max_run_chunks, 512))
        self.keys = np.full(slots, -1, dtype=np.int64)
        self.entries = np.full(slots, -1, dtype=np.int32)
        self._num_run_chunks = 0
        self._run_numbers = {(): 0}

    def _keep_singles_only(self) -> None:
        kept = np.flatnonzero(self.entry_of_single >= 0)
        entries = self.entry_of_single[kept]
        old_starts = self.starts[entries]
        lengths = self.starts[entries + 1] - old_starts
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        source = np.repeat(old_starts - starts[:-1], lengths) + np.arange(starts[-1])
        self.starts[: len(starts)] = starts
        self.proxies[: len(source)] = self.proxies[source]
        self.linked[: len(source)] = self.linked[source]
        self.entry_of_single[kept] = np.arange(len(kept))
        self._num_entries = len(kept)
        self._forget_runs()

    def _rehash(self, slots: int) -> None:
        keys, entries = self.keys, self.entries
        self.keys = np.full(slots, -1, dtype=np.int64)
        self.entries = np.full(slots, -1, dtype=np.int32)
        taken = np.flatnonzero(keys >= 0)
        insert_many(self.keys, self.entries, keys[taken], entries[taken])
