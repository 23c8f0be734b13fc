"""Point mass: no rows, and the verifier's rule for tokens without rows gives the target's law."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_tokentiming.transfer.point_mass import point_mass_rows


def output_law(target: np.ndarray, token: int) -> np.ndarray:
    """What vLLM's rejection sampler emits first: a token without a row has p = 1 and is masked after a rejection."""
    rest = target.copy()
    rest[token] = 0.0
    accepted = min(1.0, target[token])
    return accepted * np.eye(len(target))[token] + (1.0 - accepted) * rest / max(rest.sum(), 1e-300)


@pytest.mark.parametrize("token", range(4))
def test_any_proposed_token_leaves_the_target_law_as_it_is(token):
    target = np.array([0.3, 0.5, 0.2, 0.0])
    rows = point_mass_rows(
        ids_in_draft_vocab=[4],
        law_ids=np.array([[4, 1]], dtype=np.int32),
        law_probs=np.array([[0.6, 0.4]]),
        ids_in_target_vocab=[token],
        last_draft_index=np.array([0], dtype=np.int32),
    )
    assert rows is None
    assert output_law(target, token) == pytest.approx(target, abs=1e-15)
