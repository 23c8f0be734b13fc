"""The choice whether to speculate, where the simulated server of test_draft_length cannot bring it."""

from __future__ import annotations

from vllm_tokentiming.cycle_costs import CycleCosts


def cycle(costs, *, tokens, spec_seconds, plain_seconds):
    """One cycle of a single request; whether it speculated."""
    speculates, is_probe = costs.choose()
    seconds = spec_seconds if speculates else plain_seconds
    if not costs.is_odd(seconds=seconds, speculates=speculates):
        costs.compare(
            tokens=tokens if speculates else 1, batch=1, seconds=seconds, speculates=speculates, is_probe=is_probe
        )
    return speculates


def test_one_slow_neighbour_is_not_believed():
    costs = CycleCosts()
    for _ in range(30):
        cycle(costs, tokens=2, spec_seconds=1.5, plain_seconds=1.0)
    assert costs.better()
    # The next probe finds a pass much faster than the others were, once.
    while cycle(costs, tokens=2, spec_seconds=1.5, plain_seconds=0.6):
        pass
    speculated = [cycle(costs, tokens=2, spec_seconds=1.5, plain_seconds=1.0) for _ in range(40)]
    assert sum(speculated) >= 36


def test_what_cannot_be_confirmed_is_not_waited_for():
    """Cycles that tell nothing, as where requests come and go in each, must not end speculation for good."""
    costs = CycleCosts()
    for _ in range(30):
        cycle(costs, tokens=2, spec_seconds=1.5, plain_seconds=1.0)
    for _ in range(30):
        cycle(costs, tokens=1, spec_seconds=1.5, plain_seconds=1.0)
    assert not costs.better()
    assert any(costs.choose()[0] for _ in range(40))


def test_a_late_outlier_is_left_out_once_and_then_believed():
    costs = CycleCosts()
    for _ in range(10):
        cycle(costs, tokens=2, spec_seconds=1.5, plain_seconds=1.0)
    assert costs.is_odd(seconds=20.0, speculates=True)
    assert not costs.is_odd(seconds=20.0, speculates=True)
