"""Whatever of ours fails in the middle of a request, it goes on, its output is the same, and the counter says so."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine

BATCH = 8


@pytest.mark.parametrize(
    ("scenario", "counted"),
    [
        ("break_draft", {"engine_failed": range(BATCH + 1, 3 * BATCH + 1)}),
        ("break_forward", {"engine_failed": range(BATCH + 1, 3 * BATCH + 1)}),
        ("break_logits", {"not_finite": range(3, BATCH + 3)}),
        ("break_context", {"context_failed": range(2, 48)}),
        ("break_proposal", {"proposal_failed": range(2, 3), "proposer_failed": range(1, BATCH + 1)}),
    ],
)
def test_output_is_the_same_and_the_counter_says_so(answer, scenario, counted):
    found = answer("exact", scenario)
    assert found["value"] == answer("none", "greedy")["value"]
    failures = {k: v for k, v in found["silences"].items() if k.endswith("_failed") or k == "not_finite"}
    assert failures.keys() == counted.keys()
    for reason, expected in counted.items():
        assert failures[reason] in expected, reason
    assert found["vllm"]["vllm:spec_decode_num_accepted_tokens"] > 0, "nothing was speculated after the failure"


@pytest.mark.parametrize(
    "kind",
    ["the draft engine failed", "its draft context failed", "could not be made a proposal", "the proposer failed"],
)
def test_each_kind_of_failure_is_logged_once(answer, kind):
    assert sum(kind in line for line in answer("exact", "greedy")["log"] if line.startswith("WARNING")) == 1
