"""Verification without copies against vLLM's own forward, which calls the same functions on what it has copied."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, chain
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.sample import rejection_sampler  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessors, builtin  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: E402

from vllm_tokentiming.vllm_adapter import direct_verification, patches, verification  # noqa: E402

VOCABULARY = 300
STOCK_FORWARD = rejection_sampler.RejectionSampler.forward


@pytest.fixture
def sampler(monkeypatch):
    """VLLM's, on the functions that the other patches put in place."""
    monkeypatch.setattr(rejection_sampler, "rejection_sample", verification.rejection_sample)
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", rejection_sampler.expand_batch_to_tokens)
    patches._mend_expand()
    monkeypatch.setattr(torch.ops._C, "fused_gumbel_argmax", verification.draw_by_seed, raising=False)
    return rejection_sampler.RejectionSampler(Sampler())


def sampling(*, temperatures, generators=None, **changes):
    count = len(temperatures)
    nothing = torch.zeros(count)
    temperature = torch.tensor(temperatures, dtype=torch.float32)
    metadata = SamplingMetadata(
        temperature=None if not any(temperatures) else temperature,
        all_greedy=not any(temperatures),
        all_random=all(temperatures),
        top_p=None,
        top_k=None,
        generators=generators or {},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing + 1.0,
        output_token_ids=[[] for _ in range(count)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return replace(metadata, **changes)


def proposals(ids: list[list[int]]) -> SpecDecodeMetadata:
    """Rows of logits as vLLM's runner lays them out: each request's proposed tokens, then its bonus token."""
    metadata = SpecDecodeMetadata.make_dummy(ids, torch.device("cpu"))
    ends = list(accumulate(len(of_request) + 1 for of_request in ids))
    metadata.bonus_logits_indices = torch.tensor(ends, dtype=torch.int32) - 1
    rows = chain.from_iterable(range(end - len(one) - 1, end - 1) for one, end in zip(ids, ends, strict=True))
    metadata.target_logits_indices = torch.tensor(list(rows), dtype=torch.int32)
    return metadata


def batch(generator, *, dtype, temperatures, point_masses):
    """Logits, the draft's laws and what they propose: some of it likely, some padding, some requests without any."""
    counts = generator.integers(0, 6, len(temperatures)).tolist()
    logits = torch.tensor(6.0 * generator.standard_normal((sum(counts) + len(counts), VOCABULARY)), dtype=dtype)
    ids, laws, row = [], [], 0
    for count, temperature in zip(counts, temperatures, strict=True):
        noise = torch.tensor(generator.standard_normal((count, VOCABULARY)), dtype=torch.float32)
        of_request = ((logits[row : row + count].float() + 0.5 * noise) / (temperature or 0.1)).softmax(-1)
        drawn = [int(generator.choice(VOCABULARY, p=law / law.sum())) for law in of_request.double().numpy()]
        if point_masses or not temperature:
            drawn = logits[row : row + count].float().argmax(-1).tolist()
        ids.append([-1 if generator.random() < 0.05 else token for token in drawn])
        laws.append(of_request)
        row += count + 1
    return proposals(ids), None if point_masses else torch.cat(laws), logits


def generators_of(count, *, seeded):
    return {row: torch.Generator().manual_seed(row) for row in range(count) if seeded and row % 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("temperatures", [[0.0] * 5, [1.0] * 5, [0.7, 1.3, 1.0, 0.2, 1.0], [0.0, 1.0, 0.6, 0.0, 1.0]])
@pytest.mark.parametrize("point_masses", [False, True])
@pytest.mark.parametrize("seeded", [False, True])
def test_the_same_tokens_from_the_same_random_numbers(sampler, dtype, temperatures, point_masses, seeded):
    generator = np.random.default_rng(5)
    lengths = set()
    for seed in range(12):
        metadata, laws, logits = batch(generator, dtype=dtype, temperatures=temperatures, point_masses=point_masses)
        outputs = []
        for direct in (False, True):
            of_requests = generators_of(len(temperatures), seeded=seeded)
            asked = sampling(temperatures=temperatures, generators=of_requests)
            torch.manual_seed(seed)
            if direct:
                assert direct_verification.applies(sampler, logits, asked)
                tokens = direct_verification.verify(metadata, laws, logits.clone(), asked)
            else:
                tokens = STOCK_FORWARD(sampler, metadata, laws, logits.clone(), asked).sampled_token_ids
            after = [torch.rand(1, generator=one).item() for one in of_requests.values()]
            outputs.append((tokens.tolist(), tokens.dtype, after, torch.rand(1).item()))
        assert outputs[0] == outputs[1]
        lengths |= {sum(token >= 0 for token in row) for row in outputs[0][0]}
    assert len(lengths) > 3  # some are rejected at once, some accepted whole


def test_logits_stay_as_they_are(sampler):
    metadata, laws, logits = batch(
        np.random.default_rng(0), dtype=torch.float32, temperatures=[0.7, 0.0], point_masses=False
    )
    before = logits.clone()
    direct_verification.verify(metadata, laws, logits, sampling(temperatures=[0.7, 0.0]))
    assert torch.equal(before, logits)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_logprobs": 0},
        {"logprob_token_ids": {0: [1]}},
        {"no_penalties": False},
        {"bad_words_token_ids": {0: [[1]]}},
        {"allowed_token_ids_mask": torch.zeros(1, VOCABULARY, dtype=torch.bool)},
        {"top_k": torch.tensor([3])},
        {"top_p": torch.tensor([0.5])},
        {"thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_logits_or_reads_them_goes_the_long_way(sampler, changes):
    assert not direct_verification.applies(sampler, torch.zeros(2, 4), sampling(temperatures=[1.0], **changes))
    idle = SimpleNamespace(has_tracked_requests=lambda: False)
    asked = sampling(temperatures=[1.0], thinking_budget_state_holder=idle)
    assert direct_verification.applies(sampler, torch.zeros(2, 4), asked)


def made(kind, **state):
    """A logits processor in this state."""
    processor = kind.__new__(kind)
    vars(processor).update(state)
    return processor


class OfAUser(builtin.MinTokensLogitsProcessor):
    """A user's own, whatever it does."""


@pytest.mark.parametrize(
    ("processor", "rests"),
    [
        (made(builtin.MinTokensLogitsProcessor, min_toks={}), True),
        (made(builtin.MinTokensLogitsProcessor, min_toks={0: (2, [], {1}, False)}), False),
        (made(builtin.LogitBiasLogitsProcessor, biases={}), True),
        (made(builtin.LogitBiasLogitsProcessor, biases={0: {1: 2.0}}), False),
        (made(builtin.MinPLogitsProcessor, min_p_count=0), True),
        (made(builtin.MinPLogitsProcessor, min_p_count=1), False),
        (made(OfAUser, min_toks={}), False),
    ],
)
def test_logits_processors_that_have_something_to_do_go_the_long_way(sampler, processor, rests):
    asked = sampling(temperatures=[1.0], logitsprocs=LogitsProcessors([processor]))
    assert direct_verification.applies(sampler, torch.zeros(2, 4), asked) is rests


def test_a_function_that_somebody_else_has_put_in_place_is_called(sampler, monkeypatch):
    monkeypatch.setattr(rejection_sampler, "rejection_sample", lambda *_, **__: None)
    assert not direct_verification.applies(sampler, torch.zeros(2, 4), sampling(temperatures=[1.0]))


@pytest.mark.parametrize("field", ["synthetic_mode", "use_fp64_gumbel"])
def test_other_ways_to_sample_stay_vllms(sampler, field):
    setattr(sampler, field, True)
    assert not direct_verification.applies(sampler, torch.zeros(2, 4), sampling(temperatures=[1.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "logits",
    [
        [-1.0, 3.0, 2.0, 3.0],
        [-3.0, -1.0, -1.0, -2.0],
        [-0.0, 0.0, -1.0],
        [-1.0, -0.0, 0.0],
        [-torch.inf, -5.0, -torch.inf],
        [1.0, torch.inf, 2.0],
        [-torch.inf, -torch.inf],
        [1e-40, 0.0, -1.0],
    ],
)
def test_the_likeliest_token_is_the_first_of_the_largest(dtype, logits):
    row = torch.tensor(logits, dtype=dtype)
    assert direct_verification.likeliest_token(row) == int(row.float().numpy().argmax())


def test_the_likeliest_token_of_many_rows():
    rows = torch.randn(200, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = [direct_verification.likeliest_token(row) for row in rows]
    assert found == rows.float().numpy().argmax(-1).tolist()
