"""The exact transfer: what its rows are in cases that can be worked out by hand, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tokentiming.errors import ConfigError, VocabularyError
from vllm_tokentiming.transfer import chunk_kernel as kernel
from vllm_tokentiming.transfer.chunks import ChunkTable
from vllm_tokentiming.transfer.exact import ChunkTransfer
from vllm_tokentiming.transfer.extendable import Extendable
from vllm_tokentiming.transfer.interface import Draft

# draft id:  0     1     2      3 (end)  4        5
DRAFT = (b"a", b"b", b"ab", b"", b"\xc3", b"\xa9")
END = 3
# Target: a=0 b=1 ab=2 aba=3 é=4 end=5
ENCODINGS = {
    ((), 0): (0,),
    ((), 1): (1,),
    ((), 2): (2,),
    ((), 3): (5,),
    ((0,), 0): (0, 0),
    ((0,), 1): (2,),
    ((0,), 2): (0, 2),
    ((0,), 3): (0, 5),
    ((4,), 5): (4,),
    ((2,), 0): (3,),
}


class CountingEncoder:
    def __init__(self):
        self.asked = []

    def __call__(self, run, lasts):
        self.asked += [(run, d) for d in lasts]
        return [ENCODINGS.get((run, d), ()) for d in lasts]


def build(*, encode=None, certify=None, longest_run=3, ends=(END,)):
    options = {} if certify is None else {"certify": certify}
    table = ChunkTable(draft_vocab_size=len(DRAFT), target_vocab_size=6, encode=encode or CountingEncoder(), **options)
    return ChunkTransfer(table, end_ids_in_draft_vocab=ends, longest_run=longest_run)


def extendable(*ids):
    return Extendable.build(np.isin(np.arange(len(DRAFT)), ids), DRAFT)


def laws(*rows):
    """One dict a drafted token; rows are filled up with places without mass."""
    width = max(map(len, rows))
    ids = [[*row, *[0] * (width - len(row))] for row in rows]
    probs = [[*row.values(), *[0.0] * (width - len(row))] for row in rows]
    return {
        "law_ids": np.array(ids, dtype=np.int32).reshape(len(rows), width),
        "law_probs": np.array(probs, dtype=np.float64).reshape(len(rows), width),
    }


def rows(transfer, drafted, law, *, e=(), planned=None, max_tokens=9):
    exact = transfer.exact_rows(
        Draft(drafted, **law, planned_steps=planned or len(drafted), max_tokens=max_tokens), extendable(*e)
    )
    o = exact.offsets
    return [
        (int(t), {int(i): p for i, p in zip(exact.ids_in_target_vocab[a:b], exact.probs[a:b], strict=True)})
        for t, a, b in zip(exact.tokens_in_target_vocab, o[:-1], o[1:], strict=True)
    ]


def proposals(transfer, *drafts, given=None):
    """Of drafts that stop as planned, and their rows."""
    drafts = [Draft(ids, **law, planned_steps=len(ids), max_tokens=3) for ids, law in drafts]
    return transfer.transfer(drafts, given or [None] * len(drafts), extendable=extendable())


def test_single_tokens_are_mapped_and_their_mass_is_kept():
    got = rows(build(), [0, 1], laws({0: 0.25, 1: 0.25, 2: 0.5}, {1: 1.0}))
    assert got == [(0, {0: 0.25, 1: 0.25, 2: 0.5}), (1, {1: 1.0})]


def test_many_to_one_takes_the_law_of_the_last_draft_token():
    # a is extendable and known; what follows it decides between "ab" and "a".
    got = rows(build(), [0, 1], laws({0: 0.9, 2: 0.1}, {0: 0.25, 1: 0.75}), e=[0])
    assert got == [(2, {0: 0.25, 2: 0.75})]


def test_one_to_many_conditions_the_second_token_on_the_first_and_on_going_on():
    # After the run "a": a·a → a a, a·ab → a ab, a·b → ab, a·end → a end.
    got = rows(build(), [0, 2], laws({0: 1.0}, {0: 0.125, 1: 0.5, 2: 0.25, 3: 0.125}), e=[0])
    assert got == [(0, {0: 0.5, 2: 0.5}), (2, {0: 0.25, 2: 0.5, 5: 0.25})]


def test_law_of_a_chunk_that_could_have_gone_on_leaves_out_extendable_tokens():
    drafted, law = [1, 1], laws({0: 0.5, 1: 0.3, 2: 0.2}, {1: 1.0})
    got = rows(build(), drafted, law, e=[0])
    assert got[0] == (1, {1: pytest.approx(0.6), 2: pytest.approx(0.4)})


def test_last_planned_token_could_not_have_gone_on():
    law = laws({0: 0.5, 1: 0.5})
    assert rows(build(), [1], law, e=[0], planned=1) == [(1, {0: 0.5, 1: 0.5})]
    # It was not known that the draft would stop here: b cannot have been extended, a would have been.
    assert rows(build(), [1], law, e=[0], planned=2) == [(1, {1: 1.0})]
    assert rows(build(), [0], law, e=[0], planned=2) == [(0, {0: 1.0})]


def test_run_is_bounded():
    law = laws({0: 1.0}, {0: 0.5, 1: 0.5}, {1: 1.0})
    got = rows(build(longest_run=1), [0, 0, 1], law, e=[0])
    # Chunks (a)a and b: at the second token no E counts any more.
    assert got == [(0, {0: 0.5, 2: 0.5}), (0, {0: 1.0}), (1, {1: 1.0})]


def test_end_token_is_proposed_once_and_ends_the_proposal():
    got = rows(build(), [3, 0], laws({3: 0.5, 0: 0.5}, {0: 1.0}))
    assert got == [(5, {0: 0.5, 5: 0.5})]
    assert rows(build(), [0, 3], laws({0: 1.0}, {3: 1.0}), e=[0]) == [(0, {0: 1.0}), (5, {5: 1.0})]


def test_characters_are_never_cut_whatever_e_says_and_however_short_runs_are():
    law = laws({4: 0.5, 0: 0.5}, {5: 1.0})
    assert rows(build(longest_run=0), [4, 5], law) == [(4, {4: 1.0})]
    # Drafting ended inside the character: no proxy token, and none after it.
    assert rows(build(), [0, 4], laws({0: 1.0}, {4: 0.5, 1: 0.5})) == [(0, {0: 1.0})]
    # The candidate that completes nothing has no part in the row of one that does.
    assert rows(build(), [1], laws({4: 0.5, 1: 0.5})) == [(1, {1: 1.0})]


def test_chunk_without_proxy_tokens_ends_the_proposal():
    assert rows(build(), [0, 5, 0], laws({0: 1.0}, {5: 1.0}, {0: 1.0})) == [(0, {0: 1.0})]
    made = proposals(build(), ([5], laws({5: 1.0})))
    assert made.ids_in_target_vocab == [[]]
    assert len(made.rows.places) == 0


def test_failed_link_is_a_point_mass_and_leaves_the_others_their_law():
    def certify(chunks, encodings):
        return [chunk[-1] != 1 for chunk, e in zip(chunks, encodings, strict=True) for _ in e]

    law = laws({0: 0.25, 1: 0.25, 2: 0.5})
    assert rows(build(certify=certify), [1], law) == [(1, {1: 1.0})]
    ((_, row),) = rows(build(certify=certify), [2], law)
    assert row == {0: pytest.approx(1 / 3), 2: pytest.approx(2 / 3)}


def test_failed_link_reveals_its_token_only():
    """Alignment says that the first proxy token is the run's; the second still has the law of the last draft token."""

    def certify(_chunks, encodings):
        return [j > 0 for e in encodings for j in range(len(e))]

    got = rows(build(certify=certify), [0, 2], laws({0: 1.0}, {0: 0.25, 1: 0.5, 2: 0.25}), e=[0])
    assert got == [(0, {0: 1.0}), (2, {0: 0.5, 2: 0.5})]


