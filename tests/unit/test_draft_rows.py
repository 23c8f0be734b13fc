"""Sparse rows arrive in vLLM's shape, in a bounded buffer that is clean for the next cycle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_tokentiming.transfer.interface import Proposals, SparseRows
from vllm_tokentiming.vllm_adapter.draft_rows import DraftRows

VOCAB = 11


def proposals_of(*requests: list[tuple[int, dict[int, float]]]) -> Proposals:
    """For each request its tokens, each with its law."""
    laws = [law for request in requests for _, law in request]
    entries = [(row * VOCAB + i, p) for row, law in enumerate(laws) for i, p in law.items()]
    rows = SparseRows(
        places=np.array([place for place, _ in entries], dtype=np.int64),
        probs=np.array([p for _, p in entries], dtype=np.float32),
        vocab_size=VOCAB,
    )
    return Proposals([[token for token, _ in request] for request in requests], rows)


def dense(law: dict[int, float]) -> torch.Tensor:
    row = torch.zeros(VOCAB)
    for token, probability in law.items():
        row[token] = probability
    return row


def gather_as_vllm_does(rows, num_draft_tokens):
    """GPUModelRunner._get_spec_decode_draft_probs, for requests in the order of the batch."""
    parts = [rows[place, :count] for place, count in enumerate(num_draft_tokens) if count]
    return torch.cat(parts, dim=0).contiguous()


@pytest.fixture(params=["numpy", "torch"])
def draft_rows(request) -> DraftRows:
    """The two ways to write: the CPU's, and that of devices, which works on the CPU too."""
    rows = DraftRows(vocab_size=VOCAB, device=torch.device("cpu"), max_rows=8)
    rows._through_numpy = request.param == "numpy"
    return rows


def test_without_rows_there_is_nothing_to_hand_over(draft_rows):
    assert draft_rows.fill(Proposals([[], [1, 2]])) is None
    assert draft_rows.fill(proposals_of([], [])) is None


def test_rows_are_those_of_each_request(draft_rows):
    laws = [{1: 0.25, 4: 0.75}, {10: 1.0}]
    rows = draft_rows.fill(proposals_of([(3, {3: 1.0})], [], [(4, laws[0]), (10, laws[1])]))
    gathered = gather_as_vllm_does(rows, [1, 0, 2])
    torch.testing.assert_close(gathered, torch.stack([dense({3: 1.0}), *map(dense, laws)]), rtol=0, atol=0)


def test_the_scheduler_may_verify_fewer_tokens_than_were_proposed(draft_rows):
    rows = draft_rows.fill(proposals_of([(4, {4: 1.0}), (10, {10: 1.0})]))
    torch.testing.assert_close(rows[0, :1], dense({4: 1.0}).unsqueeze(0))
    with pytest.raises(IndexError, match="has 2 draft rows"):
        rows[0, :3]


def test_the_next_cycle_starts_from_zeros(draft_rows):
    draft_rows.fill(proposals_of([(4, {4: 0.5, 6: 0.5}), (5, {5: 1.0})]))
    rows = draft_rows.fill(proposals_of([(2, {2: 1.0})]))
    torch.testing.assert_close(rows[0, :1], dense({2: 1.0}).unsqueeze(0), rtol=0, atol=0)
    assert draft_rows._buffer.sum() == 1.0


def test_past_its_bound_the_buffer_refuses_and_stays_usable():
    small = DraftRows(vocab_size=VOCAB, device=torch.device("cpu"), max_rows=100, max_bytes=2 * 4 * VOCAB)
    assert small.capacity == 2
    with pytest.raises(ValueError, match="3 rows over 11 tokens, room for 2 over 11"):
        small.fill(proposals_of([(i, {i: 1.0}) for i in (1, 2, 3)]))
    assert small.fill(proposals_of([(1, {1: 1.0})])) is not None


def test_rows_of_another_vocabulary_are_refused(draft_rows):
    rows = SparseRows.at_tokens([1], np.ones(1, dtype=np.float32), VOCAB + 1)
    with pytest.raises(ValueError, match="over 12 tokens"):
        draft_rows.fill(Proposals([[1]], rows))


def test_rows_at_their_tokens_hold_a_scalar_each(draft_rows):
    rows = draft_rows.fill(
        Proposals([[1, 5], [], [2]], SparseRows.at_tokens([1, 5, 2], np.float32([0.5, 1.0, 0.25]), VOCAB))
    )
    gathered = gather_as_vllm_does(rows, [2, 0, 1])
    torch.testing.assert_close(gathered, torch.stack([dense({1: 0.5}), dense({5: 1.0}), dense({2: 0.25})]))


LAWS = st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([0.25, 0.5, 1.0]), min_size=1, max_size=3)
TOKENS = st.integers(0, VOCAB - 1)


@given(
    requests=st.lists(
        st.tuples(st.lists(st.tuples(TOKENS, LAWS), max_size=3), st.lists(TOKENS, max_size=3)), min_size=1, max_size=4
    )
)
def test_appended_tokens_are_point_masses_after_those_of_their_request(requests):
    proposals = proposals_of(*(proposed for proposed, _ in requests))
    longer = proposals.with_appended([appended for _, appended in requests])
    expected = proposals_of(
        *([*proposed, *((token, {token: 1.0}) for token in appended)] for proposed, appended in requests)
    )
    assert longer.ids_in_target_vocab == expected.ids_in_target_vocab

    def entries(rows):
        return dict(zip(rows.places.tolist(), rows.probs.tolist(), strict=True))

    assert entries(longer.rows) == entries(expected.rows)
    assert len(longer.rows.places) == len(entries(longer.rows))


def test_point_masses_need_no_rows_when_more_are_appended():
    assert Proposals([[1], []]).with_appended([[2, 3], [4]]) == Proposals([[1, 2, 3], [4]], None)
