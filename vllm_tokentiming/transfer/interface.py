"""What goes into a transfer and what comes out: drafts, and sparse rows over the target vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Draft(NamedTuple):
    """One request's draft, and what was known before it was drawn. A named tuple: quicker to make than a dataclass.

    Attributes:
        ids_in_draft_vocab: the k drafted tokens.
        law_ids: int32 [k, width], the supports of the laws that they were drawn from; None for a greedy draft.
        law_probs: float64 [k, width], the probabilities; places without mass are 0.
        planned_steps: how many tokens would be drafted, as known *before the last of them was drawn*. A draft that
            ended sooner (its end token, a rule that looked at drawn tokens or at a law that followed them) must leave
            this above k: the last token then counts as one that could have been extended.
        max_tokens: proxy tokens wanted at most.
        alone: the rows must not depend on other requests.
        proxy: proxy tokens where they are known already, and nothing was drafted; their rows are point masses.
    """

    ids_in_draft_vocab: Sequence[int]
    law_ids: npt.NDArray[np.int32] | None
    law_probs: npt.NDArray[np.float64] | None
    planned_steps: int
    max_tokens: int
    alone: bool = False
    proxy: list[int] | None = None


class SparseRows(NamedTuple):
    """Proposal laws of a batch's proxy tokens: entries of a dense array, one row a token, in the order of requests.

    Attributes:
        places: int64 [nnz], row · vocabulary size + id in the target's vocabulary; each stands there once.
        probs: float32 [nnz].
        vocab_size: rows of the target's logits.
    """

    places: npt.NDArray[np.int64]
    probs: npt.NDArray[np.float32]
    vocab_size: int

    @classmethod
    def at_tokens(
        cls, ids_in_target_vocab: Sequence[int], probs: npt.NDArray[np.float32], vocab_size: int
    ) -> SparseRows:
        """Rows that hold a scalar at their own token and nothing else."""
        places = np.arange(len(ids_in_target_vocab), dtype=np.int64) * vocab_size
        places += np.fromiter(ids_in_target_vocab, dtype=np.int64, count=len(ids_in_target_vocab))
        return cls(places=places, probs=probs, vocab_size=vocab_size)


class Proposals(NamedTuple):
    """A batch's proposals to the verifier.

    Attributes:
        ids_in_target_vocab: for each request its proxy tokens; [] goes without speculation this cycle.
        rows: their laws, one row for each token of each request; None where all of them are point masses.
    """

    ids_in_target_vocab: list[list[int]]
    rows: SparseRows | None = None

    def with_appended(self, appended: Sequence[Sequence[int]]) -> Proposals:
        """The same, and point masses after the tokens of each request: ``appended`` [requests], ids of the target's."""
        ids = [[*before, *after] for before, after in zip(self.ids_in_target_vocab, appended, strict=True)]
        if self.rows is None or not any(appended):
            return Proposals(ids, self.rows)
        places, probs, vocab_size = self.rows
        counts = np.fromiter(map(len, self.ids_in_target_vocab), dtype=np.int64, count=len(ids))
        extra = np.fromiter(map(len, appended), dtype=np.int64, count=len(ids))
        # A request's rows move down by what was appended to the requests before it.
        moved = np.repeat(np.cumsum(extra) - extra, counts)
        first_of_appended = np.cumsum(counts + extra) - extra
        new = [
            (row + place) * vocab_size + token
            for row, tokens in zip(first_of_appended.tolist(), appended, strict=True)
            for place, token in enumerate(tokens)
        ]
        return Proposals(
            ids,
            SparseRows(
                places=np.concatenate(
                    [places + moved[places // vocab_size] * vocab_size, np.array(new, dtype=np.int64)]
                ),
                probs=np.concatenate([probs, np.ones(len(new), dtype=np.float32)]),
                vocab_size=vocab_size,
            ),
        )
