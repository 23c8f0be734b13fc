"""However requests come, end and go, answers are those of no speculation, and nothing of them is kept."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine

SPECULATIVE = ("exact", "adaptive")


ENDS = ("stop_strings", "stop_tokens", "lengths", "own_ends")


@pytest.mark.parametrize("job", SPECULATIVE)
@pytest.mark.parametrize("scenario", ENDS)
def test_requests_end_where_they_do_without_speculation(answer, job, scenario):
    found, reference = answer(job, scenario), answer("none", scenario)["value"]
    assert found["value"] == reference
    # Where clocks decide, a busy machine may find that nothing pays.
    assert job == "adaptive" or found["totals"]["proposals"] > 0


def test_where_clocks_decide_there_are_proposals_too(answer):
    assert sum(answer("adaptive", scenario)["totals"].get("proposals", 0) for scenario in ENDS) > 0


def test_stops_are_met_at_every_place_of_a_proposal(answer):
    """Or the scenarios above would show nothing."""
    ends = [output["why"] for output in answer("none", "stop_strings")["value"]]
    assert ends.count("stop") > 20
    lengths = {len(output["ids"]) for output in answer("none", "stop_tokens")["value"] if output["why"] == "stop"}
    assert lengths >= set(range(2, 9))


@pytest.mark.parametrize("job", SPECULATIVE)
def test_several_samples_of_one_prompt(answer, job):
    first, second = answer(job, "several_samples")["value"]
    assert first == second
    assert len({tuple(output["ids"]) for output in first[:4]}) > 1


@pytest.mark.parametrize("job", SPECULATIVE)
def test_two_hundred_requests_that_come_and_go(answer, job):
    found, reference = answer(job, "arrivals")["value"], answer("none", "arrivals")["value"]
    common = found["done"].keys() & reference["done"].keys()
    assert len(common) == 200
    assert found["aborted"] > 5
    # An aborted request comes again with what is drawn then, which depends on the order of events.
    same = sum(found["done"][request] == reference["done"][request] for request in common)
    assert same >= 200 - found["aborted"] - reference["aborted"]
    assert found["kept"] == [1, 1]


@pytest.mark.parametrize("job", SPECULATIVE)
def test_prompts_that_the_prefix_cache_holds_whole(answer, job):
    found, reference = answer(job, "cached_prompts")["value"], answer("none", "cached_prompts")["value"]
    assert found == reference
    assert found["sampled in range"]


@pytest.mark.parametrize("job", SPECULATIVE)
def test_a_seeded_prompt_of_one_token_does_not_care_who_is_running(answer, job):
    alone, *others = answer(job, "one_token_beside_others")["value"]
    assert len(alone) == 12
    assert others == [alone] * 3


@pytest.mark.parametrize("job", ["chunked", "short draft"])
def test_prompts_read_in_parts_and_beyond_the_drafts_context(answer, job):
    found = answer(job, "long_prompts")
    assert found["value"] == answer("none, chunked", "long_prompts")["value"]
    assert found["totals"]["proposals"] > 0


@pytest.mark.parametrize("job", ["chunked", "short draft"])
def test_seeds_of_prompts_read_in_parts(answer, job):
    first, second = answer(job, "seeded_long_prompts")["value"]
    assert first == second


def test_past_the_drafts_context_a_request_goes_on_without_proposals(answer):
    found = answer("short draft", "near_the_end")
    assert found["value"] == answer("none", "near_the_end")["value"]
    assert found["silences"]["context_too_long"] > 0
