"""The compiled exact transfer equals the plain chunk rule on random input, with cold, warm and overflowing caches."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference.chunk_rule import chunk_rule
from reference.toy_rules import flags_by, noise, rows_of
from uncompiled import run_uncompiled

from vllm_tokentiming.transfer import chunk_kernel as kernel
from vllm_tokentiming.transfer.chunks import ChunkTable
from vllm_tokentiming.transfer.exact import ChunkTransfer
from vllm_tokentiming.transfer.extendable import Extendable
from vllm_tokentiming.transfer.interface import Draft

# Specials, whole characters, and every way in which a token can begin or end inside one.
DRAFT = (
    b"", b"", b"a", b"b", b"ab", b"\xc3", b"\xa9", b"a\xc3", b"\xe4", b"\xe4\xbd", b"\xbd", b"\xa0", b"\xbd\xa0",
    b"\xa9a", b"\xf0", b"\xf0\x9f", b"\x9f\x98", b"\x80", b"\xa9\xe4", "你".encode(), "é".encode(), b" ",
)  # fmt: skip
ENDS = (0,)
TARGET_SIZE = 9


def encode(run, last):
    """Any function will do: here one that gives 0 to 4 tokens out of few, so that candidates collide."""
    length = (0, 1, 1, 1, 2, 2, 3, 4)[noise("length", run, last) % 8]
    return tuple(noise("token", run, last, j) % (3 + j) for j in range(length))


def linked(run, last, position):
    return noise("link", run, last, position) % 4 != 0


@st.composite
def cases(draw):
    count = draw(st.integers(0, 6))
    top_k = draw(st.integers(1, 8))
    law_ids, law_probs, drafted = [], [], []
    for _ in range(count):
        # Duplicates are allowed: a law may name a token twice.
        ids = draw(st.lists(st.integers(0, len(DRAFT) - 1), min_size=top_k, max_size=top_k))
        weights = draw(
            st.lists(st.sampled_from([0.0, 0.0, 1e-300, 1e-12, 0.1, 1.0, 7.0]), min_size=top_k, max_size=top_k)
        )
        drafted.append(draw(st.sampled_from(ids)))
        law_ids.append(ids)
        law_probs.append(weights)
    return {
        "drafted": drafted,
        "law_ids": np.array(law_ids, dtype=np.int32).reshape(count, top_k),
        "law_probs": np.array(law_probs, dtype=np.float64).reshape(count, top_k),
        "extendable": draw(st.sets(st.integers(0, len(DRAFT) - 1))),
        "longest_run": draw(st.integers(0, 3)),
        "planned_steps": count + draw(st.integers(0, 1)),
        "max_tokens": draw(st.integers(1, 10)),
    }


def law(ids, probs):
    summed: dict[int, float] = {}
    for i, p in zip(ids.tolist(), probs.tolist(), strict=True):
        summed[i] = summed.get(i, 0.0) + p
    return summed


TRANSFERS: dict[tuple[int, int], ChunkTransfer] = {}


def transfer_for(longest_run, max_run_chunks):
    """Kept across examples: the caches are warm, and the small ones overflow again and again."""
    key = (longest_run, max_run_chunks)
    if key not in TRANSFERS:
        table = ChunkTable(
            draft_vocab_size=len(DRAFT),
            target_vocab_size=TARGET_SIZE,
            encode=lambda run, lasts: [encode(run, d) for d in lasts],
            certify=lambda chunks, encodings: flags_by(linked, chunks, encodings),
            max_run_chunks=max_run_chunks,
        )
        TRANSFERS[key] = ChunkTransfer(table, end_ids_in_draft_vocab=ENDS, longest_run=longest_run)
    return TRANSFERS[key]


def draft_of(case):
    return Draft(case["drafted"], case["law_ids"], case["law_probs"], case["planned_steps"], case["max_tokens"])


@pytest.mark.parametrize("max_run_chunks", [1, 20, 1 << 16])
@settings(max_examples=150, deadline=None)
@given(case=cases())
@example(
    case={
        "drafted": [5, 6],
        "law_ids": np.array([[5, 2], [6, 5]], dtype=np.int32),
        "law_probs": np.array([[0.5, 0.5], [0.5, 0.5]]),
        "extendable": set(),
        "longest_run": 0,
        "planned_steps": 2,
        "max_tokens": 4,
    }
)
def test_equals_the_reference(case, max_run_chunks):
    snapshot = Extendable.build(np.isin(np.arange(len(DRAFT)), list(case["extendable"])), DRAFT)
    transfer = transfer_for(case["longest_run"], max_run_chunks)
    got = rows_of(transfer.exact_rows(draft_of(case), snapshot))
    expected = chunk_rule(
        case["drafted"],
        [law(i, p) for i, p in zip(case["law_ids"], case["law_probs"], strict=True)],
        token_bytes=DRAFT,
        extendable=[i for i in case["extendable"] if DRAFT[i]],
        encode=encode,
        linked=linked,
        end_ids=ENDS,
        longest_run=case["longest_run"],
        planned_steps=case["planned_steps"],
        max_tokens=case["max_tokens"],
    )
    assert [token for token, _ in got] == [token for token, _ in expected]
    for (_, row), (_, wanted) in zip(got, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-12, abs=0)
        assert sum(row.values()) == pytest.approx(1.0, abs=1e-14)


@settings(max_examples=100, deadline=None)
@given(
    batch=st.lists(st.one_of(cases(), st.lists(st.integers(0, TARGET_SIZE - 1), max_size=3)), max_size=5),
    extendable=st.sets(st.integers(0, len(DRAFT) - 1)),
    max_run_chunks=st.sampled_from([1, 20, 1 << 16]),
)
def test_a_batch_is_its_drafts_one_by_one_rounded(batch, extendable, max_run_chunks):
    """Drafts with laws of several widths, beside proxy tokens that are given; cold and warm."""
    snapshot = Extendable.build(np.isin(np.arange(len(DRAFT)), list(extendable)), DRAFT)
    alone, alone_transfer = transfer_for(2, 1 << 16), transfer_for(2, max_run_chunks)
    drafts = [draft_of(b) if isinstance(b, dict) else Draft([2], None, None, 1, 9) for b in batch]
    given = [None if isinstance(b, dict) else b for b in batch]
    made = alone_transfer.transfer(drafts, given, extendable=snapshot)
    # The next cycle must not write into what was handed out.
    alone_transfer.transfer([Draft([2], np.array([[2]]), np.ones((1, 1)), 1, 9)], [None], extendable=snapshot)
    places, probs = made.rows.places.tolist(), made.rows.probs.tolist()
    row = 0
    for draft, proxy, tokens in zip(drafts, given, made.ids_in_target_vocab, strict=True):
        if proxy is None:
            expected = rows_of(alone.exact_rows(draft, snapshot))
        else:
            expected = [(token, {token: 1.0}) for token in proxy]
        assert tokens == [token for token, _ in expected]
        for _, law in expected:
            size = len(law)
            assert places[:size] == [row * TARGET_SIZE + token for token in law]
            assert probs[:size] == [float(np.float32(p)) for p in law.values()]
            places, probs, row = places[size:], probs[size:], row + 1
    assert not places


def test_bounded_cache_forgets_runs_and_keeps_single_tokens():
    transfer = transfer_for(3, 20)
    transfer.table.add_singles()
    rng = np.random.default_rng(0)
    largest = 0
    everything = Extendable.build(np.ones(len(DRAFT), dtype=np.bool_), DRAFT)
    for _ in range(300):
        ids = rng.integers(2, len(DRAFT), (4, 5)).astype(np.int32)
        transfer.exact_rows(Draft(ids[:, 0].tolist(), ids, np.full((4, 5), 0.2), 4, max_tokens=5), everything)
        largest = max(largest, transfer.table.num_run_chunks)
    assert largest <= 20 + 4 * 5
    nothing = Extendable.nothing(len(DRAFT))
    for d in range(len(DRAFT)):
        assert transfer.table.singles[d] != kernel.UNKNOWN
        exact = transfer.exact_rows(Draft([d], np.array([[d]]), np.ones((1, 1)), 1, max_tokens=99), nothing)
        assert tuple(exact.tokens_in_target_vocab) == encode((), d)


def test_compiles_once(monkeypatch):
    """Read-only, transposed or wider input must not compile a second kernel in the middle of serving."""
    transfer = transfer_for(3, 1 << 16)
    ids = np.arange(2, 8, dtype=np.int64).reshape(3, 2)
    frozen = np.full((2, 3), 0.5, dtype=np.float32).T
    frozen.setflags(write=False)
    kernels = (kernel.chunk_rows, kernel.insert_many, kernel.pack_entries)
    transfer.warm_up()
    before = [len(getattr(each, "signatures", [])) for each in kernels]
    transfer.exact_rows(Draft(ids[:, 0].tolist(), ids, frozen, 3, max_tokens=64), Extendable.nothing(len(DRAFT)))
    everything = Extendable.build(np.ones(len(DRAFT), dtype=np.bool_), DRAFT)
    transfer.exact_rows(Draft(ids[:, 0].tolist(), ids, frozen, 3, max_tokens=64), everything)
    assert [len(getattr(each, "signatures", [])) for each in kernels] == before


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="this is the run without the compiler")
def test_the_same_holds_without_the_compiler():
    assert "6 passed, 1 skipped" in run_uncompiled(__file__)
