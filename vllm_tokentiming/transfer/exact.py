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
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.errors import ConfigError
from vllm_tokentiming.transfer import chunk_kernel as kernel
from vllm_tokentiming.transfer.chunk_kernel import IN_E, pending_after
from vllm_tokentiming.transfer.chunks import ChunkTable
from vllm_tokentiming.transfer.extendable import Extendable
from vllm_tokentiming.transfer.interface import NOTHING, Proposal, SparseRows

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
        self._ends = frozenset(end_ids_in_draft_vocab)
        self._longest_run = longest_run
        self._slot_of: npt.NDArray[np.int32] = np.full(table.target_vocab_size, -1, dtype=np.int32)
        self._allocate(max_tokens=8, top_k=64)

    def warm_up(self, *, singles: int | None = None) -> None:
        """Compile and encode single-token chunks: what first cycles would otherwise wait for.

        Args:
            singles: how many draft tokens to encode, in the order of their ids, which is about that of their frequency;
                None for all. The others are encoded when a law first names them.
        """
        self.table.warm_up()
        self.table.add_singles(singles)
        nothing = Extendable.nothing(self.table.draft_vocab_size)
        no_law = np.empty((0, 1))
        self.exact_rows(
            [], law_ids=no_law.astype(np.int32), law_probs=no_law, extendable=nothing, planned_steps=0, max_tokens=1
        )

    def transfer(
        self,
        ids_in_draft_vocab: Sequence[int],
        *,
        law_ids: npt.NDArray[np.int32],
        law_probs: npt.NDArray[np.float64],
        extendable: Extendable,
        planned_steps: int,
        max_tokens: int,
    ) -> Proposal:
        """Proxy tokens and their rows. Arguments and errors as of :meth:`exact_rows`; float32 at this boundary."""
        number = self._fill(
            ids_in_draft_vocab,
            law_ids=law_ids,
            law_probs=law_probs,
            extendable=extendable,
            planned_steps=planned_steps,
            max_tokens=max_tokens,
        )
        if not number:
            return NOTHING
        stored = self._offsets[number]
        # Rounding moves an output law by at most 2⁻²⁴ per token.
        rows = SparseRows(
            offsets=self._offsets[: number + 1].copy(),
            ids_in_target_vocab=self._ids[:stored].copy(),
            probs=self._probs[:stored].astype(np.float32),
        )
        return Proposal(ids_in_target_vocab=self._tokens[:number].tolist(), rows=rows)

    def exact_rows(
        self,
        ids_in_draft_vocab: Sequence[int],
        *,
        law_ids: npt.NDArray[np.int32],
        law_probs: npt.NDArray[np.float64],
        extendable: Extendable,
        planned_steps: int,
        max_tokens: int,
    ) -> ExactRows:
        """Proxy tokens and their rows in float64.

        Args:
            ids_in_draft_vocab: the k drafted tokens.
            law_ids: int32 [k, top_k], the supports of the laws that they were drawn from.
            law_probs: float64 [k, top_k], the probabilities; places without mass are 0.
            extendable: E as it was before the first of them was drawn.
            planned_steps: how many tokens would be drafted, as known *before the last of them was drawn*. A draft that
                ended sooner
                (its end token, a rule that looked at drawn tokens or at a law that followed them) must leave this above
                k: the last token then counts as one that could have been extended.
            max_tokens: proxy tokens wanted at most.

        Raises:
            ValueError: shapes that do not fit, ids outside the draft vocabulary, laws that are not finite, or a drafted
                token that
                is not in its law.
            VocabularyError: the encoder or the certifier answered nonsense.
        """
        number = self._fill(
            ids_in_draft_vocab,
            law_ids=law_ids,
            law_probs=law_probs,
            extendable=extendable,
            planned_steps=planned_steps,
            max_tokens=max_tokens,
        )
        stored = self._offsets[number]
        return ExactRows(
            tokens_in_target_vocab=self._tokens[:number].copy(),
            offsets=self._offsets[: number + 1].copy(),
            ids_in_target_vocab=self._ids[:stored].copy(),
            probs=self._probs[:stored].copy(),
        )

    def _fill(
        self,
        ids_in_draft_vocab: Sequence[int],
        *,
        law_ids: npt.NDArray[np.int32],
        law_probs: npt.NDArray[np.float64],
        extendable: Extendable,
        planned_steps: int,
        max_tokens: int,
    ) -> int:
        """Write the rows into the scratch arrays; the number of proxy tokens. As :meth:`exact_rows`."""
        count, top_k = len(ids_in_draft_vocab), law_ids.shape[1]
        if not law_ids.shape == law_probs.shape == (count, top_k):
            raise ValueError(f"{count} drafted tokens with laws of shapes {law_ids.shape} and {law_probs.shape}")
        if len(extendable) != self.table.draft_vocab_size or count > planned_steps:
            raise ValueError(
                f"E covers {len(extendable)} of {self.table.draft_vocab_size} draft tokens, {count} of {planned_steps} "
                "planned tokens were drafted; E must cover all, and no more than planned can be drafted"
            )
        if max_tokens > len(self._tokens) or max_tokens * top_k > len(self._ids) or top_k > len(self._alive):
            self._allocate(max_tokens=max(max_tokens, len(self._tokens)), top_k=max(top_k, len(self._alive)))
        law_ids, law_probs = _plain(law_ids, np.int32), _plain(law_probs, np.float64)
        table = self.table
        table.make_room()
        runs, chunks = self._cut(ids_in_draft_vocab, extendable, planned_steps)
        tokens = self._tokens[:max_tokens]
        while True:
            outcome, number, chunk = kernel.chunk_rows(
                chunks,
                law_ids,
                law_probs,
                extendable.traits,
                table.entry_of_single,
                table.keys,
                table.entries,
                table.starts,
                table.proxies,
                table.linked,
                self._slot_of,
                self._alive,
                self._alive_probs,
                tokens,
                self._offsets,
                self._ids,
                self._probs,
            )
            if outcome != kernel.MISSING:
                break
            table.add(runs[chunk], self._alive[:number].tolist())
        if outcome != kernel.DONE:
            self._refuse(outcome, runs[chunk], int(chunks[chunk, kernel.LAST]))
        return number

    def _cut(
        self, ids_in_draft_vocab: Sequence[int], extendable: Extendable, planned_steps: int
    ) -> tuple[list[tuple[int, ...]], npt.NDArray[np.int64]]:
        """The chunks' runs and, for the kernel, their descriptions.

        Whether a token is extended depends on it, on the tokens before it and on the plan, never on later tokens.
        """
        traits = extendable.traits.data
        count, size = len(ids_in_draft_vocab), len(traits)
        runs: list[tuple[int, ...]] = []
        cells: list[int] = []
        start = pending = 0
        for position, draft_id in enumerate(ids_in_draft_vocab):
            if not 0 <= draft_id < size:
                raise ValueError(f"drafted token {draft_id} is not below the draft's vocabulary size {size}")
            trait = traits[draft_id]
            lacking = pending_after(pending, trait) if trait > IN_E else 0
            may_extend, in_bound = position + 1 < planned_steps, position - start < self._longest_run
            extends = may_extend and (lacking > 0 or (in_bound and trait & IN_E))
            if extends and position + 1 < count:
                pending = lacking
                continue
            run = tuple(ids_in_draft_vocab[start:position])
            runs.append(run)
            number = self.table.number_of(run)
            # A draft that ended before its plan after an extendable token (so `extends`): nothing known before that
            # token was drawn says that the chunk would end with it, so it is revealed like the rest of the run.
            cells += (position, draft_id, number, pending, may_extend, in_bound, extends)
            start, pending = position + 1, 0
            # The text is over, or has a gap: an unfinished character has no proxy tokens.
            if lacking > 0 or draft_id in self._ends:
                break
        return runs, np.array(cells, dtype=np.int64).reshape(-1, kernel.NUM_COLUMNS)

    def _allocate(self, *, max_tokens: int, top_k: int) -> None:
        self._alive: npt.NDArray[np.int32] = np.empty(top_k, dtype=np.int32)
        self._alive_probs: npt.NDArray[np.float64] = np.empty(top_k, dtype=np.float64)
        self._tokens: npt.NDArray[np.int32] = np.empty(max_tokens, dtype=np.int32)
        self._offsets: npt.NDArray[np.int32] = np.zeros(max_tokens + 1, dtype=np.int32)
        self._ids: npt.NDArray[np.int32] = np.empty(max_tokens * top_k, dtype=np.int32)
        self._probs: npt.NDArray[np.float64] = np.empty(max_tokens * top_k, dtype=np.float64)

    @staticmethod
    def _refuse(outcome: int, run: tuple[int, ...], last: int) -> None:
        reason = {
            kernel.NOT_IN_LAW: f"it is not among the tokens that its law could have drawn after the run {run}",
            kernel.BAD_ID: "its law holds ids outside the draft vocabulary",
            kernel.NOT_FINITE: "its law is not finite",
        }[outcome]
        raise ValueError(f"drafted token {last}: {reason}; the laws must be the ones that the tokens were drawn from")


def _plain(array: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """The array as the kernel was compiled for: contiguous, of this type, writable. Another would compile a second."""
    plain = np.ascontiguousarray(array, dtype=dtype)
    return plain if plain.flags.writeable else plain.copy()
