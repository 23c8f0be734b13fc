"""How a draft with weights of its own cuts what it has to read into passes."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm_tokentiming.engine.vllm_forward import SHORT_PASS, _passes


@pytest.mark.parametrize(
    ("begins", "ends"),
    [([0], [1]), ([0], [100]), ([31, 5, 64], [65, 6, 96]), ([0] * 40, [3] * 40), ([200, 0], [203, 500])],
)
def test_every_token_once_in_order_and_cut_by_position(begins: list[int], ends: list[int]) -> None:
    reached = list(begins)
    for windows in _passes(begins, ends):
        assert len({window.row for window in windows}) == len(windows)
        assert sum(window.end - window.begin for window in windows) <= SHORT_PASS
        for window in windows:
            assert window.begin == reached[window.row]
            assert window.begin < window.end
            assert window.end == ends[window.row] or window.end % SHORT_PASS == 0
            reached[window.row] = window.end
    assert reached == ends


def test_a_row_is_cut_alike_whoever_else_is_there() -> None:
    def windows_of_first(begins: list[int], ends: list[int]) -> list[tuple[int, int]]:
        return [(w.begin, w.end) for windows in _passes(begins, ends) for w in windows if w.row == 0]

    alone = windows_of_first([13], [150])
    assert alone == [(13, 32), (32, 64), (64, 96), (96, 128), (128, 150)]
    assert windows_of_first([13, 0, 77], [150, 90, 78]) == alone
