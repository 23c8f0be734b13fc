"""What the cheapest alignment up to each pair of positions costs: dynamic time warping inside the band.

Source: TokenTiming (arXiv 2510.15545), section 3.2, "Dynamic Token Warping".
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.alignment.band import band_of_row
from vllm_tokentiming.alignment.levenshtein import (
    MAX_PATTERN_LENGTH,
    levenshtein,
    levenshtein_from_pattern,
    mark_pattern,
    unmark_pattern,
)
from vllm_tokentiming.compilation import compiled

UNREACHABLE: Final = 1 << 62
"""Cost of a cell outside the band: above any real cost, and one local cost more does not overflow int64."""


@compiled
def accumulate_costs(  # noqa: PLR0917 -- a compiled function takes no keywords cheaply
    draft_flat_bytes: npt.NDArray[np.uint8],
    draft_byte_offsets: npt.NDArray[np.int32],
    target_flat_bytes: npt.NDArray[np.uint8],
    target_byte_offsets: npt.NDArray[np.int32],
    ids_in_draft_vocab: npt.NDArray[np.int32],
    ids_in_target_vocab: npt.NDArray[np.int32],
    window_radius: int,
    costs: npt.NDArray[np.int64],
    positions_of_byte: npt.NDArray[np.int64],
    scratch: npt.NDArray[np.int32],
) -> None:
    """Fill ``costs[i * m + j]`` with the cost of the cheapest in-band path from (0, 0) to (i, j), both ends included.

    Args:
        ids_in_draft_vocab: int32 [k], k ≥ 1, ids already checked against the table.
        ids_in_target_vocab: int32 [m], m ≥ 1, likewise.
        costs: int64, at least k · m.
        positions_of_byte: int64 [256], all zero; zero again on return.
        scratch: int32, one longer than the longest target token.
    """
    rows = len(ids_in_draft_vocab)
    columns = len(ids_in_target_vocab)
    for row in range(rows):
        draft_id = ids_in_draft_vocab[row]
        # int(): without the compiler these are int32 scalars, and shifting by one of them would overflow.
        draft_start = int(draft_byte_offsets[draft_id])
        draft_end = int(draft_byte_offsets[draft_id + 1])
        fits_pattern = draft_end - draft_start <= MAX_PATTERN_LENGTH
        if fits_pattern:
            mark_pattern(draft_flat_bytes, draft_start, draft_end, positions_of_byte)
        first, end = band_of_row(row, rows, columns, window_radius)
        here = row * columns
        above = here - columns
        costs[here : here + first] = UNREACHABLE
        costs[here + end : here + columns] = UNREACHABLE
        for column in range(first, end):
            best = 0 if row + column == 0 else UNREACHABLE
            if row > 0:
                best = min(best, costs[above + column])
                if column > 0:
                    best = min(best, costs[above + column - 1])
            if column > 0:
                best = min(best, costs[here + column - 1])
            target_id = ids_in_target_vocab[column]
            target_start = int(target_byte_offsets[target_id])
            target_end = int(target_byte_offsets[target_id + 1])
            if fits_pattern:
                local = levenshtein_from_pattern(
                    positions_of_byte, draft_end - draft_start, target_flat_bytes, target_start, target_end
                )
            else:
                local = levenshtein(
                    draft_flat_bytes, draft_start, draft_end, target_flat_bytes, target_start, target_end, scratch
                )
            costs[here + column] = best + local
        if fits_pattern:
            unmark_pattern(draft_flat_bytes, draft_start, draft_end, positions_of_byte)
