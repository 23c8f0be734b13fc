"""What each chunk of draft tokens becomes in the target's vocabulary, computed once and kept for the kernel.

Owns: :class:`ChunkTable` owns the encodings of every chunk seen. Chunks of a single token are kept for good (the whole
vocabulary may be filled at start-up); those with a run before their last token share a bounded part, emptied when it is
full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.errors import ConfigError, VocabularyError
from vllm_tokentiming.transfer.chunk_kernel import EMPTY, REST_SHIFT, UNKNOWN, insert_many, key_slots, pack_entries

Run = tuple[int, ...]
Chunk = tuple[int, ...]
"""A run and the token behind it."""


class ChunkEncoder(Protocol):
    """The target's encoding of chunks: a pure function of its arguments."""

    def __call__(self, run: Run, lasts: Sequence[int], /) -> Sequence[tuple[int, ...]]:
        """For each last token d the target ids of bytes(run) + bytes(d); () where they cannot be encoded exactly.

        A draft token that means the end of the text is encoded as the target's end token.
        """


class LinkCertifier(Protocol):
    """Which proxy tokens may carry the law of their chunk's last draft token: a pure function of its arguments."""

    def __call__(self, chunks: Sequence[Chunk], encodings: Sequence[tuple[int, ...]], /) -> Sequence[bool]:
        """For each proxy token of each chunk, one after the other: the alignment links it, and the bytes agree."""


def every_link(_chunks: Sequence[Chunk], encodings: Sequence[tuple[int, ...]], /) -> Sequence[bool]:
    """A certifier that trusts the encoder."""
    return [True] * sum(map(len, encodings))


class ChunkTable:
    """Encodings and links by (run, last token), in flat arrays that the kernel reads.

    A chunk's encoding is a word (``chunk_kernel.ELEMENT``): in ``singles`` by its token where it has no run, else in
    the hash table ``slots`` under run number · draft vocabulary + last token. A run's number is found token by token:
    that of one token is one more than the token; that of a longer one stands in ``slots`` under the complement of
    what would be the key of a chunk.

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
        self.singles: npt.NDArray[np.int64] = np.full(draft_vocab_size, UNKNOWN, dtype=np.int64)
        self.slots: npt.NDArray[np.int64]
        self._num_keys: int
        self._num_run_chunks: int
        self._run_numbers: dict[Run, int]
        self.proxies: npt.NDArray[np.int32] = np.zeros(1024, dtype=np.int32)
        self._num_proxies = self._num_kept_proxies = 0
        self._forget_runs()

    @property
    def num_run_chunks(self) -> int:
        """Chunks with a run that are kept now."""
        return self._num_run_chunks

    def add(self, wanted: Mapping[Run, Sequence[int]]) -> None:
        """Encode and keep chunks that are not in the table yet: for each run, its last tokens.

        Raises:
            VocabularyError: the encoder answered with ids that the target does not have, or the certifier with flags of
                another number than there are proxy tokens.
        """
        chunks: list[Chunk] = []
        encodings: list[tuple[int, ...]] = []
        for run, lasts in wanted.items():
            chunks += [(*run, last) for last in lasts]
            encodings += map(tuple, self._encode(run, lasts))
        words = self._pack(encodings, self._certify(chunks, encodings), number=len(chunks))
        keys: list[int] = []
        edges: dict[int, int] = {}
        for run, lasts in wanted.items():
            base = self._number_of(run, edges) * self.draft_vocab_size
            keys += [base + last for last in lasts]
            self._num_run_chunks += len(lasts) if run else 0
        self._insert(keys, words)
        if edges:
            self._insert(list(edges), np.array(list(edges.values()), dtype=np.int64))

    def make_room(self) -> None:
        """Forget the chunks with a run if they are too many.

        Between two transfers only: the numbers of runs are void after it.
        """
        if self._num_run_chunks >= self._max_run_chunks or len(self._run_numbers) > self._max_run_chunks:
            self._keep_singles_only()

    def add_singles(self, limit: int | None = None) -> None:
        """Fill the table of single-token chunks (at start-up): of the first ``limit`` draft tokens, or of all."""
        self.add({(): np.flatnonzero(self.singles[:limit] == UNKNOWN).tolist()})
        self._num_kept_proxies = self._num_proxies

    def _number_of(self, run: Run, edges: dict[int, int]) -> int:
        """The run's number, which holds until runs are forgotten; new ones and those before them go into ``edges``."""
        if len(run) < 2:
            return run[0] + 1 if run else 0
        number = self._run_numbers.get(run)
        if number is None:
            before = self._number_of(run[:-1], edges)
            number = self._run_numbers[run] = self.draft_vocab_size + 1 + len(self._run_numbers)
            edges[~(before * self.draft_vocab_size + run[-1])] = number
        return number

    def _pack(
        self, encodings: Sequence[tuple[int, ...]], links: Sequence[bool], *, number: int
    ) -> npt.NDArray[np.int64]:
        """Store encodings; their words."""
        tokens = np.fromiter(chain.from_iterable(encodings), dtype=np.int64)
        if len(encodings) != number or len(links) != len(tokens):
            raise VocabularyError(
                f"{number} chunks were asked for; the encoder gave {len(encodings)}, the certifier {len(links)} flags "
                f"for {len(tokens)} proxy tokens."
            )
        start = self._num_proxies
        if start + len(tokens) > len(self.proxies):
            self.proxies = np.resize(self.proxies, max(2 * len(self.proxies), start + len(tokens)))
        words = np.empty(number, dtype=np.int64)
        lengths = np.fromiter(map(len, encodings), dtype=np.int64, count=number)
        flags = np.array(links, dtype=np.bool_)
        if not pack_entries(tokens, flags, lengths, self.target_vocab_size, self.proxies, start, words):
            raise VocabularyError(
                f"the encoder gave ids from {tokens.min()} to {tokens.max()}; they must be 0 or more and below the "
                f"target's {self.target_vocab_size}."
            )
        self._num_proxies += len(tokens)
        return words

    def _insert(self, keys: Sequence[int], words: npt.NDArray[np.int64]) -> None:
        """Into ``singles`` what has no run, the rest into ``slots``."""
        self._num_keys += len(keys)
        if self._num_keys * 2 > len(self.slots):
            taken = self.slots[self.slots[:, 0] != EMPTY]
            self.slots = _empty_slots(self._num_keys)
            insert_many(self.slots, self.singles, taken[:, 0].copy(), taken[:, 1].copy())
        insert_many(self.slots, self.singles, np.array(keys, dtype=np.int64), words)

    def _forget_runs(self) -> None:
        self.slots = _empty_slots(min(self._max_run_chunks, 512))
        self._num_keys = self._num_run_chunks = 0
        self._run_numbers = {}

    def _keep_singles_only(self) -> None:
        # Single tokens that came after those of the start-up go as well; the next law that names them brings them back.
        self.singles[self.singles >> REST_SHIFT > self._num_kept_proxies] = UNKNOWN
        self._num_proxies = self._num_kept_proxies
        self._forget_runs()


def _empty_slots(num_keys: int) -> npt.NDArray[np.int64]:
    return np.full((key_slots(num_keys), 2), EMPTY, dtype=np.int64)
