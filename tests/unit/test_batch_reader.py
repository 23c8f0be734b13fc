"""Rows of vLLM's batch become requests with the right limits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_tokentiming.vllm_adapter.batch import BatchReader

K = 5


def cached_request(
    *, temperature=0.0, seed=None, max_tokens=100, min_tokens=0, stops=(2,), prompt=4, structured=None, **overrides
):
    params = SimpleNamespace(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        all_stop_token_ids=set(stops),
        structured_outputs=structured,
    )
    fields = {"sampling_params": params, "prompt_embeds": None, "mm_features": [], "num_prompt_tokens": prompt}
    return SimpleNamespace(**{**fields, **overrides})


def read(states, *, sampled, num_tokens, max_model_len=64, reader=None):
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=list(states)), requests={k: v for k, v in states.items() if v is not None}
    )
    # More rows than requests: rows past the batch hold what earlier batches left there.
    token_ids = np.arange(8 * max_model_len, dtype=np.int32).reshape(8, max_model_len)
    lengths = np.array([*num_tokens, 99, 99], dtype=np.int32)
    reader = reader or BatchReader(max_model_len=max_model_len, max_proposal=K)
    return reader.read(runner, sampled_token_ids=sampled, num_tokens_no_spec=lengths, token_ids=token_ids)


def test_only_the_sampled_rows_are_read_and_tokens_end_where_vllm_says():
    first, second = read(
        {"a": cached_request(), "b": cached_request(temperature=0.7)}, sampled=[[1], [2, 3]], num_tokens=[6, 9]
    )
    assert (first.request_id, second.request_id) == ("a", "b")
    assert second.ids_in_target_vocab.tolist() == list(range(64, 64 + 9))
    assert (first.temperature, second.temperature) == (0.0, 0.7)


def test_an_unfinished_prefill_may_warm_but_not_propose():
    (request,) = read({"a": cached_request(prompt=30)}, sampled=[[]], num_tokens=[30])
    assert request.max_proposal == 0


@pytest.mark.parametrize(
    ("max_tokens", "generated", "limit"), [(100, 2, K), (7, 2, 4), (3, 2, 0), (3, 3, 0), (None, 2, K)]
)
def test_the_last_wanted_token_is_never_proposed(max_tokens, generated, limit):
    (request,) = read({"a": cached_request(max_tokens=max_tokens)}, sampled=[[1]], num_tokens=[4 + generated])
    assert request.max_proposal == limit


@pytest.mark.parametrize(("min_tokens", "generated", "limit"), [(20, 2, K), (7, 2, 4), (3, 2, 0), (3, 3, K), (2, 8, K)])
def test_the_verifiers_own_token_does_not_stand_where_a_request_may_begin_to_end(min_tokens, generated, limit):
    (request,) = read({"a": cached_request(min_tokens=min_tokens)}, sampled=[[1]], num_tokens=[4 + generated])
    assert request.max_proposal == limit


def test_least_tokens_of_a_request_that_nothing_ends_limit_nothing():
    (request,) = read({"a": cached_request(min_tokens=7, stops=())}, sampled=[[1]], num_tokens=[6])
    assert request.max_proposal == K


@pytest.mark.parametrize(("num_tokens", "limit"), [(57, K), (60, 3), (62, 1), (63, 0), (64, 0)])
def test_proposals_stay_inside_the_targets_context(num_tokens, limit):
    (request,) = read({"a": cached_request()}, sampled=[[1]], num_tokens=[num_tokens])
    assert request.max_proposal == limit


@pytest.mark.parametrize(
    "state",
    [
        None,
        cached_request(prompt_embeds=object()),
        cached_request(mm_features=[1]),
        cached_request(sampling_params=None),
    ],
)
def test_what_has_no_text_is_not_speculated_on(state):
    assert read({"a": state}, sampled=[[1]], num_tokens=[6]) == [None]


def test_the_drafts_seed_is_stable_and_not_the_verifiers():
    one, two, other, none = read(
        {"a": cached_request(seed=7), "b": cached_request(seed=7), "c": cached_request(seed=8), "d": cached_request()},
        sampled=[[1]] * 4,
        num_tokens=[6] * 4,
    )
    assert one.seed == two.seed
    assert one.seed not in (7, other.seed)
    assert none.seed is None


def test_structured_output_is_told():
    free, bound = read(
        {"a": cached_request(), "b": cached_request(structured=object())}, sampled=[[1]] * 2, num_tokens=[6] * 2
    )
    assert (free.checks_values, bound.checks_values) == (False, True)


def test_an_id_that_comes_back_or_new_parameters_are_read_again():
    reader = BatchReader(max_model_len=64, max_proposal=K)
    state = cached_request(temperature=0.5)
    for temperature in (0.5, 0.5, 0.9):
        if temperature != state.sampling_params.temperature:
            state.sampling_params = cached_request(temperature=temperature, max_tokens=3).sampling_params
        (request,) = read({"a": state}, sampled=[[1]], num_tokens=[6], reader=reader)
        assert request.temperature == temperature
    assert request.max_proposal == 0
    (other,) = read({"a": cached_request(seed=3)}, sampled=[[1]], num_tokens=[6], reader=reader)
    assert (other.temperature, other.max_proposal) == (0.0, K)
    assert other.seed is not None
