"""Top-k, then top-p, as a textbook writes them: one sort of the whole vocabulary, sums in double precision."""

from __future__ import annotations

import math
from collections.abc import Sequence


def tokens_left(logits: Sequence[float], *, k: int, p: float) -> set[int]:
    """Equals of the k-th largest stay; of those at top-p's edge the earlier ones in the vocabulary are masked first."""
    ascending = sorted(range(len(logits)), key=lambda token: (logits[token], token))
    left = [token for token in ascending if logits[token] >= logits[ascending[-k]]]
    weights = [math.exp(logits[token] - logits[left[-1]]) for token in left]
    if p >= 1.0:
        return set(left)
    total, below = math.fsum(weights), 0.0
    for place, weight in enumerate(weights[:-1]):
        below += weight
        if below > (1.0 - p) * total:
            return set(left[place:])
    return {left[-1]}
