"""The output law of the exact transfer, enumerated over toy vocabularies: the target's own, to machine precision."""

from __future__ import annotations

import numpy as np
import pytest
from reference import block_verification
from reference.enumeration import GO_ON, LAST, STOP, outcome
from reference.toy_rules import (
    CHARACTERS,
    LETTERS,
    appending,
    faulty_encoder,
    faulty_link,
    product_rule,
    reference_rule,
    sets,
    world,
)

from vllm_tokentiming.alignment import Aligner

EXACT = 1e-12


def stop_at_flat_law(probs):
    return STOP if probs.max() < 0.5 else GO_ON


def last_at_flat_law(probs):
    return LAST if probs.max() < 0.5 else GO_ON


@pytest.mark.parametrize("alphabet", [LETTERS, CHARACTERS], ids=["letters", "split-characters"])
@pytest.mark.parametrize("ends", [False, True], ids=["endless", "ends"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_exact_has_the_law_of_the_target(alphabet, ends, steps):
    for seed in range(3):
        toy = world(seed, alphabet=alphabet, ends=ends)
        for extendable in sets(toy):
            result = outcome(toy, product_rule(toy, extendable=extendable), steps=steps, depth=3)
            assert result.distance < EXACT, (seed, extendable)


def test_exact_with_four_drafted_tokens():
    toy = world(3, size=3)
    for extendable in sets(toy):
        assert outcome(toy, product_rule(toy, extendable=extendable), steps=4, depth=4).distance < EXACT


@pytest.mark.parametrize("longest_run", [0, 1, 2])
@pytest.mark.parametrize("alphabet", [LETTERS, CHARACTERS], ids=["letters", "split-characters"])
def test_exact_whatever_bounds_the_run(longest_run, alphabet):
    for seed in range(2):
        toy = world(seed, alphabet=alphabet)
        rule = product_rule(toy, extendable=range(len(toy.draft)), longest_run=longest_run)
        assert outcome(toy, rule, steps=3, depth=3).distance < EXACT


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_exact_with_laws_restricted_before_drawing(top_k):
    for seed in range(3):
        toy = world(seed, top_k=top_k)
        for extendable in sets(toy):
            assert outcome(toy, product_rule(toy, extendable=extendable), steps=3, depth=3).distance < EXACT


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_exact_when_the_proposal_is_cut(max_tokens):
    for seed in range(3):
        toy = world(seed)
        rule = product_rule(toy, extendable=(0, 3), max_tokens=max_tokens)
        assert outcome(toy, rule, steps=3, depth=4).distance < EXACT


@pytest.mark.parametrize("alphabet", [LETTERS, CHARACTERS], ids=["letters", "split-characters"])
def test_exact_with_an_aligner_and_a_tokenizer_that_err(alphabet):
    for seed in range(3):
        toy = world(seed, alphabet=alphabet)
        for extendable in sets(toy):
            for linked in (None, faulty_link):
                rule = product_rule(toy, extendable=extendable, linked=linked, encode=faulty_encoder(toy))
                assert outcome(toy, rule, steps=3, depth=3).distance < EXACT


@pytest.mark.parametrize("window_radius", [1, 8])
def test_exact_with_the_links_of_dynamic_token_warping(window_radius):
    """A link carries a law where the path's last draft token of the chunk is the chunk's last and the bytes agree."""

    def flat(tokens):
        offsets = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
        return np.frombuffer(b"".join(tokens), dtype=np.uint8), offsets

    for seed in range(3):
        toy = world(seed, ends=False)
        aligner = Aligner(*flat(toy.draft), *flat(toy.target), window_radius=window_radius)

        def linked(run, last, position, toy=toy, aligner=aligner):
            draft, proxy = (*run, last), toy.encode(run, last)
            path = aligner.align(
                *(np.array(x, dtype=np.int32) for x in (draft, [0, len(draft)], proxy, [0, len(proxy)]))
            )
            same = b"".join(toy.draft[i] for i in draft) == b"".join(toy.target[i] for i in proxy)
            return bool(same and path.last_draft_index[position] == len(run))

        for extendable in sets(toy):
            rule = product_rule(toy, extendable=extendable, linked=linked)
            assert outcome(toy, rule, steps=3, depth=3).distance < EXACT


@pytest.mark.parametrize("stop", [stop_at_flat_law, last_at_flat_law])
def test_exact_when_drafting_stops_on_a_law(stop):
    for seed in range(4):
        toy = world(seed)
        for extendable in sets(toy):
            assert outcome(toy, product_rule(toy, extendable=extendable), steps=3, depth=3, stop=stop).distance < EXACT


@pytest.mark.parametrize("stop", [stop_at_flat_law, last_at_flat_law])
@pytest.mark.parametrize("alphabet", [LETTERS, CHARACTERS], ids=["letters", "split-characters"])
def test_exact_when_more_tokens_are_appended(alphabet, stop):
    """As many as the draft's laws say, and which the proposed tokens say."""
    for seed in range(3):
        toy = world(seed, alphabet=alphabet)
        for extendable in sets(toy):
            rule = appending(toy, product_rule(toy, extendable=extendable))
            assert outcome(toy, rule, steps=2, depth=4, stop=stop).distance < EXACT


def test_exact_rows_beat_point_masses_and_proposals_are_not_empty():
    gains = []
    for seed in range(6):
        toy = world(seed, ends=False)
        exact = outcome(toy, product_rule(toy, extendable=(0, 1)), steps=3, depth=3)
        revealed = outcome(
            toy, product_rule(toy, extendable=(0, 1), linked=lambda _run, _last, _position: False), steps=3, depth=3
        )
        assert revealed.distance < EXACT
        gains.append(exact.accepted - revealed.accepted)
    assert min(gains) > 0
    assert np.mean(gains) > 0.05


# The harness must be able to fail: rules that look right and are not.


def test_enumeration_finds_links_checked_for_the_drawn_token_alone():
    distances = [
        outcome(
            toy := world(seed, ends=False),
            reference_rule(toy, extendable=(0, 1), linked=faulty_link, check_every_candidate=False),
            steps=3,
            depth=2,
        ).distance
        for seed in range(6)
    ]
    assert max(distances) > 0.01


def test_enumeration_finds_a_stop_taken_for_a_plan():
    """Drafting stopped on a law that followed the last token, whose law is used as if it had been bound to be last."""
    distances = [
        outcome(
            toy := world(seed, ends=False),
            product_rule(toy, extendable=(0, 1), planned=lambda drafted: len(drafted.ids)),
            steps=3,
            depth=3,
            stop=stop_at_flat_law,
        ).distance
        for seed in range(6)
    ]
    assert max(distances) > 0.01


def test_enumeration_finds_tokens_withdrawn_for_what_follows_them():
    """Appending may look at the last proposed token; proposing that token only where something follows may not."""
    distances = []
    for seed in range(6):
        toy = world(seed, ends=False)
        rule = appending(toy, product_rule(toy, extendable=(0, 1)), withdraws=True)
        distances.append(outcome(toy, rule, steps=2, depth=3).distance)
    assert max(distances) > 0.01


def test_enumeration_finds_an_end_token_taken_for_a_plan():
    distances = [
        outcome(
            toy := world(seed),
            product_rule(toy, extendable=(0, 1, 2), planned=lambda drafted: len(drafted.ids)),
            steps=3,
            depth=3,
        ).distance
        for seed in range(6)
    ]
    assert max(distances) > 0.01


def test_enumeration_finds_a_single_wrong_probability():
    toy = world(1, ends=False)
    right = product_rule(toy)

    def slightly_wrong(drafted):
        (token, row), *rest = right(drafted)
        low, *others = sorted(row)
        shift = min(1e-6, row[low])
        return [(token, {**row, low: row[low] - shift, others[-1]: row[others[-1]] + shift}), *rest]

    assert outcome(toy, slightly_wrong, steps=1, depth=1).distance > 1e-9


def test_blocks_accept_no_fewer_tokens_and_mostly_more():
    """Theorem 2 of Sun et al., arXiv 2403.10444."""
    gains = []
    for seed in range(6):
        toy = world(seed, ends=False)
        for extendable in sets(toy):
            result = outcome(toy, product_rule(toy, extendable=extendable), steps=3, depth=3)
            gains.append(result.accepted_in_blocks - result.accepted)
    assert min(gains) > -EXACT
    assert np.mean(gains) > 0.01


def test_enumeration_finds_blocks_with_the_residuals_of_single_tokens(monkeypatch):
    residual = block_verification.residual
    monkeypatch.setattr(block_verification, "residual", lambda _chance, draft, target: residual(1.0, draft, target))
    distances = [
        outcome(toy := world(seed, ends=False), product_rule(toy, extendable=(0, 1)), steps=3, depth=3).distance
        for seed in range(6)
    ]
    assert max(distances) > 0.01
