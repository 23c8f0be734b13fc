"""Which path the accumulated costs stand for, and the last draft token on it for each proxy token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.compilation import compiled


@compiled
def trace_path(
    costs: npt.NDArray[np.int64],
    rows: int,
    columns: int,
    path: npt.NDArray[np.int32],
    last_draft_index: npt.NDArray[np.int32],
) -> int:
    """Walk back from the last cell to (0, 0) along the cheapest predecessors and return the path's length.

    Where predecessors cost the same, the diagonal one is taken first, then the one above (an earlier draft token, the
    same proxy token), then the one to the left.

    Args:
        costs: int64, the accumulated costs, ``costs[i * columns + j]``.
        rows: draft tokens, at least 1.
        columns: proxy tokens, at least 1.
        path: int32 [≥ rows + columns - 1, 2], out: (draft index, proxy index) from (0, 0) on.
        last_draft_index: int32 [columns], out: per proxy token the last draft token aligned with it.
    """
    row = rows - 1
    column = columns - 1
    length = 0
    last_draft_index[column] = row
    while True:
        path[length, 0] = row
        path[length, 1] = column
        length += 1
        if row == 0 and column == 0:
            break
        if row == 0:
            go_up, go_left = False, True
        elif column == 0:
            go_up, go_left = True, False
        else:
            diagonal = costs[(row - 1) * columns + column - 1]
            up = costs[(row - 1) * columns + column]
            left = costs[row * columns + column - 1]
            go_both = diagonal <= min(up, left)
            go_up = go_both or up <= left
            go_left = go_both or up > left
        if go_up:
            row -= 1
        if go_left:
            column -= 1
            last_draft_index[column] = row
    for step in range(length // 2):
        opposite = length - 1 - step
        for side in range(2):
            path[step, side], path[opposite, side] = path[opposite, side], path[step, side]
    return length
