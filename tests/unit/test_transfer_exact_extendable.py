"""E: the guess from two vocabularies, what committed text teaches, and snapshots that never change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.chunk_rule import lacking_bytes

from vllm_tokentiming.errors import ConfigError
from vllm_tokentiming.transfer.boundary_prior import UNKNOWN, extendable_prior
from vllm_tokentiming.transfer.chunk_kernel import pending_after
from vllm_tokentiming.transfer.extendable import Extendable, ExtendableSet, continuation_bytes, pending_bytes

TOKENS = (b"a", b"b", None, b"\xc3", b"\xa9", b"", b"\xa9\xe4")


@given(st.text(min_size=1, max_size=4), st.integers(0, 15))
def test_pending_bytes_of_every_cut_through_a_text(text, cut):
    data = text.encode()[:cut]
    lacking = 0
    while lacking < 4:
        try:
            (data + text.encode()[cut : cut + lacking]).decode()
        except UnicodeDecodeError:
            lacking += 1
        else:
            break
    assert pending_bytes(data) == lacking == lacking_bytes(data)


@pytest.mark.parametrize(
    ("data", "pending"),
    [(b"", 0), (b"\xff", 0), (b"\xf8\x80", 0), (b"\x80\x80\x80\x80", 0), (b"\xe4\xbd\xa0\xbd", 0), (b"\xf0", 3)],
)
def test_pending_bytes_of_what_is_no_text(data, pending):
    assert pending_bytes(data) == pending


@given(st.lists(st.sampled_from([b"a", b"\xc3", b"\xa9", b"\xe4", b"\xbd\xa0", b"\xf0\x9f", b"\x98"]), max_size=6))
def test_pending_bytes_add_up_over_tokens(tokens):
    vocabulary = sorted(set(tokens))
    traits = Extendable.build(np.zeros(len(vocabulary), dtype=np.bool_), vocabulary).traits
    pending = 0
    for token in tokens:
        pending = pending_after(pending, int(traits[vocabulary.index(token)]))
    assert pending == lacking_bytes(b"".join(tokens))


def test_continuation_bytes():
    assert [continuation_bytes(t) for t in (b"", b"a", b"\xa9", b"\xa9\xa8", b"\xa9a", b"\xc3\xa9")] == [
        0,
        0,
        1,
        2,
        0,
        0,
    ]


def test_half_characters_belong_to_e_and_specials_never_do():
    none = Extendable.build(np.zeros(len(TOKENS), dtype=np.bool_), TOKENS)
    assert none.mask.tolist() == [False, False, False, True, False, False, True]
    every = Extendable.build(np.ones(len(TOKENS), dtype=np.bool_), TOKENS)
    assert every.mask.tolist() == [True, True, False, True, True, False, True]


def test_snapshot_cannot_be_written():
    snapshot = ExtendableSet(np.full(len(TOKENS), 0.5), TOKENS).snapshot()
    with pytest.raises(ValueError, match="read-only"):
        snapshot.traits[0] = 0


def test_learns_both_ways_and_leaves_older_snapshots_alone():
    learnt = ExtendableSet(np.array([0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]), TOKENS, threshold=0.3, strength=1.0)
    before = learnt.snapshot()
    assert before.mask[:2].tolist() == [True, False]
    learnt.observe([0, 1, 0, 1, 0], [True, False, True, False, True])
    # a: (0.9 + 0) / 4 = .225; b: (0 + 2) / 3
    assert learnt.snapshot().mask[:2].tolist() == [False, True]
    assert before.mask[:2].tolist() == [True, False]
    assert learnt.prior is before


def test_flag_that_turns_and_turns_back_is_as_before():
    learnt = ExtendableSet(np.zeros(len(TOKENS)), TOKENS, threshold=0.3, strength=1.0)
    learnt.observe([0, 0, 0], [False, True, True])  # 1/2, 1/3, 1/4
    assert not learnt.snapshot().mask[0]


def test_snapshot_is_shared_while_nothing_turns():
    learnt = ExtendableSet(np.zeros(len(TOKENS)), TOKENS)
    first = learnt.snapshot()
    learnt.observe([0, 1], [True, True])
    assert learnt.snapshot() is first


def test_ends_inside_characters_teach_nothing():
    learnt = ExtendableSet(np.zeros(len(TOKENS)), TOKENS)
    for _ in range(9):
        learnt.observe([3, 4, 2, 5], [False, True, False, False])
    mask = learnt.snapshot().mask
    assert mask[3], "a half character is extendable whatever was seen"
    assert not mask[[2, 4, 5]].any(), "é ended at a boundary; specials are never extendable"
    # The same continuation byte inside a longer character is not the token's end of anything.
    three = (b"\xe4", b"\xbd", b"\xa0")
    learnt = ExtendableSet(np.zeros(3), three)
    for _ in range(9):
        learnt.observe([0, 1, 2], [False, False, True])
    assert learnt.snapshot().mask.tolist() == [True, False, False]


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=40), st.integers(1, 9))
def test_learning_in_pieces_is_learning_at_once(seen, size):
    at_once, in_pieces = (ExtendableSet(np.full(len(TOKENS), 0.3), TOKENS) for _ in range(2))
    at_once.observe([d for d, _ in seen], [b for _, b in seen])
    for start in range(0, len(seen), size):
        piece = seen[start : start + size]
        in_pieces.observe([d for d, _ in piece], [b for _, b in piece])
    assert at_once.snapshot().traits.tolist() == in_pieces.snapshot().traits.tolist()
    for token in (0, 1):
        n, cuts = sum(d == token for d, _ in seen), sum(d == token and not b for d, b in seen)
        assert at_once.snapshot().mask[token] == (cuts + 0.3 > 0.3 * (n + 1.0))


def test_prior_sees_what_the_target_merges_and_the_draft_does_not():
    draft = (b"to", b"ken", b" the", b"x", None)
    target = (b"to", b"ken", b" the", b"token", b"token", b"token")
    prior = extendable_prior(draft, target)
    assert prior[0] > 0.5, "'to' is mostly the beginning of 'token'"
    assert prior[1] == prior[2] == 0.0, "'ken' and ' the' end where the target's tokens end"
    assert prior[3] == UNKNOWN
    assert prior[4] == 0.0


def test_prior_weighs_frequent_tokens_more():
    filler = tuple(b"%d" % i for i in range(5000))
    early = extendable_prior((b"a", b"b"), (b"a", b"ab", *filler))[0]
    late = extendable_prior((b"a", b"b"), (b"a", *filler, b"ab"))[0]
    assert early == pytest.approx(0.5, abs=0.01)
    assert late < 0.05


def test_prior_passes_over_what_the_draft_cannot_write():
    assert extendable_prior((b"a",), (b"ab", b"a", None)).tolist() == [0.0]
    assert extendable_prior((), ()).tolist() == []


@pytest.mark.parametrize(
    "options",
    [
        {"prior": np.zeros(2)},
        {"prior": np.full(len(TOKENS), 1.5)},
        {"prior": np.full(len(TOKENS), np.nan)},
        {"threshold": 1.5},
        {"strength": 0.0},
    ],
)
def test_refuses_options_that_cannot_work(options):
    prior = options.pop("prior", np.zeros(len(TOKENS)))
    with pytest.raises(ConfigError):
        ExtendableSet(prior, TOKENS, **options)


def test_refuses_arguments_of_different_length():
    with pytest.raises(ValueError, match="boundaries"):
        ExtendableSet(np.zeros(len(TOKENS)), TOKENS).observe([0], [])
    with pytest.raises(ValueError, match="mask covers"):
        Extendable.build(np.zeros(1, dtype=np.bool_), TOKENS)
