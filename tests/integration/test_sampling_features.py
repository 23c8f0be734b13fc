"""Whatever a request asks of sampling, it gets what it gets without speculation, or vLLM's own refusal."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine

SPECULATIVE = ("exact", "adaptive")


@pytest.mark.parametrize("job", SPECULATIVE)
def test_penalties_and_token_lists(answer, job):
    found = answer(job, "constraints")
    assert found["value"] == answer("none", "constraints")["value"]
    # Where clocks decide, a busy machine may find that nothing pays.
    assert job == "adaptive" or found["vllm"]["vllm:spec_decode_num_accepted_tokens"] > 0


def test_the_constraints_change_the_output(answer):
    """Or the test above would show nothing."""
    reference = answer("none", "constraints")["value"]
    same = [name for name, outputs in reference.items() if name != "plain" and outputs == reference["plain"]]
    assert same == []


def test_what_vllm_refuses_with_speculation_is_refused_and_the_server_goes_on(answer):
    assert set(answer("none", "not_with_speculation")["value"].values()) == {None}
    found = answer("exact", "not_with_speculation")["value"]
    assert all("not yet supported with speculative decoding" in said for said in found.values())


@pytest.mark.parametrize("job", SPECULATIVE)
def test_logprobs(answer, job):
    found, reference = answer(job, "logprobs"), answer("none", "logprobs")["value"]
    assert found["vllm"]["vllm:spec_decode_num_accepted_tokens"] > 0
    for got, expected in zip(found["value"], reference, strict=True):
        assert got["ids"] == expected["ids"]
        for kind in ("output", "prompt"):
            assert len(got[kind]) == len(expected[kind])
            for position, wanted in zip(got[kind], expected[kind], strict=True):
                if wanted is None:
                    assert position is None
                    continue
                assert [one[:2] for one in position] == [one[:2] for one in wanted]
                assert [one[2] for one in position] == pytest.approx([one[2] for one in wanted], abs=1e-3)


@pytest.mark.parametrize("job", SPECULATIVE)
def test_a_seed_gives_the_same_output_with_and_without_neighbours(answer, job):
    value = answer(job, "seeds")["value"]
    assert value["alone"] == value["crowd"] == value["late"]


def test_lora_adapters_of_the_target(answer):
    found, reference = answer("adapters", "adapters"), answer("none, adapters", "adapters")["value"]
    assert found["value"] == reference
    assert found["vllm"]["vllm:spec_decode_num_accepted_tokens"] > 0
    plain, first, second = reference["alone"]
    assert plain != first != second != plain  # or the adapters would do nothing
