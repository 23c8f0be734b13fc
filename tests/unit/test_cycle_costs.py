"""The choice whether to speculate, where the simulated server of test_draft_length cannot bring it."""

from __future__ import annotations

import random

from vllm_tokentiming.cycle_costs import CycleCosts, RepeatPrice


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


def test_where_both_ways_are_level_it_does_not_go_to_and_fro():
    """Of sixteen requests; speculation makes 1.62 tokens in 1.62 times the time, coming back costs 0.9 more."""
    returns, rates = 0, []
    for seed in range(40):
        rng, costs, last, tokens, seconds = random.Random(seed), CycleCosts(), True, 0.0, 0.0
        for _ in range(600):
            speculates, is_probe = costs.choose()
            comes_back = speculates and not last
            made = 16 + sum(rng.random() < 0.62 for _ in range(16)) if speculates else 16
            took = 1.62 * rng.uniform(0.85, 1.15) + 0.9 * comes_back if speculates else rng.uniform(0.92, 1.08)
            # A cycle in which the draft has much to read tells nothing.
            if not costs.is_odd(seconds=took, speculates=speculates) and not comes_back:
                costs.compare(tokens=made, batch=16, seconds=took, speculates=speculates, is_probe=is_probe)
            last, returns, tokens, seconds = speculates, returns + comes_back, tokens + made / 16, seconds + took
        rates.append(tokens / seconds)
    assert returns / len(rates) < 13  # 17.5 without a margin, and a rate of .978
    assert sum(rates) / len(rates) > 0.982


def test_trying_what_loses_takes_a_hundredth_of_the_time():
    costs = CycleCosts()
    for _ in range(500):
        cycle(costs, tokens=1, spec_seconds=2.5, plain_seconds=1.0)
    tries = sum(cycle(costs, tokens=1, spec_seconds=2.5, plain_seconds=1.0) for _ in range(5000))
    assert 0 < tries * 1.5 < 0.015 * 5000


def test_what_lost_at_a_smaller_size_is_not_begun_with_at_a_larger_one():
    smaller = CycleCosts()
    for _ in range(100):
        cycle(smaller, tokens=1, spec_seconds=1.5, plain_seconds=1.0)
    larger = smaller.of_another_batch(larger=True)
    assert not any(cycle(larger, tokens=1, spec_seconds=1.5, plain_seconds=1.0) for _ in range(15))
    assert any(cycle(larger, tokens=3, spec_seconds=1.5, plain_seconds=1.0) for _ in range(15))


def test_what_lost_at_a_larger_size_may_pay_at_a_smaller_one():
    larger = CycleCosts()
    for _ in range(100):
        cycle(larger, tokens=1, spec_seconds=1.5, plain_seconds=1.0)
    assert larger.of_another_batch(larger=False).choose() == (True, False)


def test_what_pays_at_a_smaller_size_is_begun_with_at_a_larger_one():
    smaller = CycleCosts()
    for _ in range(100):
        cycle(smaller, tokens=2, spec_seconds=1.5, plain_seconds=1.0)
    assert smaller.of_another_batch(larger=True).choose() == (True, False)


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


def test_the_price_of_repeats_is_that_of_their_first_token_and_of_each():
    price = RepeatPrice()
    assert not price.pays(8, expected=8.0)  # there is nothing to hold it against
    price.add(0, 1.0)
    assert price.pays(8, expected=0.0)  # what it costs has to be seen
    for speed in (1.0, 2.0):  # neighbours count, not times
        for tokens in (4, 8, 16):
            for _ in range(20):
                price.add(0, speed)
            price.add(tokens, speed * (1.3 + 0.01 * tokens))
    assert price.pays(8, expected=0.39)
    assert not price.pays(8, expected=0.37)
    assert not price.pays(16, expected=0.45)


def test_a_price_that_nobody_pays_is_asked_again():
    price = RepeatPrice()
    price.add(0, 1.0)
    price.add(8, 1.5)
    refused = 0
    while not price.pays(8, expected=0.1):
        refused += 1
    assert 100 < refused < 200


def test_now_and_then_a_pass_verifies_nothing_even_where_repeats_pay():
    price = RepeatPrice()
    refused = 0
    for _ in range(200):
        paid = price.pays(8, expected=4.0)
        refused += not paid
        price.add(8 if paid else 0, 1.1 if paid else 1.0)
    assert 2 <= refused <= 5
