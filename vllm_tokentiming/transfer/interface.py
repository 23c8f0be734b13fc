"""What a transfer returns: sparse rows over the target vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseRows:
    """Proposal laws P_1..P_m of one request's m proxy tokens, in CSR form.

    Row j holds ``probs[offsets[j]:offsets[j + 1]]`` at ``ids_in_target_vocab[offsets[j]:offsets[j + 1]]``, zero
    elsewhere. Ids within a row are unique.

    Attributes:
        offsets: int32 [m + 1].
        ids_in_target_vocab: int32 [nnz].
        probs: float32 [nnz].
    """

    offsets: npt.NDArray[np.int32]
    ids_in_target_vocab: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.offsets[0] != 0 or not self.offsets[-1] == len(self.ids_in_target_vocab) == len(self.probs):
            raise ValueError(f"rows do not fit together: offsets {self.offsets}, {len(self.probs)} probabilities")

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One request's proposal to the verifier.

    Attributes:
        ids_in_target_vocab: m proxy tokens, m ≥ 0.
        rows: their laws, or None where every row is the point mass at its token.
    """

    ids_in_target_vocab: list[int]
    rows: SparseRows | None = None


NOTHING = Proposal(ids_in_target_vocab=[])
"""The proposal of a request that goes without speculation this cycle."""
