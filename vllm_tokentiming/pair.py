"""What is known of a pair of vocabularies: proxy tokens, alignments, chunk encodings with their links, boundaries.

Composes the rooms that do not know each other. Owns the chunk table and the learned set E of the pair; both grow from
use and are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.alignment import Aligner
from vllm_tokentiming.alignment.spelling import common_ends
from vllm_tokentiming.transfer.boundary_prior import extendable_prior
from vllm_tokentiming.transfer.chunks import ChunkTable
from vllm_tokentiming.transfer.exact import ChunkTransfer
from vllm_tokentiming.transfer.extendable import Extendable, ExtendableSet
from vllm_tokentiming.vocabulary import DraftContext, ProxyTokenizer, SpecialTokenMap, Vocabulary

ByteArray = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]

_OBSERVED_TOKENS: Final = 64
"""Committed target tokens that are looked at together for their boundaries."""

_OBSERVED_PROMPT_TOKENS: Final = 512


class Pair:
    """A target's and a draft's vocabulary.

    Args:
        target: the target's vocabulary.
        draft: the draft's.
        special_tokens: which of their special tokens mean the same.
        window_radius: of the alignment, in cells.
    """

    def __init__(
        self, target: Vocabulary, draft: Vocabulary, special_tokens: SpecialTokenMap, *, window_radius: int
    ) -> None:
        self.target = target
        self.draft = draft
        self.special_tokens = special_tokens
        self.proxy_tokenizer = ProxyTokenizer(target, draft, special_tokens)
        self.aligner = Aligner(
            draft.flat_bytes, draft.byte_offsets, target.flat_bytes, target.byte_offsets, window_radius=window_radius
        )

    def last_draft_index(
        self, drafted: Sequence[Sequence[int]], proxies: Sequence[Sequence[int]]
    ) -> list[npt.NDArray[np.int32]]:
        """For each proxy token the last draft token aligned with it, by request (TokenTiming, section 3.2)."""
        proxy_ids, proxy_offsets = flatten(proxies)
        alignment = self.aligner.align(*flatten(drafted), proxy_ids, proxy_offsets)
        return np.split(alignment.last_draft_index, proxy_offsets[1:-1])

    def shown_bytes(self) -> tuple[ByteArray, Int32Array, ByteArray, Int32Array]:
        """The draft's table of bytes, and the target's as the draft is shown it: special tokens by their literals."""
        shown = [
            data
            if data is not None or token in self.special_tokens.target_to_draft
            else self.special_tokens.literal(token)
            for token, data in enumerate(self.target.token_bytes)
        ]
        flat = np.frombuffer(bytearray(b"".join(data or b"" for data in shown)), dtype=np.uint8)
        offsets = np.cumsum([0, *(len(data or b"") for data in shown)], dtype=np.int32)
        return self.draft.flat_bytes.copy(), self.draft.byte_offsets, flat, offsets

    def shared_tokens(self) -> npt.NDArray[np.int32]:
        """Int32 [draft vocabulary]: the target token with the same bytes or meaning, -1 where there is none."""
        by_bytes = {data: token for token, data in enumerate(self.target.token_bytes) if data}
        shared = np.full(self.draft.model_vocab_size, -1, dtype=np.int32)
        for token, data in enumerate(self.draft.token_bytes):
            if data:
                shared[token] = by_bytes.get(data, -1)
        for draft_id, target_id in self.special_tokens.draft_to_target.items():
            shared[draft_id] = target_id
        return shared


class ExactPair:
    """The chunk rule for a pair: the transfer, and the set E that it learns.

    Args:
        pair: the vocabularies.
        longest_run: extendable tokens before a chunk's last one.
        learn: False keeps E as the vocabularies alone suggest.
        extend: False empties E: every whole-character token is a chunk of its own.
    """

    def __init__(self, pair: Pair, *, longest_run: int, learn: bool = True, extend: bool = True) -> None:
        self._pair = pair
        table = ChunkTable(
            draft_vocab_size=pair.draft.model_vocab_size,
            target_vocab_size=pair.target.model_vocab_size,
            encode=pair.proxy_tokenizer.encode_chunks,
            certify=self._certify,
        )
        self.transfer = ChunkTransfer(table, end_ids_in_draft_vocab=pair.draft.end_ids, longest_run=longest_run)
        prior = extendable_prior(pair.draft.token_bytes, pair.target.token_bytes)
        if not extend:
            prior = np.zeros_like(prior)
        self._extendable = ExtendableSet(prior, pair.draft.token_bytes)
        self._shown_bytes = pair.shown_bytes() if learn and extend else None
        self.transfer.warm_up()

    def extendable(self, *, alone: bool) -> Extendable:
        """E before a cycle; ``alone``: as no other request has touched it."""
        return self._extendable.prior if alone else self._extendable.snapshot()

    def observer(self) -> BoundaryObserver | None:
        """Watches one request's committed text for E; None where E does not learn."""
        return None if self._shown_bytes is None else BoundaryObserver(self._shown_bytes, self._extendable)

    def _certify(self, chunks: Sequence[tuple[int, ...]], encodings: Sequence[tuple[int, ...]]) -> Sequence[bool]:
        """Which proxy tokens carry their chunk's last draft law: the path links them, and the bytes agree."""
        links: list[bool] = self._pair.aligner.links(*flatten(chunks), *flatten(encodings)).tolist()
        return links


class BoundaryObserver:
    """Tells E where the target's tokens end in one request's committed text."""

    __slots__ = ("_pending", "_set", "_started", "_tables")

    def __init__(self, tables: tuple[ByteArray, Int32Array, ByteArray, Int32Array], extendable: ExtendableSet) -> None:
        self._tables = tables
        self._set = extendable
        self._pending: list[int] = []
        self._started = False

    def commit(self, ids_in_target_vocab: Sequence[int], context: DraftContext) -> None:
        """Newly committed tokens, and the context that they are part of already. Looked at by stretches."""
        if not self._started:
            self._started = True
            ids_in_target_vocab = ids_in_target_vocab[-_OBSERVED_PROMPT_TOKENS:]
        self._pending += ids_in_target_vocab
        # Both must end at the same place.
        if len(self._pending) >= _OBSERVED_TOKENS and not context.ends_inside_character:
            self._observe(context.ids[-2 * len(self._pending) :], self._pending)
            self._pending.clear()

    def _observe(self, ids_in_draft_vocab: Sequence[int], ids_in_target_vocab: Sequence[int]) -> None:
        target_size = len(self._tables[3]) - 1
        if not 0 <= min(ids_in_target_vocab) <= max(ids_in_target_vocab) < target_size:
            return
        drafted = np.array(ids_in_draft_vocab, dtype=np.int32)
        is_boundary = np.empty(len(drafted), dtype=np.bool_)
        first = common_ends(*self._tables, drafted, np.array(ids_in_target_vocab, dtype=np.int32), is_boundary)
        # The last end is where the stretch was cut.
        self._set.observe(drafted[first:-1], is_boundary[first:-1])


def flatten(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Rows of ids end to end, int32, and where each begins, int32 [rows + 1]."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, rows), dtype=np.int32, count=len(rows)), out=offsets[1:])
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1])), offsets