def test_proposal_is_cut_at_the_most_wanted():
    law = laws({0: 1.0}, {0: 0.5, 2: 0.5})
    whole = rows(build(), [0, 2], law, e=[0])
    assert len(whole) == 2
    assert rows(build(), [0, 2], law, e=[0], max_tokens=1) == whole[:1]
    assert rows(build(), [0, 2], law, e=[0], max_tokens=0) == []


def test_float32_at_the_boundary():
    made = proposals(build(), ([0], laws({0: 1 / 3, 1: 2 / 3})))
    assert made.ids_in_target_vocab == [[0]]
    assert (made.rows.places.dtype, made.rows.probs.dtype) == (np.int64, np.float32)
    np.testing.assert_array_equal(made.rows.probs, np.float32([1 / 3, 2 / 3]))


def test_rows_of_a_batch_follow_each_other_and_given_tokens_are_point_masses():
    drafts = [([0], laws({0: 0.25, 1: 0.75})), ([5], laws({5: 1.0})), ([1], {"law_ids": None, "law_probs": None})]
    made = proposals(build(), *drafts, ([1], laws({1: 1.0})), given=[None, None, [3, 2], None])
    assert made.ids_in_target_vocab == [[0], [], [3, 2], [1]]
    rows, ids = np.divmod(made.rows.places, made.rows.vocab_size)
    assert rows.tolist() == [0, 0, 1, 2, 3]
    assert ids.tolist() == [0, 1, 3, 2, 1]
    assert made.rows.probs.tolist() == [0.25, 0.75, 1.0, 1.0, 1.0]


