"""Sparse rows arrive in vLLM's shape, in a bounded buffer that is clean for the next cycle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_tokentiming.transfer.interface import NOTHING, Proposal, SparseRows
from vllm_tokentiming.vllm_adapter.draft_rows import DraftRows

VOCAB = 11


def rows_of(*laws: dict[int, float]) -> SparseRows:
    ids = [i for law in laws for i in law]
    return SparseRows(
        offsets=np.cumsum([0, *(len(law) for law in laws)], dtype=np.int32),
        ids_in_target_vocab=np.array(ids, dtype=np.int32),
        probs=np.array([p for law in laws for p in law.values()], dtype=np.float32),
    )


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
    assert draft_rows.fill([NOTHING, Proposal(ids_in_target_vocab=[1, 2])]) is None


def test_point_masses_beside_rows_become_one_hot(draft_rows):
    laws = [{1: 0.25, 4: 0.75}, {10: 1.0}]
    rows = draft_rows.fill(
        [
            Proposal(ids_in_target_vocab=[3]),
            NOTHING,
            Proposal(ids_in_target_vocab=[4, 10], rows=rows_of(*laws)),
        ]
    )
    gathered = gather_as_vllm_does(rows, [1, 0, 2])
    torch.testing.assert_close(gathered, torch.stack([dense({3: 1.0}), *map(dense, laws)]), rtol=0, atol=0)


def test_the_scheduler_may_verify_fewer_tokens_than_were_proposed(draft_rows):
    rows = draft_rows.fill([Proposal(ids_in_target_vocab=[4, 10], rows=rows_of({4: 1.0}, {10: 1.0}))])
    torch.testing.assert_close(rows[0, :1], dense({4: 1.0}).unsqueeze(0))
    with pytest.raises(IndexError, match="has 2 draft rows"):
        rows[0, :3]


def test_the_next_cycle_starts_from_zeros(draft_rows):
    draft_rows.fill([Proposal(ids_in_target_vocab=[4, 5], rows=rows_of({4: 0.5, 6: 0.5}, {5: 1.0}))])
    rows = draft_rows.fill([Proposal(ids_in_target_vocab=[2], rows=rows_of({2: 1.0}))])
    torch.testing.assert_close(rows[0, :1], dense({2: 1.0}).unsqueeze(0), rtol=0, atol=0)
    assert draft_rows._buffer.sum() == 1.0


def test_past_its_bound_the_buffer_refuses_and_stays_usable():
    small = DraftRows(vocab_size=VOCAB, device=torch.device("cpu"), max_rows=100, max_bytes=2 * 4 * VOCAB)
    assert small.capacity == 2
    with pytest.raises(ValueError, match="3 rows, room for 2"):
        small.fill([Proposal(ids_in_target_vocab=[1, 2, 3], rows=rows_of({1: 1.0}, {2: 1.0}, {3: 1.0}))])
    assert small.fill([Proposal(ids_in_target_vocab=[1], rows=rows_of({1: 1.0}))]) is not None
