"""The alignment as others would do it: libraries where they can, and the paper's authors' code where it is at hand.

Each takes the tokens of both sides as strings and returns the path, as pairs of places. Libraries that are not
installed are left out (``pip install '.[peers]'``). dtaidistance is not among them: its compiled code knows differences
of numbers only, no table of edit distances.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Places = Sequence[tuple[int, int]]
Peer = Callable[[list[str], list[str]], Places]


def peers(*, window_radius: int, authors: Path | None) -> Iterator[tuple[str, Peer]]:
    """Names and functions of all that can run here.

    Args:
        window_radius: of the Sakoe-Chiba band, cells.
        authors: ``candidate_generator.py`` of the authors' patched transformers.
    """
    if _has("editdistance"):
        yield "plain Python + editdistance", _editdistance_dtw(window_radius)
    if _has("rapidfuzz") and _has("dtw"):
        yield "rapidfuzz + dtw-python", _dtw_python(window_radius)
    if authors is not None:
        yield "authors' DTW", _of_authors(authors, window_radius)


def dynamic_program(
    cost_of: Callable[[str, str], float], draft: list[str], proxy: list[str], radius: int
) -> tuple[Places, float]:
    """DTW inside a band, as research code writes it: (path, cost)."""
    k, m = len(draft), len(proxy)
    window = max(radius, abs(k - m))
    cost = [[math.inf] * (m + 1) for _ in range(k + 1)]
    cost[0][0] = 0
    for i in range(1, k + 1):
        for j in range(max(1, i - window), min(m, i + window) + 1):
            local = cost_of(draft[i - 1], proxy[j - 1])
            cost[i][j] = local + min(cost[i - 1][j - 1], cost[i - 1][j], cost[i][j - 1])
    path, i, j = [], k, m
    while i > 0 and j > 0:
        path.append((i - 1, j - 1))
        best = min(cost[i - 1][j - 1], cost[i - 1][j], cost[i][j - 1])
        if best == cost[i - 1][j - 1]:
            i, j = i - 1, j - 1
        elif best == cost[i - 1][j]:
            i -= 1
        else:
            j -= 1
    return path[::-1], cost[k][m]


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _editdistance_dtw(window_radius: int) -> Peer:
    import editdistance

    return lambda draft, proxy: dynamic_program(editdistance.eval, draft, proxy, window_radius)[0]


def _cost_matrix(draft: Sequence[str], proxy: Sequence[str]) -> np.ndarray:
    from rapidfuzz.distance import Levenshtein
    from rapidfuzz.process import cdist

    return cdist(draft, proxy, scorer=Levenshtein.distance, dtype=np.float64)  # [k, m]


def _dtw_python(window_radius: int) -> Peer:
    import dtw

    def path(draft: list[str], proxy: list[str]) -> Places:
        found = dtw.dtw(
            _cost_matrix(draft, proxy),
            step_pattern="symmetric1",
            window_type="sakoechiba",
            window_args={"window_size": max(window_radius, abs(len(draft) - len(proxy)))},
        )
        return list(zip(found.index1.tolist(), found.index2.tolist(), strict=True))

    return path


def _of_authors(path: Path, window_radius: int) -> Peer:
    """Their two methods alone: the file around them imports the transformers of another time."""
    import editdistance

    methods = {
        node.name: node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name in ("dtw", "token_distance")
    }
    if len(methods) != 2:
        raise ValueError(f"{path} has no methods dtw and token_distance; name the authors' candidate_generator.py")
    namespace: dict[str, Any] = {"np": np, "editdistance": editdistance, **vars(typing)}
    module = ast.Module(body=list(methods.values()), type_ignores=[])
    exec(compile(module, str(path), "exec"), namespace)  # the user named this file to be run
    generator = type("Generator", (), {name: namespace[name] for name in methods})()
    # What their set-up chooses for a tokenizer that it does not know; their tokens are decoded text here as there.
    generator.blending_special_token = generator.base_special_token = "Ġ"
    generator._dtw_window = window_radius

    return lambda draft, proxy: generator.dtw(draft, proxy)[0]
