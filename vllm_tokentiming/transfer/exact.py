"""The exact transfer: proxy tokens and the laws they were drawn from, chunk by chunk (docs/losslessness.md).

A chunk is a run of extendable draft tokens and the token that ended it. The run is revealed; the last token's law,
restricted to the tokens that could have ended the chunk there, is pushed forward through the target's tokenizer.
Many-to-one thus takes the last draft token's probability (TokenTiming, section 3.3), one-to-many conditions later proxy
tokens on the earlier ones.

Owns: :class:`ChunkTransfer` owns its chunk table and scratch; it serves one thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.errors import ConfigError
from vllm_tokentiming.transfer import chunk_kernel as kernel
from vllm_tokentiming.transfer.chunks import ChunkTable, Run
from vllm_tokentiming.transfer.extendable import Extendable
from vllm_tokentiming.transfer.interface import Draft, Proposals, SparseRows

DEFAULT_LONGEST_RUN: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRows:
    """Proxy tokens and their laws before rounding to float32.

    Row j holds ``probs[offsets[j]:offsets[j + 1]]`` at ``ids_in_target_vocab[offsets[j]:offsets[j + 1]]``; ids within a
    row are unique.

    Attributes:
        tokens_in_target_vocab: int32 [m].
        offsets: int32 [m + 1].
        ids_in_target_vocab: int32 [nnz].
        probs: float64 [nnz].
    """

    tokens_in_target_vocab: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]
    ids_in_target_vocab: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float64]


class ChunkTransfer:
    """Carries one pair of vocabularies' draft laws over by the chunk rule.

    Args:
        table: encodings and links of chunks.
        end_ids_in_draft_vocab: draft tokens after which the text is over; a proposal ends with them.
        longest_run: extendable tokens before a chunk's last one, at most. Only a half-finished character may exceed it.

    Raises:
        ConfigError: ``longest_run`` is negative, or an end token is not in the draft vocabulary.
    """

    def __init__(
        self,
        table: ChunkTable,
        *,
        end_ids_in_draft_vocab: Collection[int] = (),
        longest_run: int = DEFAULT_LONGEST_RUN,
    ) -> None:
        if longest_run < 0:
            raise ConfigError(f"longest_run is {longest_run}; it must be 0 (no chunk has a run) or more.")
        if not all(0 <= end < table.draft_vocab_size for end in end_ids_in_draft_vocab):
            raise ConfigError(
                f"end tokens {sorted(end_ids_in_draft_vocab)}: not all are below the draft's {table.draft_vocab_size}."
            )
        self.table = table
        self._ends = np.array(sorted(end_ids_in_draft_vocab), dtype=np.int64)
        self._longest_run = longest_run
        self._allocate(drafted=8, tokens=8, width=64)

    def warm_up(self, *, singles: int | None = None) -> None:
        """Compile and encode single-token chunks: what first cycles would otherwise wait for.

        Args:
            singles: how many draft tokens to encode, in the order of their ids, which is about that of their frequency;
                None for all. The others are encoded when a law first names them.
        """
        self.table.add_singles(singles)
        self.transfer([], [], extendable=Extendable.nothing(self.table.draft_vocab_size))

    def transfer(
        self,
        drafts: Sequence[Draft],
        given: Sequence[list[int] | None],
        *,
        extendable: Extendable,
        extendable_alone: Extendable | None = None,
    ) -> Proposals:
        """Proxy tokens and their rows, float32, of a batch of drafts.

        Args:
            drafts: of all requests.
            given: proxy tokens that a request has already, which become point masses; None for drafts with laws.
            extendable: E as it was before the first of their tokens was drawn.
            extendable_alone: E for drafts that must not depend on other requests; None: the same.

        Raises:
            ValueError: shapes that do not fit, ids outside the draft vocabulary, laws that are not finite, or a drafted
                token that is not in its law.
            VocabularyError: the encoder or the certifier answered nonsense.
        """
        self._fill(drafts, given, extendable, extendable_alone or extendable)
        totals = self._totals[: len(drafts) + 1].tolist()
        stored = totals[-1][1]
        tokens = self._tokens[: totals[-1][0]].tolist()
        # Rounding moves an output law by at most 2⁻²⁴ per token.
        rows = SparseRows(
            places=self._places[:stored].copy(),
            probs=self._probs[:stored].astype(np.float32),
            vocab_size=self.table.target_vocab_size,
        )
        return Proposals([tokens[start:stop] for (start, _), (stop, _) in pairwise(totals)], rows)

    def exact_rows(self, draft: Draft, extendable: Extendable) -> ExactRows:
        """One draft's proxy tokens and their rows in float64. Errors as of :meth:`transfer`."""
        self._fill([draft], [None], extendable, extendable)
        number, stored = self._totals[1].tolist()
        rows, ids = np.divmod(self._places[:stored], self.table.target_vocab_size)
        return ExactRows(
            tokens_in_target_vocab=self._tokens[:number].copy(),
            offsets=np.searchsorted(rows, np.arange(number + 1)).astype(np.int32),
            ids_in_target_vocab=ids.astype(np.int32),
            probs=self._probs[:stored].copy(),
        )

    def _fill(
        self,
        drafts: Sequence[Draft],
        given: Sequence[list[int] | None],
        extendable: Extendable,
        extendable_alone: Extendable,
    ) -> None:
        """Write proxy tokens and rows into the scratch arrays. As :meth:`transfer`."""
        table = self.table
        if not len(extendable) == len(extendable_alone) == table.draft_vocab_size:
            raise ValueError(f"E covers {len(extendable)} of {table.draft_vocab_size} draft tokens; it must cover all")
        plans: list[tuple[int, int, int, int, bool]] = []
        ids: list[int] = []
        law_ids: list[npt.NDArray[np.int32]] = []
        law_probs: list[npt.NDArray[np.float64]] = []
        tokens, width = 0, 1
        for draft, proxy in zip(drafts, given, strict=True):
            if draft.law_ids is None or draft.law_probs is None or proxy is not None:
                known = proxy or []
                plans.append((len(known), 0, 0, len(known), False))
                ids += known
                tokens += len(known)
                continue
            shape = draft.law_ids.shape
            count = len(draft.ids_in_draft_vocab)
            if len(shape) != 2 or shape[0] != count or shape != draft.law_probs.shape:
                raise ValueError(f"{count} drafted tokens with laws of shapes {shape} and {draft.law_probs.shape}")
            if count > draft.planned_steps:
                raise ValueError(f"{count} tokens were drafted of {draft.planned_steps} planned ones")
            plans.append((count, shape[1], draft.planned_steps, draft.max_tokens, draft.alone))
            ids += draft.ids_in_draft_vocab
            law_ids.append(draft.law_ids)
            law_probs.append(draft.law_probs)
            tokens += draft.max_tokens
            width = max(width, shape[1])
        self._reserve(drafted=max(len(ids), len(drafts)), tokens=tokens, width=width)
        table.make_room()
        first = 0
        inputs = (
            np.array(ids, dtype=np.int64),
            np.array(plans, dtype=np.int64).reshape(-1, kernel.NUM_COLUMNS),
            _flat(law_ids, np.int32),
            _flat(law_probs, np.float64),
            extendable.traits,
            extendable_alone.traits,
            self._ends,
            self._longest_run,
        )
        while True:
            outcome, first, where = kernel.chunk_rows(
                *inputs,
                table.singles,
                table.slots,
                table.proxies,
                table.target_vocab_size,
                *self._scratch,
                first,
                self._totals,
                self._tokens,
                self._places,
                self._probs,
            )
            if outcome != kernel.MISSING:
                break
            table.add(self._missing_chunks(ids, where))
        if outcome != kernel.DONE:
            raise ValueError(f"drafted token {ids[where]}: {_REFUSALS[outcome]}")

    def _missing_chunks(self, ids: Sequence[int], number: int) -> dict[Run, list[int]]:
        """What the kernel asks for: for each run its last tokens, each once."""
        missing: dict[Run, dict[int, None]] = {}
        begin = 0
        for start, position, end in self._missing[:number].tolist():
            lasts = self._missing_ids[begin:end].tolist()
            missing.setdefault(tuple(ids[start:position]), {}).update(dict.fromkeys(lasts))
            begin = end
        return {run: list(lasts) for run, lasts in missing.items()}

    def _reserve(self, *, drafted: int, tokens: int, width: int) -> None:
        """Make the scratch arrays large enough for a batch."""
        if drafted > len(self._missing) or tokens > len(self._tokens) or width > len(self._alive):
            self._allocate(
                drafted=max(drafted, len(self._missing)),
                tokens=max(tokens, len(self._tokens)),
                width=max(width, len(self._alive)),
            )

    def _allocate(self, *, drafted: int, tokens: int, width: int) -> None:
        self._alive: npt.NDArray[np.int64] = np.empty(width, dtype=np.int64)
        self._missing: npt.NDArray[np.int64] = np.empty((drafted, 3), dtype=np.int64)
        self._missing_ids: npt.NDArray[np.int32] = np.empty(drafted * width, dtype=np.int32)
        # Sparsely filled: collisions cost more than the memory.
        slot_of = np.empty(kernel.key_slots(4 * width), dtype=np.int32)
        self._scratch = (slot_of, self._alive, np.empty(width, dtype=np.float64), self._missing, self._missing_ids)
        self._totals: npt.NDArray[np.int64] = np.zeros((drafted + 1, 2), dtype=np.int64)
        self._tokens: npt.NDArray[np.int32] = np.empty(tokens, dtype=np.int32)
        self._places: npt.NDArray[np.int64] = np.empty(tokens * width, dtype=np.int64)
        self._probs: npt.NDArray[np.float64] = np.empty(tokens * width, dtype=np.float64)


def _flat(arrays: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Arrays end to end, copied: the kernel is compiled for one layout, and another would compile a second."""
    if len(arrays) == 1:
        return np.array(arrays[0], dtype=dtype, order="C").reshape(-1)  # in a third of the time
    return np.concatenate(arrays, axis=None, dtype=dtype) if arrays else np.empty(0, dtype=dtype)


_REFUSALS: Final = {
    kernel.NOT_IN_LAW: "it is not among the tokens that its law could have drawn there; laws must be those drawn from",
    kernel.BAD_ID: "its law holds ids outside the draft vocabulary",
    kernel.NOT_FINITE: "its law is not finite",
    kernel.BAD_TOKEN: "it is not below the draft's vocabulary size",
}
