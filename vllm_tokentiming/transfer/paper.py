"""TokenTiming's own transfer: the last aligned draft token's scalar probability and nothing beside it. Not lossless."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def paper_scalars(
    *,
    ids_in_draft_vocab: Sequence[int],
    law_ids: npt.NDArray[np.int32] | None,
    law_probs: npt.NDArray[np.float64] | None,
    ids_in_target_vocab: Sequence[int],
    last_draft_index: npt.NDArray[np.int32],
) -> npt.NDArray[np.float32]:
    """Float32 [m]: p_i(d_i) for proxy token t_j, where d_i is the last draft token aligned with it.

    **Changes the target's output distribution**; kept to reproduce the paper (TokenTiming, arXiv 2510.15545, section
    3.3). The verifier takes a row for the law that t_j was drawn from, and a row of this scalar at t_j, zero elsewhere,
    is not it: it does not even sum to one. With q = (.3, .5, .2) and token 0 always proposed with p = .6, the output is
    (.500, .357, .143). Over a pair of toy vocabularies, enumerated exactly, the total variation distance from the
    target's law was up to 0.27.

    Args:
        ids_in_draft_vocab: the k drafted tokens.
        law_ids: int32 [k, top_k], the support of each drafted token's law; None for a greedy draft, whose tokens count
            as certain (p = 1).
        law_probs: float64 [k, top_k], its probabilities. Padding has probability 0, under any id.
        ids_in_target_vocab: the m proxy tokens.
        last_draft_index: int32 [m], from the alignment; -1 counts as a certain token, and so does a drafted token that
            its law does not hold.

    Raises:
        ValueError: arrays whose lengths do not fit together.
    """
    num_proxy = len(ids_in_target_vocab)
    if len(last_draft_index) != num_proxy:
        raise ValueError(f"last_draft_index has {len(last_draft_index)} entries for {num_proxy} proxy tokens")
    # One entry more than drafted tokens: -1 finds the certain token there.
    scalars = np.ones(len(ids_in_draft_vocab) + 1)
    if law_ids is not None and law_probs is not None:
        if not len(law_ids) == len(law_probs) == len(ids_in_draft_vocab):
            raise ValueError(
                f"{len(ids_in_draft_vocab)} drafted tokens have {len(law_ids)} rows of law ids and {len(law_probs)} of "
                "law probabilities; there must be one of each per token"
            )
        drawn = law_ids == np.asarray(ids_in_draft_vocab, dtype=np.int64)[:, None]
        found = np.where(drawn, law_probs, 0.0).sum(axis=1)
        scalars[:-1] = np.where(found > 0.0, found, 1.0)
    return scalars[last_draft_index].astype(np.float32)