def test_drafts_that_are_alone_have_their_own_e():
    law = laws({0: 0.25, 1: 0.75}, {1: 1.0})
    drafts = [Draft([0, 1], **law, planned_steps=2, max_tokens=3, alone=alone) for alone in (False, True, False)]
    made = build().transfer(drafts, [None] * 3, extendable=extendable(0), extendable_alone=extendable())
    assert made.ids_in_target_vocab == [[2], [0, 1], [2]]
    assert made.rows.probs.tolist() == [1.0, 0.25, 0.75, 1.0, 1.0]


def test_results_are_the_callers():
    transfer = build()
    first = proposals(transfer, ([0], laws({0: 0.5, 1: 0.5})))
    kept = first.rows.probs.copy(), first.rows.places.copy()
    proposals(transfer, ([1], laws({1: 0.9, 2: 0.1})))
    np.testing.assert_array_equal(first.rows.probs, kept[0])
    np.testing.assert_array_equal(first.rows.places, kept[1])


def test_scratch_grows_with_the_laws():
    encode = CountingEncoder()
    table = ChunkTable(draft_vocab_size=3000, target_vocab_size=3000, encode=lambda _run, lasts: [(d,) for d in lasts])
    transfer = ChunkTransfer(table)
    ids = np.arange(3000, dtype=np.int32).reshape(1, -1).repeat(20, axis=0)
    draft = Draft(list(range(20)), ids, np.full((20, 3000), 1 / 3000), planned_steps=20, max_tokens=20)
    exact = transfer.exact_rows(draft, Extendable.nothing(3000))
    np.testing.assert_allclose(exact.probs, 1 / 3000, rtol=1e-12)
    assert len(exact.tokens_in_target_vocab) == 20
    assert not encode.asked


def test_each_chunk_is_encoded_once():
    encode = CountingEncoder()
    transfer = build(encode=encode)
    transfer.warm_up()
    assert sorted(encode.asked) == [((), d) for d in range(len(DRAFT))]
    for _ in range(3):
        rows(transfer, [0, 2, 1], laws({0: 1.0}, {0: 0.5, 2: 0.5}, {1: 1.0}), e=[0])
    assert len(encode.asked) == len(set(encode.asked))


def test_warm_up_of_some_leaves_the_rest_for_later():
    encode = CountingEncoder()
    transfer = build(encode=encode)
    transfer.warm_up(singles=2)
    assert encode.asked == [((), 0), ((), 1)]
    assert rows(transfer, [2], laws({2: 1.0})) == [(2, {2: 1.0})]
    assert encode.asked[2:] == [((), 2)]


def test_warm_up_is_idempotent():
    encode = CountingEncoder()
    transfer = build(encode=encode)
    transfer.warm_up()
    transfer.warm_up()
    assert len(encode.asked) == len(DRAFT)


@pytest.mark.parametrize(
    ("drafted", "law", "message"),
    [
        ([1], laws({0: 1.0}), "could have drawn"),
        ([0], laws({0: float("inf"), 1: 1.0}), "not finite"),
        ([0], laws({0: 0.5, 9: 0.5}), "outside the draft vocabulary"),
        ([0], laws({0: 0.5, -1: 0.5}), "outside the draft vocabulary"),
        ([9], laws({9: 1.0}), "not below"),
        ([-1], laws({0: 1.0}), "not below"),
        ([0, 1], laws({0: 1.0}), "shapes"),
    ],
)
def test_refuses_laws_that_cannot_be_right(drafted, law, message):
    with pytest.raises(ValueError, match=message):
        rows(build(), drafted, law)


