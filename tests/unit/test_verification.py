"""Block verification in vLLM's place: against plain Python, number by number, and the law of its output."""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from reference import block_verification
from scipy import stats

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_tokentiming.vllm_adapter import verification  # noqa: E402

VOCABULARY = 6


def metadata(*, temperatures, generators=None):
    return SimpleNamespace(
        temperature=torch.tensor(temperatures, dtype=torch.float32),
        all_greedy=not any(temperatures),
        all_random=all(temperatures),
        generators=generators or {},
    )


def laws(generator, count, *, concentration=0.5):
    return torch.tensor(generator.dirichlet(np.full(VOCABULARY, concentration), count), dtype=torch.float32).reshape(
        count, VOCABULARY
    )


def judge(ids, counts, draft_probs, target_probs, sampling_metadata, *, bonus=None):
    bonus = bonus if bonus is not None else [VOCABULARY - 1] * len(counts)
    return verification.rejection_sample(
        torch.tensor(ids, dtype=torch.int32),
        list(counts),
        max(counts),
        torch.tensor(list(accumulate(counts)), dtype=torch.int32),
        draft_probs,
        target_probs.log(),
        torch.as_tensor(bonus).reshape(-1, 1),
        sampling_metadata,
    )


@pytest.mark.parametrize("point_masses", [False, True])
def test_each_request_is_judged_as_the_reference_does(monkeypatch, point_masses):
    """Batches of requests with none to five tokens, padding and impossible tokens among them."""
    generator = np.random.default_rng(7)
    for seed in range(60):
        counts = generator.integers(0, 6, 5).tolist()
        if not any(counts):
            continue
        draft, target = laws(generator, sum(counts)), laws(generator, sum(counts))
        ids = [int(generator.choice(VOCABULARY, p=row / row.sum())) for row in draft.numpy().astype(np.float64)]
        for i in range(len(ids)):
            if generator.random() < 0.1:
                ids[i] = -1
                draft[i] = 0.0
            elif generator.random() < 0.1:
                draft[i] = torch.nn.functional.one_hot(torch.tensor((ids[i] + 1) % VOCABULARY), VOCABULARY)
            elif point_masses:
                draft[i] = torch.nn.functional.one_hot(torch.tensor(ids[i]), VOCABULARY)
        if point_masses:
            draft = torch.stack([torch.zeros(VOCABULARY) if i < 0 else torch.eye(VOCABULARY)[i] for i in ids])
        uniforms = generator.random(len(ids))
        monkeypatch.setattr(
            "vllm.v1.sample.rejection_sampler.generate_uniform_probs", lambda *_, u=uniforms: torch.tensor(u)
        )
        torch.manual_seed(seed)
        numbers = torch.rand(len(counts), dtype=torch.float64).tolist()
        torch.manual_seed(seed)
        output = judge(ids, counts, None if point_masses else draft, target, metadata(temperatures=[1.0] * 5))
        target_laws = target.log().softmax(-1).double().tolist()
        starts = list(accumulate(counts, initial=0))
        for row, (start, end) in enumerate(pairwise(starts)):
            accepted, other = block_verification.verify(
                ids[start:end],
                draft[start:end].double().tolist(),
                target_laws[start:end],
                uniforms[start:end],
                numbers[row],
            )
            expected = [*ids[start : start + accepted], other if accepted < end - start else VOCABULARY - 1]
            assert output[row].tolist() == expected + [-1] * (max(counts) + 1 - len(expected)), (seed, row)


def test_the_output_has_the_law_of_the_target():
    """Forty thousand requests with two tokens each, drawn from the draft: pairs of output tokens, by χ²."""
    generator = np.random.default_rng(1)
    requests, (first, second) = 40_000, laws(generator, 2, concentration=1.0)
    target_first, target_second = laws(generator, 1)[0], laws(generator, VOCABULARY)
    ids = np.stack(
        [generator.choice(VOCABULARY, requests, p=p.double() / p.double().sum()) for p in (first, second)], 1
    )
    target = torch.stack([target_first.expand(requests, -1), target_second[ids[:, 0]]], 1).reshape(-1, VOCABULARY)
    draft = torch.stack([first, second]).repeat(requests, 1)
    bonus = torch.zeros(requests, dtype=torch.long)
    torch.manual_seed(0)
    output = judge(ids.reshape(-1), [2] * requests, draft, target, metadata(temperatures=[1.0] * requests), bonus=bonus)
    # After a rejection at the first token the target goes on by itself.
    continued = torch.multinomial(target_second, requests, replacement=True)
    second_tokens = torch.where(output[:, 1] >= 0, output[:, 1], continued[output[:, 0], torch.arange(requests)])
    counts = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(counts, (output[:, 0].numpy(), second_tokens.numpy()), 1)
    expected = (target_first[:, None] * target_second).double()
    result = stats.chisquare(counts.ravel(), (expected / expected.sum() * requests).ravel())
    assert result.pvalue > 1e-4
    accepted = (output >= 0).sum(1).double().mean() - 1
    alone = [torch.minimum(first, target_first), torch.minimum(second, target_second)]
    token_by_token = alone[0].sum() + (alone[0] * alone[1].sum(-1)).sum()
    assert accepted > token_by_token + 0.01


