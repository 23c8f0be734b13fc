"""What an alignment is (monotone, continuous, in band, cheapest), and what the aligner refuses."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher
from reference import alignment as reference

from vllm_tokentiming.alignment import Aligner, kernel
from vllm_tokentiming.alignment.band import band_of_row
from vllm_tokentiming.errors import ConfigError, VocabularyError

compiled_only = pytest.mark.skipif(not isinstance(kernel.align_batch, Dispatcher), reason="numba is switched off")


def table(tokens: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *(len(token) for token in tokens)]).astype(np.int32)
    return np.frombuffer(b"".join(tokens), dtype=np.uint8), offsets


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def align(draft: list[bytes], proxy: list[bytes], *, window_radius: int = 8):
    """One request; each token is its own entry of the vocabulary."""
    aligner = Aligner(*table(draft), *table(proxy), window_radius=window_radius)
    found = aligner.align(
        np.arange(len(draft), dtype=np.int32),
        int32(0, len(draft)),
        np.arange(len(proxy), dtype=np.int32),
        int32(0, len(proxy)),
    )
    assert found.path_offsets.tolist() == [0, len(found.path)]
    return [tuple(cell) for cell in found.path.tolist()], found.last_draft_index.tolist(), int(found.cost[0])


tokens = st.lists(st.lists(st.sampled_from(b"abc "), max_size=6).map(bytes), min_size=1, max_size=12)
few_tokens = st.lists(st.lists(st.sampled_from(b"ab"), max_size=3).map(bytes), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(draft=tokens, proxy=tokens, window_radius=st.integers(0, 8))
def test_paths_are_monotone_continuous_in_band_and_cost_what_they_say(draft, proxy, window_radius):
    path, last, cost = align(draft, proxy, window_radius=window_radius)
    assert path[0] == (0, 0)
    assert path[-1] == (len(draft) - 1, len(proxy) - 1)
    steps = {(i - h, j - g) for (h, g), (i, j) in itertools.pairwise(path)}
    assert steps <= {(1, 1), (1, 0), (0, 1)}
    assert all(reference.in_band(i, j, len(draft), len(proxy), window_radius) for i, j in path)
    assert cost == sum(reference.levenshtein(draft[i], proxy[j]) for i, j in path)
    assert last == [max(i for i, j in path if j == place) for place in range(len(proxy))]


@settings(max_examples=150, deadline=None)
@given(draft=few_tokens, proxy=few_tokens, window_radius=st.integers(0, 3))
def test_no_path_is_cheaper(draft, proxy, window_radius):
    _, _, cost = align(draft, proxy, window_radius=window_radius)
    every = reference.every_path(len(draft), len(proxy), window_radius)
    assert cost == min(sum(reference.levenshtein(draft[i], proxy[j]) for i, j in path) for path in every)


@settings(max_examples=150, deadline=None)
@given(draft=tokens, proxy=tokens, window_radius=st.integers(0, 8))
def test_the_cost_is_the_same_with_the_sides_exchanged(draft, proxy, window_radius):
    assert align(draft, proxy, window_radius=window_radius)[2] == align(proxy, draft, window_radius=window_radius)[2]


@given(text=tokens)
def test_identical_tokens_are_aligned_one_to_one(text):
    path, last, cost = align(text, text)
    assert path == [(place, place) for place in range(len(text))]
    assert last == list(range(len(text)))
    assert cost == 0


def test_equal_tokens_in_a_row_still_take_the_diagonal():
    assert align([b"a"] * 4, [b"a"] * 4)[0] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_one_draft_token_may_cover_two_proxy_tokens():
    assert align([b" New York"], [b" New", b" York"]) == ([(0, 0), (0, 1)], [0, 0], 9)
    path, last, _ = align([b" Manhattan", b" New York", b"."], [b" Manhattan", b" New", b" York", b"."])
    assert path == [(0, 0), (1, 1), (1, 2), (2, 3)]
    assert last == [0, 1, 1, 2]


def test_two_draft_tokens_may_make_one_proxy_token():
    assert align([b" New", b" York"], [b" New York"]) == ([(0, 0), (1, 0)], [1], 9)
    path, last, _ = align([b" Manhattan", b" New", b" York", b"."], [b" Manhattan", b" New York", b"."])
    assert path == [(0, 0), (1, 1), (2, 1), (3, 2)]
    assert last == [0, 2, 3]


def test_the_edit_distance_decides_even_against_the_text():
    """ " New" is nearer to " in" (3 edits) than to " New York" (5): the path is the cheapest one, not the true one."""
    path, last, _ = align([b" in", b" New York", b" City"], [b" in", b" New", b" York", b" City"])
    assert path == [(0, 0), (0, 1), (1, 2), (2, 3)]
    assert last == [0, 0, 1, 2]


def test_among_equally_cheap_steps_the_diagonal_wins_then_the_draft_moves():
    # All tokens differ by one byte, so the fewest cells win and every order of the two steps costs the same.
    assert align([b"a", b"b"], [b"x", b"y", b"z"])[0] == [(0, 0), (0, 1), (1, 2)]
    assert align([b"a", b"b", b"c"], [b"x", b"y"])[0] == [(0, 0), (1, 0), (2, 1)]
    # Both detours around (1, 1) cost nothing and the diagonal costs one byte more.
    assert align([b"", b"", b"q"], [b"", b"", b"q"])[0] == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize(("rows", "columns"), [(r, c) for r in range(1, 9) for c in range(1, 9)])
@pytest.mark.parametrize("window_radius", [0, 1, 2, 8])
def test_the_band_holds_the_reference_cells_and_a_path(rows, columns, window_radius):
    bands = [band_of_row(row, rows, columns, window_radius) for row in range(rows)]
    for row, (first, end) in enumerate(bands):
        inside = [j for j in range(columns) if reference.in_band(row, j, rows, columns, window_radius)]
        assert list(range(first, end)) == inside
    assert any(True for _ in reference.every_path(rows, columns, 0))


def test_a_narrow_band_forbids_what_a_wide_one_allows():
    draft, proxy = [b"a", b"b", b"c", b"d", b"e"], [b"a", b"a", b"a", b"a", b"e"]
    narrow, wide = align(draft, proxy, window_radius=0), align(draft, proxy, window_radius=8)
    assert narrow[0] == [(place, place) for place in range(5)]
    assert wide[2] <= narrow[2]
    shifted = [b"q", b"a", b"b", b"c", b"d"]
    assert align(draft, shifted, window_radius=1)[2] < align(draft, shifted, window_radius=0)[2]


@pytest.mark.parametrize(("draft", "proxy"), [([], []), ([b"a"], []), ([], [b"a", b"b"])])
def test_without_tokens_on_a_side_the_path_is_empty(draft, proxy):
    assert align(draft, proxy) == ([], [-1] * len(proxy), 0)


def test_requests_of_a_batch_do_not_touch_each_other():
    words = [b"a", b"b", b" New York", b" New", b" York"]
    aligner = Aligner(*table(words), *table(words), window_radius=8)
    found = aligner.align(int32(2, 0, 1, 3, 4), int32(0, 1, 1, 3, 5), int32(3, 4, 0, 1, 2), int32(0, 2, 3, 4, 5))
    assert found.path_offsets.tolist() == [0, 2, 2, 4, 6]
    assert found.path.tolist() == [[0, 0], [0, 1], [0, 0], [1, 0], [0, 0], [1, 0]]
    assert found.last_draft_index.tolist() == [0, 0, -1, 1, 1]
    assert found.cost.tolist() == [9, 0, 1, 9]


def test_no_requests():
    aligner = Aligner(*table([b"a"]), *table([b"a"]), window_radius=8)
    found = aligner.align(int32(), int32(0), int32(), int32(0))
    assert (len(found.path), found.path_offsets.tolist(), len(found.cost)) == (0, [0], 0)


def test_very_long_tokens():
    long = b"ab" * 3000
    path, last, cost = align([long, b"x"], [long[:-1] + b"c", b"x"])
    assert (path, last, cost) == ([(0, 0), (1, 1)], [0, 1], 1)
    assert align([b"x"], [long])[2] == len(long)


def test_results_outlive_the_next_call():
    aligner = Aligner(*table([b"a", b"b"]), *table([b"a", b"b"]), window_radius=8)
    first = aligner.align(int32(0, 1), int32(0, 2), int32(0, 1), int32(0, 2))
    kept = [array.copy() for array in first]
    aligner.align(int32(1), int32(0, 1), int32(0), int32(0, 1))
    assert all(np.array_equal(array, copy) for array, copy in zip(first, kept, strict=True))


@compiled_only
def test_more_tokens_than_the_workspace_was_made_for():
    count = 300
    path, last, cost = align([b"%d" % n for n in range(count)], [b"%d" % n for n in range(count)])
    assert (path, last, cost) == ([(n, n) for n in range(count)], list(range(count)), 0)


@compiled_only
def test_threads_may_share_an_aligner():
    words = [b"%d" % n for n in range(500)]
    aligner = Aligner(*table(words), *table(words), window_radius=8)
    wrong: list[int] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(300):
            ids = random.integers(0, 500, size=12).astype(np.int32)
            if aligner.align(ids, int32(0, 12), ids, int32(0, 12)).cost[0] != 0:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


WORDS = table([b"a", b"b", b"c"])


def aligner_of_three_words() -> Aligner:
    return Aligner(*WORDS, *WORDS, window_radius=8)


@pytest.mark.parametrize("bad", [3, -1, 2**31 - 1, -(2**31)])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(VocabularyError, match=rf"draft token id {bad} is outside its vocabulary of 3"):
        aligner_of_three_words().align(int32(0, bad), int32(0, 2), int32(0), int32(0, 1))
    with pytest.raises(VocabularyError, match=rf"proxy token id {bad} is outside its vocabulary of 3"):
        aligner_of_three_words().align(int32(0), int32(0, 1), int32(bad), int32(0, 1))


@pytest.mark.parametrize(
    ("draft_offsets", "proxy_offsets", "message"),
    [
        (int32(0, 1), int32(0, 2), "draft_offsets"),
        (int32(0, 3), int32(0, 2), "draft_offsets"),
        (int32(1, 2), int32(0, 2), "draft_offsets"),
        (int32(0, 9, 2), int32(0, 1, 2), "draft_offsets"),
        (int32(0, 2), int32(0, -1), "proxy_offsets"),
        (int32(0, 2), int32(0, 1, 2), "1 requests, proxy_offsets 2"),
        (int32(0, 2), int32(0), "1 requests, proxy_offsets 0"),
        (int32(0, 2), int32(), "1 requests"),
        (int32(), int32(0, 2), "draft_offsets is empty"),
    ],
)
def test_offsets_that_do_not_cut_the_ids_are_refused(draft_offsets, proxy_offsets, message):
    with pytest.raises(ValueError, match=message):
        aligner_of_three_words().align(int32(0, 1), draft_offsets, int32(0, 1), proxy_offsets)


@compiled_only
@pytest.mark.parametrize("ids", [np.array([0, 1]), np.array([[0, 1]], dtype=np.int32), [0, 1]])
def test_arrays_of_another_type_are_refused(ids):
    with pytest.raises(TypeError, match=r"proxy_ids is .*; it must be a one-dimensional int32 array"):
        aligner_of_three_words().align(int32(0, 1), int32(0, 2), ids, int32(0, len(ids)))
    assert len(kernel.align_batch.signatures) == 1


def test_read_only_and_strided_arrays_work():
    frozen = int32(0, 1)
    frozen.setflags(write=False)
    strided = int32(0, 9, 1, 9)[::2]
    found = aligner_of_three_words().align(frozen, int32(0, 2), strided, int32(0, 2))
    assert found.last_draft_index.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("flat_bytes", "offsets"),
    [
        (WORDS[0].astype(np.int32), WORDS[1]),
        (WORDS[0], WORDS[1].astype(np.int64)),
        (WORDS[0], WORDS[1][:-1]),
        (WORDS[0], int32(0, 2, 1, 3)),
        (WORDS[0], int32()),
    ],
)
def test_tables_that_do_not_fit_are_refused(flat_bytes, offsets):
    with pytest.raises(VocabularyError, match="target vocabulary"):
        Aligner(*WORDS, flat_bytes, offsets, window_radius=8)


def test_a_negative_radius_is_refused():
    with pytest.raises(ConfigError, match="window_radius is -1"):
        Aligner(*WORDS, *WORDS, window_radius=-1)
