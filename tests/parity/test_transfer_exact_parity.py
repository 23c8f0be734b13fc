"""The compiled exact transfer equals the plain chunk rule on random input, with cold, warm and overflowing caches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference.chunk_rule import chunk_rule
from reference.toy_rules import noise, rows_of

from vllm_tokentiming.transfer import exact as exact_module
from vllm_tokentiming.transfer.chunks import ChunkTable
from vllm_tokentiming.transfer.exact import ChunkTransfer
from vllm_tokentiming.transfer.extendable import Extendable

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
            certify=lambda run, lasts, encodings: [
                [linked(run, d, j) for j in range(len(e))] for d, e in zip(lasts, encodings, strict=True)
            ],
            max_run_chunks=max_run_chunks,
        )
        TRANSFERS[key] = ChunkTransfer(table, end_ids_in_draft_vocab=ENDS, longest_run=longest_run)
    return TRANSFERS[key]


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
    got = rows_of(
        transfer.exact_rows(
            case["drafted"],
            law_ids=case["law_ids"],
            law_probs=case["law_probs"],
            extendable=snapshot,
            planned_steps=case["planned_steps"],
            max_tokens=case["max_tokens"],
        )
    )
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
    assert (transfer._slot_of == -1).all(), "scratch was not given back clean"


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_proposals_are_the_rows_rounded(case):
    snapshot = Extendable.build(np.isin(np.arange(len(DRAFT)), list(case["extendable"])), DRAFT)
    transfer = transfer_for(case["longest_run"], 20)
    laws = {name: case[name] for name in ("law_ids", "law_probs", "planned_steps", "max_tokens")}
    exact = transfer.exact_rows(case["drafted"], extendable=snapshot, **laws)
    proposal = transfer.transfer(case["drafted"], extendable=snapshot, **laws)
    assert proposal.ids_in_target_vocab == exact.tokens_in_target_vocab.tolist()
    if proposal.rows is None:
        assert not proposal.ids_in_target_vocab
        return
    # The next cycle must not write into what was handed out.
    transfer.transfer(
        [2], extendable=snapshot, law_ids=np.array([[2]]), law_probs=np.ones((1, 1)), planned_steps=1, max_tokens=9
    )
    assert proposal.rows.offsets.tolist() == exact.offsets.tolist()
    assert proposal.rows.ids_in_target_vocab.tolist() == exact.ids_in_target_vocab.tolist()
    assert proposal.rows.probs.tolist() == exact.probs.astype(np.float32).tolist()


def test_bounded_cache_forgets_runs_and_keeps_single_tokens():
    transfer = transfer_for(3, 20)
    transfer.table.add_singles()
    singles = transfer.table.entry_of_single.copy()
    rng = np.random.default_rng(0)
    largest = 0
    everything = Extendable.build(np.ones(len(DRAFT), dtype=np.bool_), DRAFT)
    for _ in range(300):
        ids = rng.integers(2, len(DRAFT), (4, 5)).astype(np.int32)
        transfer.exact_rows(
            ids[:, 0].tolist(),
            law_ids=ids,
            law_probs=np.full((4, 5), 0.2),
            extendable=everything,
            planned_steps=4,
            max_tokens=5,
        )
        largest = max(largest, transfer.table.num_run_chunks)
    assert largest <= 20 + 4 * 5
    assert (transfer.table.entry_of_single >= 0).all()
    assert len(singles) == len(DRAFT)
    for d in range(len(DRAFT)):
        entry = transfer.table.entry_of_single[d]
        start, stop = transfer.table.starts[entry : entry + 2]
        assert tuple(transfer.table.proxies[start:stop]) == encode((), d)


def test_compiles_once(monkeypatch):
    """Read-only, transposed or wider input must not compile a second kernel in the middle of serving."""
    transfer = transfer_for(3, 1 << 16)
    ids = np.arange(2, 8, dtype=np.int64).reshape(3, 2)
    frozen = np.full((2, 3), 0.5, dtype=np.float32).T
    frozen.setflags(write=False)
    kernel = exact_module.kernel.chunk_rows
    transfer.warm_up()
    before = len(getattr(kernel, "signatures", []))
    transfer.exact_rows(
        ids[:, 0].tolist(),
        law_ids=ids,
        law_probs=frozen,
        extendable=Extendable.nothing(len(DRAFT)),
        planned_steps=3,
        max_tokens=64,
    )
    assert len(getattr(kernel, "signatures", [])) == before
