"""Dynamic Token Warping as a textbook writes it: slow, plain, on lists of bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

Cell = tuple[int, int]


def levenshtein(left: bytes, right: bytes) -> int:
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, j in itertools.product(range(len(left) + 1), range(len(right) + 1)):
        if i == 0 or j == 0:
            table[i][j] = i + j
        else:
            table[i][j] = min(
                table[i - 1][j] + 1, table[i][j - 1] + 1, table[i - 1][j - 1] + (left[i - 1] != right[j - 1])
            )
    return table[-1][-1]


def in_band(i: int, j: int, rows: int, columns: int, window_radius: int) -> bool:
    """At most the radius from the line through (0, 0) and (rows - 1, columns - 1), along the row or the column."""
    if rows == 1 or columns == 1:
        return True
    radius = max(window_radius, abs(rows - columns))
    slope = Fraction(columns - 1, rows - 1)
    return abs(j - i * slope) <= radius or abs(i - j / slope) <= radius


def align(draft: Sequence[bytes], proxy: Sequence[bytes], window_radius: int) -> tuple[list[Cell], int]:
    """The cheapest in-band path and its cost; ties, from the end: diagonal, then the draft's step, then the proxy's."""
    if not draft or not proxy:
        return [], 0
    costs: dict[Cell, float] = {}
    for i, j in itertools.product(range(len(draft)), range(len(proxy))):
        if not in_band(i, j, len(draft), len(proxy), window_radius):
            continue
        before = 0 if i == j == 0 else min(costs.get(cell, math.inf) for cell in _predecessors(i, j))
        costs[i, j] = before + levenshtein(draft[i], proxy[j])
    path = [(len(draft) - 1, len(proxy) - 1)]
    while path[-1] != (0, 0):
        path.append(min(_predecessors(*path[-1]), key=lambda cell: costs.get(cell, math.inf)))
    return path[::-1], int(costs[path[0]])


def _predecessors(i: int, j: int) -> list[Cell]:
    return [(i - 1, j - 1), (i - 1, j), (i, j - 1)]


def last_draft_index(path: Sequence[Cell], num_proxy: int) -> list[int]:
    return [max((i for i, j in path if j == proxy), default=-1) for proxy in range(num_proxy)]


def every_path(rows: int, columns: int, window_radius: int) -> Iterator[list[Cell]]:
    """All monotone, continuous in-band paths from the first cell to the last."""

    def extend(path: list[Cell]) -> Iterator[list[Cell]]:
        i, j = path[-1]
        if (i, j) == (rows - 1, columns - 1):
            yield path
            return
        for cell in ((i + 1, j + 1), (i + 1, j), (i, j + 1)):
            if cell[0] < rows and cell[1] < columns and in_band(*cell, rows, columns, window_radius):
                yield from extend([*path, cell])

    yield from extend([(0, 0)])
