"""What heads of some tokens find in a paged KV cache, token by token, in float64.

Rotary embedding as in Su et al., RoFormer, arXiv 2104.09864, section 3.4.2, with the halves of a head paired; attention
as in Vaswani et al., arXiv 1706.03762, section 3.2.1, where a KV head serves several query heads (Ainslie et al., arXiv
2305.13245).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


def cosines_and_sines(positions: int, head_size: int) -> Numbers:
    """[positions, head size], cosines first, of angles position · 10000^(-2i / head size)."""
    frequencies = 10000.0 ** (-np.arange(0, head_size, 2) / head_size)
    angles = np.arange(positions)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def rotated(head: Numbers, cos_sin: Numbers) -> Numbers:
    """A head's numbers, turned pair by pair."""
    cosines, sines = np.split(cos_sin, 2)
    one, other = np.split(head, 2)
    return np.concatenate([one * cosines - other * sines, other * cosines + one * sines])


def attended(query: Numbers, keys: Numbers, values: Numbers, *, scale: float) -> Numbers:
    """A query [head size] over keys and values [tokens, head size]."""
    scores = np.array([scale * float(query @ key) for key in keys])
    weights = np.exp(scores - scores.max())
    result: Any = sum(weight * value for weight, value in zip(weights / weights.sum(), values, strict=True))
    return np.asarray(result)
