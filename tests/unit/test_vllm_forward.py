"""How a draft with weights of its own cuts what it has to read into passes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm_tokentiming.engine.vllm_forward import _SHORT_PASS, DraftForward, _passes


@pytest.mark.parametrize(
    ("begins", "ends"),
    [([0], [1]), ([0], [100]), ([31, 5, 64], [65, 6, 96]), ([0] * 40, [3] * 40), ([200, 0], [203, 500])],
)
def test_every_token_once_in_order_and_cut_by_position(begins: list[int], ends: list[int]) -> None:
    reached = list(begins)
    for windows in _passes(begins, ends):
        assert len({window.row for window in windows}) == len(windows)
        assert sum(window.end - window.begin for window in windows) <= _SHORT_PASS
        for window in windows:
            assert window.begin == reached[window.row]
            assert window.begin < window.end
            assert window.end == ends[window.row] or window.end % _SHORT_PASS == 0
            reached[window.row] = window.end
    assert reached == ends


def test_a_row_is_cut_alike_whoever_else_is_there() -> None:
    def windows_of_first(begins: list[int], ends: list[int]) -> list[tuple[int, int]]:
        return [(w.begin, w.end) for windows in _passes(begins, ends) for w in windows if w.row == 0]

    alone = windows_of_first([13], [150])
    assert alone == [(13, 32), (32, 64), (64, 96), (96, 128), (128, 150)]
    assert windows_of_first([13, 0, 77], [150, 90, 78]) == alone


@pytest.mark.parametrize(
    ("own_weights", "begin", "tokens", "taken"),
    [(True, 0, 70, 64), (True, 13, 70, 51), (True, 13, 19, 19), (True, 13, 5, 5), (True, 0, 0, 0), (False, 0, 70, 70)],
)
def test_what_has_no_room_is_cut_off_by_position_too(own_weights: bool, begin: int, tokens: int, taken: int) -> None:
    """5 of the window's tokens alone are better than none."""
    forward = SimpleNamespace(hand_step=SimpleNamespace(takes_every_pass=own_weights))
    assert DraftForward.whole_windows(forward, begin, tokens) == taken
    assert DraftForward.whole_windows(SimpleNamespace(hand_step=None), begin, tokens) == tokens
