"""The paper's rule carries the last aligned draft token's scalar, and biases the output as its docstring states."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_tokentiming.transfer.paper import paper_scalars

LAW_IDS = np.array([[7, 3, 0], [3, 9, 0], [0, 5, 9]], dtype=np.int32)
LAW_PROBS = np.array([[0.5, 0.3, 0.2], [0.75, 0.25, 0.0], [0.6, 0.3, 0.1]])


def scalars_of(drafted, proxies, last, *, law_ids=LAW_IDS, law_probs=LAW_PROBS):
    return paper_scalars(
        ids_in_draft_vocab=drafted,
        law_ids=law_ids,
        law_probs=law_probs,
        ids_in_target_vocab=proxies,
        last_draft_index=np.array(last, dtype=np.int32),
    )


def test_each_row_holds_the_scalar_of_its_last_aligned_draft_token():
    scalars = scalars_of([3, 9, 5], [100, 101, 102, 103], [0, 1, 1, 2])
    assert scalars.tolist() == pytest.approx([0.3, 0.25, 0.25, 0.3])
    assert scalars.dtype == np.float32


def test_many_to_one_takes_the_final_draft_token():
    assert scalars_of([7, 3, 0], [100], [2]).tolist() == pytest.approx([0.6])


def test_a_token_without_a_law_counts_as_certain():
    assert scalars_of([3, 9], [100, 101], [0, 1], law_ids=None, law_probs=None).tolist() == [1.0, 1.0]


def test_a_token_that_its_law_does_not_hold_counts_as_certain():
    assert scalars_of([8, 3, 8], [100, 101, 102], [0, 1, 2]).tolist() == pytest.approx([1.0, 0.75, 1.0])


def test_padding_under_the_drafted_id_is_no_probability():
    # Position 1 is padded with id 0 and probability 0: token 0 is not in that law.
    assert scalars_of([0, 0, 0], [100, 101, 102], [0, 1, 2]).tolist() == pytest.approx([0.2, 1.0, 0.6])


def test_a_proxy_token_that_is_aligned_with_nothing_counts_as_certain():
    assert scalars_of([3, 9, 5], [100, 101], [-1, 2]).tolist() == pytest.approx([1.0, 0.3])


def test_no_proxy_tokens_give_no_rows():
    assert len(scalars_of([3, 9, 5], [], [])) == 0


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="2 entries for 1 proxy"):
        scalars_of([3, 9, 5], [100], [0, 1])
    with pytest.raises(ValueError, match="2 drafted tokens have 3 rows"):
        scalars_of([3, 9], [100], [0])


def test_the_verifier_is_biased_by_the_documented_amount():
    """q = (.3, .5, .2), token 0 always proposed with p = .6: the rejection sampler's rule gives (.500, .357, .143)."""
    scalars = scalars_of([4], [0], [0], law_ids=np.array([[4, 1]], dtype=np.int32), law_probs=np.array([[0.6, 0.4]]))
    target = np.array([0.3, 0.5, 0.2])
    proposal = np.zeros(3)
    proposal[0] = scalars[0]
    accepted = min(1.0, target[0] / proposal[0])
    rest = np.maximum(target - proposal, 0.0)
    output = accepted * np.eye(3)[0] + (1.0 - accepted) * rest / rest.sum()
    assert output == pytest.approx([0.500, 0.357, 0.143], abs=5e-4)
