"""Repeats against a plain search through the whole text."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tokentiming.repeats import SHORTEST_MATCH, Repeat, RepeatAcceptance, RequestRepeats

TEXTS = st.lists(st.integers(0, 2), max_size=60)


def searched(ids: list[int], most: int, *, before: int | None = None) -> tuple[list[int], int] | None:
    """The latest earlier occurrence of the last three tokens, and how far back it agrees with the end.

    It ends, and is followed by something, in the first ``before`` tokens.
    """
    for end in range((len(ids) if before is None else before) - 1, SHORTEST_MATCH - 1, -1):
        if ids[end - SHORTEST_MATCH : end] == ids[-SHORTEST_MATCH:]:
            length = SHORTEST_MATCH
            while length < min(32, end) and ids[end - length - 1] == ids[len(ids) - length - 1]:
                length += 1
            longer = list(ids)
            while len(longer) < end + most:
                longer.append(longer[end + len(longer) - len(ids)])
            return longer[end : end + most], length
    return None


@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=5), most=st.integers(1, 9))
def test_finds_what_a_search_finds_however_the_text_comes(text: list[int], cuts: list[int], most: int) -> None:
    repeats = RequestRepeats()
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, stop in itertools.pairwise(bounds):
        repeats.commit(text[start:stop])
        found = repeats.find(most)
        expected = searched(text[:stop], most)
        assert (None if found is None else tuple(found)) == expected


@given(text=TEXTS, after=st.lists(st.integers(0, 2), max_size=5), most=st.integers(1, 9))
def test_finds_what_followed_where_the_text_went_like_its_end_and_more(
    text: list[int], after: list[int], most: int
) -> None:
    repeats = RequestRepeats()
    repeats.commit(text)
    found = repeats.find(most, after=after)
    expected = searched([*text, *after], most, before=len(text))
    assert (None if found is None else tuple(found)) == expected
    assert repeats.num_tokens == len(text)
    untouched = RequestRepeats()
    untouched.commit(text)
    assert repeats.find(most) == untouched.find(most)


def test_nothing_is_wanted_or_known() -> None:
    repeats = RequestRepeats()
    assert repeats.find(4) is None
    repeats.commit([1, 2])
    assert repeats.find(4) is None
    repeats.commit([3, 1, 2, 3])
    assert repeats.find(0) is None


def test_a_period_goes_on() -> None:
    repeats = RequestRepeats()
    repeats.commit([5, 1, 2, 1, 2, 1, 2])
    assert repeats.find(5) == Repeat([1, 2, 1, 2, 1], 4)


def test_chances_follow_what_was_accepted_and_longer_matches_are_apart() -> None:
    learned = RepeatAcceptance()
    short, long = Repeat([1, 2, 3, 4], 3), Repeat([1, 2, 3, 4], 20)
    before = learned.expected(long, alone=False)
    for _ in range(300):
        learned.observe(short, 0)
    assert learned.expected(short, alone=False) < 0.1
    assert learned.expected(long, alone=False) == before
    assert learned.expected(short, alone=True) == RepeatAcceptance().expected(short, alone=False)
    for _ in range(300):
        learned.observe(short, 4)
    assert learned.expected(short, alone=False) > 2.0


def test_expected_count_is_that_of_tokens_accepted_one_after_the_other() -> None:
    learned = RepeatAcceptance()
    for accepted in (5, 0, 2, 5, 5):
        learned.observe(Repeat([0] * 5, 7), accepted)
        chance = learned.expected(Repeat([0], 7), alone=False)
        expected = learned.expected(Repeat([0] * 5, 7), alone=False)
        assert expected == pytest.approx(sum(chance**k for k in range(1, 6)))


def test_tokens_are_worthwhile_as_far_as_they_are_likely() -> None:
    learned, repeat = RepeatAcceptance(), Repeat([1, 2, 3, 4], 3)
    chance = learned.chance(repeat, alone=False)

    def kept(*, reach: float, least: float) -> int:
        found = learned.worthwhile(repeat, reach=reach, least=least, alone=False)
        return 0 if found is None else len(found.ids_in_target_vocab)

    assert kept(reach=1.0, least=0.0) == 4
    assert kept(reach=1.0, least=chance**2) == 1
    assert kept(reach=chance, least=chance**2 * 0.99) == 1
    assert kept(reach=1.0, least=chance) == 0
    assert learned.worthwhile(repeat, reach=1.0, least=chance**2, alone=False) == Repeat([1], 3)
    for _ in range(300):
        learned.observe(repeat, 0)
    assert kept(reach=1.0, least=chance**2) == 0
    assert learned.worthwhile(repeat, reach=1.0, least=chance**2, alone=True) == Repeat([1], 3)
