"""Prompts, lengths, grammars, caches and request ids at the edge of what vLLM permits."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("job", ["exact", "transformers"])
@pytest.mark.parametrize("scenario", ["odd_prompts", "odd_texts", "near_the_end"])
def test_output_is_that_of_no_speculation(answer, job, scenario):
    found = answer(job, scenario)
    assert found["value"] == answer("none", scenario)["value"]
    assert found["totals"]["proposals"] > 0
    assert not [reason for reason in found["silences"] if reason.endswith("_failed")]


def test_half_a_character_gets_no_proposal(answer):
    assert answer("exact", "odd_prompts")["silences"]["inside_character"] > 0


def test_requests_near_the_longest_length_end_there(answer):
    lengths = [len(ids) for ids in answer("exact", "near_the_end")["value"]]
    # The last sampled token takes no room in the cache.
    assert lengths == [9, 8, 7, 6, 5, 4, 3, 2, 1, 30, 40]


def test_preempted_requests_give_the_same_output(answer):
    found = answer("crowded", "crowded")
    assert found["vllm"]["vllm:num_preemptions"] > 0
    assert found["value"] == answer("none", "crowded")["value"]
    assert found["vllm"]["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.mark.parametrize("job", ["exact", "tli"])
def test_structured_output_is_valid(answer, job):
    found = answer(job, "structured")
    value = found["value"]
    assert [len(value[kind]) for kind in ("regex", "json", "choice", "grammar")] == [8] * 4
    assert all(re.fullmatch(r"[a-c]{3}-[0-9]{2}", text) for text in value["regex"])
    for text in value["json"]:
        document = json.loads(text)
        assert set(document) == {"ok", "size"}
        assert isinstance(document["ok"], bool)
        assert document["size"] in {"small", "large"}
    assert set(value["choice"]) <= {"alpha", "beta"}
    # What is not done by then ends in the middle.
    assert all(re.fullmatch(r"(up|down)(, (up|down))*(\.|, ?|, (u|d|do|dow))?", text) for text in value["grammar"])
    assert value["greedy"] == answer("none", "greedy")["value"][0]
    assert found["vllm"]["vllm:spec_decode_num_accepted_tokens"] > 0


def test_an_aborted_id_that_comes_back_is_a_new_request(answer):
    found, reference = answer("exact", "abort_and_reuse")["value"], answer("none", "greedy")["value"]
    assert found["done"] == {"same": reference[2], "other": reference[0], "last": reference[1]}


def test_state_of_finished_and_aborted_requests_is_released(answer):
    found = answer("exact", "abort_and_reuse")["value"]
    assert found["kept before"] == [2, 2]
    assert found["kept after"] == [1, 1]