def test_greedy_requests_accept_what_is_likeliest():
    target = torch.tensor([[0.6, 0.4], [0.3, 0.7], [0.9, 0.1], [0.5, 0.5]])
    for temperatures in ([0.0, 0.0], [0.0, 1.0]):
        output = judge([0, 1, 0, 0], [2, 2], None, target, metadata(temperatures=temperatures), bonus=[5, 5])
        assert output[0].tolist() == [0, 1, 5]
    output = judge([0, 0, 0, 1], [2, 2], None, target, metadata(temperatures=[0.0, 0.0]), bonus=[5, 5])
    assert output.tolist() == [[0, 1, -1], [0, 0, -1]]  # of equals the first


def test_a_broken_law_of_the_target_accepts_nothing():
    target = laws(np.random.default_rng(0), 2)
    target[0] = torch.nan
    for draft in (None, laws(np.random.default_rng(1), 2)):
        (output,) = judge([1, 2], [2], draft, target, metadata(temperatures=[1.0])).tolist()
        assert 0 <= output[0] < VOCABULARY
        assert output[1:] == [-1, -1]


def test_laws_that_are_the_same_are_accepted_whole():
    law = laws(np.random.default_rng(0), 3)
    output = judge([1, 2, 3], [3], law, law, metadata(temperatures=[1.0]), bonus=[4])
    assert output.tolist() == [[1, 2, 3, 4]]


def test_a_step_without_proposals_gives_the_bonus_tokens():
    output = verification.rejection_sample(
        torch.empty(0, dtype=torch.int32),
        [0, 0],
        0,
        torch.zeros(2, dtype=torch.int32),
        None,
        torch.empty(0, VOCABULARY),
        torch.tensor([[3], [4]]),
        metadata(temperatures=[1.0, 0.0]),
    )
    assert output.tolist() == [[3], [4]]


def test_a_seed_gives_the_same_output_whoever_is_beside_it():
    generator = np.random.default_rng(3)
    draft, target = laws(generator, 4), laws(generator, 4)

    def of_seeded(counts, rows, row):
        seeded = torch.Generator().manual_seed(5)
        sampling = metadata(temperatures=[1.0] * len(counts), generators={row: seeded})
        output = judge([0, 1] * (len(rows) // 2), counts, draft[rows], target[rows], sampling)
        return output[row].tolist(), torch.rand(1, generator=seeded).item()

    alone = [of_seeded([2], [2, 3], 0) for _ in range(3)]
    torch.rand(3)
    assert alone == [of_seeded([2, 2], [0, 1, 2, 3], 1)] * 3


def test_generators_of_requests_without_proposals_rest():
    seeded = torch.Generator().manual_seed(5)
    law = laws(np.random.default_rng(0), 1)
    judge([1], [1, 0], law, law, metadata(temperatures=[1.0, 1.0], generators={1: seeded}))
    assert torch.equal(seeded.get_state(), torch.Generator().manual_seed(5).get_state())


def test_numbers_at_the_ends_give_tokens_of_the_law():
    law = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    almost_one = np.nextafter(1.0, 0.0)
    numbers = torch.tensor([0.0, 0.2499, 0.2501, almost_one], dtype=torch.float64)
    assert verification.draw(law.repeat(4, 1), numbers) == [1, 1, 3, 3]
    assert verification.draw(torch.zeros(1, 5), torch.zeros(1, dtype=torch.float64)) == [4]


@pytest.mark.parametrize("size", [5, 128, 640, 1000])
def test_drawing_by_blocks_inverts_the_running_sum(size):
    generator = np.random.default_rng(size)
    law = torch.tensor(generator.exponential(size=(300, size)) ** 4, dtype=torch.float32)
    law[generator.random((300, size)) < 0.7] = 0.0  # whole blocks and ends without probability
    law[:, size // 2] += 1e-3
    numbers = generator.random(300)
    numbers[:4] = [0.0, np.nextafter(1.0, 0.0), 1e-12, 1 - 1e-12]
    drawn = verification.draw(law, torch.from_numpy(numbers))
    for token, row, number in zip(drawn, law.double().numpy(), numbers, strict=True):
        upper = row[: token + 1].sum() / row.sum()
        assert row[token] > 0.0
        assert upper - row[token] / row.sum() - 1e-6 <= number <= upper + 1e-6


def test_a_seed_draws_from_the_law_of_the_logits():
    """A million seeds, by χ². What has no probability is never drawn; a seed gives its token alone and in a batch."""
    torch.manual_seed(3)
    logits = torch.tensor([0.0, 2.0, -torch.inf, -6.0, 1.0, -1.5])
    seeds = torch.randint(0, 2**31, (1_000_000,))
    counts = np.bincount(verification.draw_by_seed(logits.expand(len(seeds), -1), seeds).numpy(), minlength=6)
    law = logits.double().softmax(-1).numpy()
    assert counts[2] == 0
    possible = law > 0
    assert stats.chisquare(counts[possible], law[possible] * len(seeds)).pvalue > 1e-4
    some = seeds[:40]
    together = verification.draw_by_seed(logits.expand(40, -1), some)
    assert together.dtype == torch.int64
    assert together.tolist() == [verification.draw_by_seed(logits[None], seed[None]).item() for seed in some]


def test_seeds_lie_evenly_between_zero_and_one():
    """Neighbouring seeds are neighbouring numbers, so every token of at least 2^-30 is within reach."""
    seeds = torch.tensor([0, 1, 2, 2**30, 2**31 - 2, 2**31 - 1])
    numbers = (seeds.double() + verification._fractions(seeds)) / 2**31
    assert ((numbers * 2**31).floor() == seeds).all()
    assert len({round(float(f), 6) for f in verification._fractions(seeds)}) == len(seeds)
    assert numbers[-1] < 1.0
