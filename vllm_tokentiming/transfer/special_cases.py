"""Known methods as special cases of the chunk rule: TLI and SLEM (Timor et al., arXiv 2502.05202).

Owns nothing; each function answers with a :class:`~vllm_tokentiming.transfer.exact.ChunkTransfer` that is its caller's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.transfer.chunks import ChunkTable, Run
from vllm_tokentiming.transfer.exact import ChunkTransfer

NO_BOUND: Final = 1 << 30


def tli_transfer(
    target_of_draft: npt.NDArray[np.int32],
    *,
    target_vocab_size: int,
    end_ids_in_draft_vocab: Collection[int] = (),
) -> ChunkTransfer:
    """Token-level intersection: shared tokens one to one, every token a chunk. For laws out of :func:`shared_law`.

    Use it with ``Extendable.nothing``: a shared token may end inside a character.

    Args:
        target_of_draft: int32 [draft vocabulary], the target token with the same bytes or meaning, -1 where there is
            none.
        target_vocab_size: rows of the target's logits.
        end_ids_in_draft_vocab: draft tokens after which the text is over.
    """

    def one_to_one(run: Run, lasts: Sequence[int]) -> list[tuple[int, ...]]:
        return [(int(target_of_draft[d]),) if not run and target_of_draft[d] >= 0 else () for d in lasts]

    table = ChunkTable(
        draft_vocab_size=len(target_of_draft), target_vocab_size=target_vocab_size, encode=one_to_one, max_run_chunks=1
    )
    return ChunkTransfer(table, end_ids_in_draft_vocab=end_ids_in_draft_vocab, longest_run=0)


def shared_law(
    law_ids: npt.NDArray[np.int32], law_probs: npt.NDArray[np.float64], target_of_draft: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64] | None:
    """A law restricted to the tokens that both vocabularies share, renormalised: draw from it, and transfer it.

    Args:
        law_ids: int32 [top_k].
        law_probs: float64 [top_k].
        target_of_draft: as for :func:`tli_transfer`.

    Returns:
        float64 [top_k]; None where no mass is on shared tokens. To stop drafting there is lossless: nothing was drawn
        from the law.
    """
    shared = np.where(target_of_draft[law_ids] >= 0, law_probs, 0.0)
    total = shared.sum()
    return shared / total if total > 0.0 else None


def slem_transfer(table: ChunkTable, *, end_ids_in_draft_vocab: Collection[int] = ()) -> ChunkTransfer:
    """String-level exact match: the whole draft is one chunk, re-tokenised as a whole, its rows point masses.

    Use it with an E of every token that has bytes and with :func:`point_law`.
    """
    return ChunkTransfer(table, end_ids_in_draft_vocab=end_ids_in_draft_vocab, longest_run=NO_BOUND)


def point_law(ids_in_draft_vocab: Sequence[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """The laws of tokens that count as known (a greedy draft): int32 [k, 1] and float64 [k, 1]."""
    ids = np.array(ids_in_draft_vocab, dtype=np.int32).reshape(-1, 1)
    return ids, np.ones(ids.shape, dtype=np.float64)
