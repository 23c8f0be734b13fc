"""The choice whether to speculate, where the simulated server of test_adaptive_length cannot bring it."""

from __future__ import annotations

import math
import random
import statistics

import pytest

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


def serve_sixteen(seed, *, cycles, accepted, lengths=None):
    """Returns how often speculation came back, and tokens of each of 16 requests in the time of a plain pass.

    Speculation takes 1.62 times as long and makes 1 + ``accepted`` tokens; coming back costs 0.9 more. With ``lengths``
    a request has so many tokens, and another one comes when it has ended.
    """
    rng, costs, last, returns, tokens, seconds = random.Random(seed), CycleCosts(), True, 0, 0.0, 0.0
    left = [rng.randint(1, lengths) if lengths else math.inf for _ in range(16)]
    for _ in range(cycles):
        if arrives := min(left) <= 0:
            left = [one if one > 0 else lengths for one in left]
            costs.greet(16)
        speculates, is_probe = costs.choose()
        comes_back = speculates and not last
        made = [1 + (speculates and rng.random() < accepted) for _ in left]
        left = [one - new for one, new in zip(left, made, strict=True)]
        took = 1.62 * rng.uniform(0.85, 1.15) + 0.9 * comes_back if speculates else rng.uniform(0.92, 1.08)
        # A cycle in which one is read, or in which the draft has much to read, tells nothing.
        if not arrives and not comes_back and not costs.is_odd(seconds=took, speculates=speculates):
            costs.compare(tokens=sum(made), batch=16, seconds=took, speculates=speculates, is_probe=is_probe)
        last, returns, tokens, seconds = speculates, returns + comes_back, tokens + sum(made) / 16, seconds + took
    return returns, tokens / seconds


def test_where_both_ways_are_level_it_does_not_go_to_and_fro():
    returns, rates = zip(*(serve_sixteen(seed, cycles=600, accepted=0.62) for seed in range(40)), strict=True)
    assert statistics.mean(returns) < 13  # 17.5 without a margin, and a rate of .978
    assert statistics.mean(rates) > 0.982


def test_where_speculation_loses_new_requests_do_not_bring_it_back():
    """One of sixteen says little of what speculation would bring."""
    served = [serve_sixteen(seed, cycles=1200, accepted=0.4, lengths=64) for seed in range(20)]
    returns, rates = zip(*served, strict=True)
    assert statistics.mean(returns) < 10  # 18 where each one shortened the wait as if it were alone, and .974
    assert statistics.mean(rates) > 0.984


def test_a_new_request_counts_by_its_share():
    for batch, kept in ((1, 0.0), (16, 15 / 16)):
        costs = CycleCosts()
        for tokens in (2.0, 3.0):
            costs.compare(tokens=tokens * batch, batch=batch, seconds=1.0, speculates=True, is_probe=False)
        shown, average = costs._gain, costs._average_gain.value
        before = (shown.count, shown.seconds)
        costs.greet(batch)
        assert costs._gain.count == pytest.approx(kept * before[0] + 4 * average)
        assert costs._gain.seconds == pytest.approx(kept * before[1] + 4)


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


def test_reading_prompts_counts_against_speculation_where_they_come_often():
    """Three tokens in two and a half plain cycles pay, unless each tenth cycle reads prompts for five cycles more."""
    for every, pays in ((0, True), (100, True), (10, False)):
        costs = CycleCosts()
        for number in range(1, 401):
            costs.read(0.5 if every and number % every == 0 else 0.0)
            cycle(costs, tokens=3, spec_seconds=0.27, plain_seconds=0.1)
        assert costs.better() is pays, every


def test_a_try_that_had_much_to_read_puts_off_the_next_one():
    tries = {}
    for reading in (0.0, 1.0):
        costs, tried = CycleCosts(), 0
        for _ in range(2000):
            speculates, is_probe = costs.choose()
            if speculates and is_probe and reading and costs._probing == 3:
                costs.lose(tokens=1, batch=1, seconds=reading)
                tried += 1
                continue
            costs.compare(
                tokens=1, batch=1, seconds=0.2 if speculates else 0.1, speculates=speculates, is_probe=is_probe
            )
            tried += speculates and is_probe and costs._probing == 3
        tries[reading] = tried
    assert 0 < tries[1.0] < tries[0.0]
