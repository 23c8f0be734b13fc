"""Every transfer mode and engine in a real vLLM: greedy output is that of no speculation (float32, eager)."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine

SPECULATING = ("repeats", "exact", "point_mass", "tli", "slem", "paper", "transformers")


@pytest.mark.parametrize("job", SPECULATING)
def test_greedy_output_is_that_of_no_speculation(answer, job):
    found = answer(job, "greedy")
    assert found["value"] == answer("none", "greedy")["value"]
    assert found["vllm"]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert not [reason for reason in found["silences"] if reason.endswith("_failed")]


def test_repeats_stand_alone_and_follow_drafts(answer):
    totals = [answer("repeats", scenario)["totals"] for scenario in ("greedy", "mixed")]
    assert sum(found["repeats"] for found in totals) > 0
    assert sum(found["appended_tokens"] for found in totals) > 0


def test_greedy_output_does_not_depend_on_the_batch(answer):
    alone = answer("exact", "greedy_one_by_one")["value"]
    assert alone == answer("none", "greedy")["value"][: len(alone)]


@pytest.mark.parametrize("job", ["repeats", "exact", "point_mass", "tli", "slem", "transformers"])
def test_mixed_temperatures(answer, job):
    found, expected = answer(job, "mixed"), answer("none", "mixed")["value"]
    first, second = found["value"]["greedy"]
    assert first == second == expected["greedy"][0]
    assert found["value"]["seeded"][0] == found["value"]["seeded"][1]
    assert set(found["value"]["lengths"]) == {24}
    assert not [reason for reason in found["silences"] if reason.endswith("_failed")]


def test_adaptive_length_leaves_drafting_where_it_does_not_pay(answer):
    """Neither greedy output nor that of a seed depends on when it does."""
    greedy, mixed, again = answer("adaptive", "greedy"), answer("adaptive", "mixed"), answer("adaptive", "near_the_end")
    assert greedy["value"] == answer("none", "greedy")["value"]
    assert mixed["value"]["seeded"][0] == mixed["value"]["seeded"][1]
    assert again["value"] == answer("none", "near_the_end")["value"]
    assert sum(found["silences"].get("not_worthwhile", 0) for found in (greedy, mixed, again)) > 0
    assert sum(found["totals"].get("proposals", 0) for found in (greedy, mixed, again)) > 0


def test_a_seed_alone_decides_and_sampling_is_sampling(answer):
    seeded = answer("exact", "mixed")["value"]["seeded"][0]
    assert len({tuple(ids) for ids in seeded}) == len(seeded)
    assert not set(map(tuple, seeded)) & set(map(tuple, answer("none", "greedy")["value"]))


def test_paper_samples_and_warns(answer):
    found = answer("paper", "sampled")
    assert found["value"] != answer("none", "greedy")["value"]
    assert found["vllm"]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert any(line.startswith("WARNING") and "NOT lossless" in line for line in found["log"])
    assert not any("NOT lossless" in line for line in answer("point_mass", "greedy")["log"])


@pytest.mark.parametrize("job", SPECULATING)
def test_vllm_counts_what_was_proposed(answer, job):
    found = answer(job, "greedy")
    counted, ours = found["vllm"], found["totals"]
    assert counted["vllm:spec_decode_num_drafts"] <= ours["proposals"]
    assert counted["vllm:spec_decode_num_draft_tokens"] <= ours["proxy_tokens"]
    assert counted["vllm:spec_decode_num_accepted_tokens"] <= counted["vllm:spec_decode_num_draft_tokens"]
