"""Which draft and proxy positions may be aligned at all: a Sakoe-Chiba band along the slanted diagonal."""

from __future__ import annotations

from vllm_tokentiming.compilation import compiled


@compiled
def band_of_row(row: int, rows: int, columns: int, window_radius: int) -> tuple[int, int]:
    """The cells of one row that lie in the band, as ``(first column, end column)``, never empty.

    The diagonal runs from (0, 0) to (rows - 1, columns - 1). A cell is in the band when it is at most
    ``max(window_radius, |rows - columns|)`` cells from it, counted along its row or along its column. Widening by
    ``|rows - columns|`` makes the bands of neighbouring rows touch, so some path always exists; counting along both
    makes the band the same when the sequences change places.

    Args:
        row: 0 ≤ row < rows.
        rows: at least 1.
        columns: at least 1.
        window_radius: at least 0 (TokenTiming finds 8 best).
    """
    if rows == 1:
        return 0, columns
    height = rows - 1
    width = columns - 1
    radius = max(window_radius, abs(rows - columns))
    # |column · height − row · width| ≤ reach, in integers: a rounded diagonal would make the band lopsided.
    reach = radius * max(height, width)
    first = max(0, -((reach - row * width) // height))
    end = min(columns, (row * width + reach) // height + 1)
    return first, end