def test_refusal_leaves_the_scratch_clean():
    transfer = build()
    with pytest.raises(ValueError):
        rows(transfer, [0, 2], laws({0: 0.5, 1: 0.5}, {1: 1.0}))
    assert rows(transfer, [0], laws({0: 0.5, 1: 0.5})) == [(0, {0: 0.5, 1: 0.5})]


def test_token_that_had_no_mass_is_a_point_mass():
    """A draw by inverse cumulative sums may, with probability 0, end on a place without mass."""
    assert rows(build(), [2], laws({2: 0.0})) == [(2, {2: 1.0})]
    ((token, row),) = rows(build(), [2], laws({2: 0.0, 0: 1.0}))
    assert (token, row) == (2, {2: 0.0, 0: 1.0})


def test_not_a_number_is_no_mass():
    assert rows(build(), [0], laws({0: 0.5, 1: float("nan"), 2: 0.5})) == [(0, {0: 0.5, 2: 0.5})]


def test_refuses_e_of_another_vocabulary_and_more_than_planned():
    with pytest.raises(ValueError, match="E covers"):
        build().exact_rows(Draft([0], **laws({0: 1.0}), planned_steps=1, max_tokens=1), Extendable.nothing(2))
    with pytest.raises(ValueError, match="planned"):
        rows(build(), [0, 0], laws({0: 1.0}, {0: 1.0}), planned=1)


@pytest.mark.parametrize(
    ("encode", "certify"),
    [
        (lambda _run, lasts: [(6,)] * len(lasts), None),
        (lambda _run, lasts: [(-1,)] * len(lasts), None),
        (lambda _run, _lasts: [], None),
        (lambda _run, lasts: [(0, 1)] * len(lasts), lambda _chunks, encodings: [True] * len(encodings)),
    ],
)
def test_refuses_answers_that_are_nonsense(encode, certify):
    with pytest.raises(VocabularyError):
        rows(build(encode=encode, certify=certify), [0], laws({0: 1.0}))


def test_refuses_options_that_cannot_work():
    with pytest.raises(ConfigError, match="longest_run"):
        build(longest_run=-1)
    with pytest.raises(ConfigError, match="end tokens"):
        build(ends=[99])
    with pytest.raises(ConfigError, match="at least 1"):
        ChunkTable(draft_vocab_size=0, target_vocab_size=1, encode=CountingEncoder())


def test_hash_table_spreads_real_keys():
    """Runs times vocabulary size plus frequent tokens: probes stay short."""
    rng = np.random.default_rng(0)
    draft_size, keys = 49152, np.empty(0, dtype=np.int64)
    for run in range(1, 1500):
        keys = np.concatenate([keys, run * draft_size + rng.zipf(1.3, 64) % draft_size])
    keys = np.unique(keys)
    slots = kernel.key_slots(len(keys))
    table = np.full((slots, 2), kernel.EMPTY, dtype=np.int64)
    for word, key in enumerate(keys):
        kernel.insert(table, key, word)
    assert all(kernel.find(table, key) == word for word, key in enumerate(keys))
    assert kernel.find(table, 0) == kernel.UNKNOWN
    wanted = np.array([kernel._first_slot(key, slots - 1) for key in keys])
    taken = np.flatnonzero(table[:, 0] != kernel.EMPTY)
    at = np.empty(len(keys), dtype=np.int64)
    at[table[taken, 1]] = taken
    assert ((at - wanted) % slots).mean() < 2.0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(1e-300, 1e3)), min_size=1, max_size=12), st.data())
def test_rows_are_laws_whatever_the_scale(support, data):
    """Sums to 1 and gives the proposed token mass, from the tiniest to unnormalised weights."""
    ids, weights = zip(*support, strict=True)
    drafted = data.draw(st.sampled_from(ids))
    table = ChunkTable(
        draft_vocab_size=5, target_vocab_size=3, encode=lambda _run, lasts: [(d % 3, d // 3) for d in lasts]
    )
    draft = Draft([drafted], np.array([ids], dtype=np.int32), np.array([weights]), planned_steps=1, max_tokens=2)
    exact = ChunkTransfer(table).exact_rows(draft, Extendable.nothing(5))
    for j, token in enumerate(exact.tokens_in_target_vocab):
        a, b = exact.offsets[j : j + 2]
        row = dict(zip(exact.ids_in_target_vocab[a:b].tolist(), exact.probs[a:b].tolist(), strict=True))
        assert len(row) == b - a
        assert sum(row.values()) == pytest.approx(1.0, abs=1e-12)
        assert row[int(token)] >= 0.0
