"""How likely each draft token is to be cut by the target's tokenizer, guessed from the two vocabularies alone.

Owns nothing. A vocabulary lists its language by frequency: merges come roughly in the order of how often they were
seen, so the token of rank r stands for about 1/r of the text (Zipf). Every target token is split as the draft would
write it; draft tokens inside it end where the target has no boundary, the last one ends where it has one. That knows
no language and asks nothing of a script: on English, German, Polish, Finnish, Chinese, Korean and Python, over four
pairs of tokenizers, it beat rules on letters and word endings (docs/losslessness.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

UNKNOWN: Final = 0.1
"""For tokens that no target token tells about; most ends of draft tokens are target boundaries."""

RANK_OFFSET: Final = 100
"""Flattens Zipf's law among the first ranks, which vocabularies spend on single bytes."""


def extendable_prior(
    draft_token_bytes: Sequence[bytes | None], target_token_bytes: Sequence[bytes | None]
) -> npt.NDArray[np.float64]:
    """The chance, for each draft token, that a target token goes on past its end.

    Args:
        draft_token_bytes: bytes of every draft token; None or empty for those without.
        target_token_bytes: likewise of the target, in the order of its ids.

    Returns:
        float64 [draft vocabulary], in [0, 1]; 0 for tokens without bytes.
    """
    draft_ids = {data: index for index, data in enumerate(draft_token_bytes) if data}
    longest = max(map(len, draft_ids), default=0)
    cut, kept = np.zeros(len(draft_token_bytes)), np.zeros(len(draft_token_bytes))
    for rank, data in enumerate(target_token_bytes):
        pieces = _longest_matches(data, draft_ids, longest) if data else []
        if pieces:
            weight = 1.0 / (rank + RANK_OFFSET)
            for piece in pieces[:-1]:
                cut[piece] += weight
            kept[pieces[-1]] += weight
    known = cut + kept
    prior = np.where(known > 0.0, cut / np.maximum(known, np.finfo(np.float64).tiny), UNKNOWN)
    prior[[not data for data in draft_token_bytes]] = 0.0
    return prior


def _longest_matches(data: bytes, ids: dict[bytes, int], longest: int) -> list[int]:
    """Greedy longest match, close to what merges make of a single word; empty where the draft lacks a byte."""
    pieces: list[int] = []
    start = 0
    while start < len(data):
        for stop in range(min(len(data), start + longest), start, -1):
            piece = ids.get(data[start:stop])
            if piece is not None:
                break
        else:
            return []
        pieces.append(piece)
        start = stop
    return pieces
