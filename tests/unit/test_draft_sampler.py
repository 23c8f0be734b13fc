"""Are draft tokens drawn from exactly the laws that are reported, whoever else is in the batch?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vllm_tokentiming.engine.interface import DraftSampling
from vllm_tokentiming.engine.sampler import DraftSampler, SamplingPlan, confidence

CPU = torch.device("cpu")


def _plan(
    samplings: Sequence[DraftSampling | None], *, seed: int = 0, sampler: DraftSampler | None = None
) -> SamplingPlan:
    sampler = sampler or DraftSampler(device=CPU, seed=seed)
    return sampler.plan([f"request {i}" for i in range(len(samplings))], samplings)


def _logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def _law(logits: torch.Tensor, sampling: DraftSampling) -> torch.Tensor:
    """The obvious way: everything outside of the top k has no mass, the rest is a softmax, [V]."""
    scaled = logits.double() / sampling.temperature
    keep = torch.zeros_like(scaled, dtype=torch.bool)
    keep[scaled.argsort(descending=True)[: sampling.top_k]] = True
    return scaled.masked_fill(~keep, float("-inf")).softmax(dim=0)


samplings = st.one_of(
    st.none(),
    st.builds(
        DraftSampling,
        temperature=st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0]),
        top_k=st.integers(1, 50),
        seed=st.one_of(st.none(), st.integers(0, 3)),
    ),
)


@given(st.lists(samplings, min_size=1, max_size=6), st.integers(1, 40), st.integers(0, 1000), st.integers(1, 6))
def test_laws_are_the_truncated_softmax_and_tokens_come_from_them(
    batch: list[DraftSampling | None], vocab_size: int, seed: int, drafting: int
) -> None:
    rows = min(drafting, len(batch))  # the last rows may have finished drafting
    logits = _logits(rows, vocab_size, seed)
    ids, largest, support, probs = _plan(batch).step(logits)
    assert torch.equal(largest, logits.max(dim=-1).values)
    for row, sampling in enumerate(batch[:rows]):
        if sampling is None or sampling.temperature == 0:
            assert ids[row] == logits[row].argmax()
            continue
        assert support is not None
        assert probs is not None
        assert float(probs[row].sum()) == pytest.approx(1, abs=1e-12)
        assert len(set(support[row].tolist())) == support.shape[1]
        law = torch.zeros(vocab_size, dtype=torch.float64)
        law[support[row]] = probs[row]
        assert torch.allclose(law, _law(logits[row], sampling), atol=1e-6)
        assert int((law > 0).sum()) <= sampling.top_k
        assert law[ids[row]] > 0


def test_a_greedy_batch_keeps_no_laws() -> None:
    plan = _plan([None, DraftSampling(temperature=0.0, top_k=5, seed=1)])
    assert not plan.keeps_laws
    assert plan.step(_logits(2, 9))[2:] == (None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_choose_alike_with_and_without_sampled_neighbours(dtype: torch.dtype) -> None:
    # Small integers: many rows have their maximum twice or more.
    logits = torch.randint(0, 4, (200, 50), generator=torch.Generator().manual_seed(3)).to(dtype)
    alone = _plan([None] * 200).step(logits)[0]
    mixed = _plan([None] * 199 + [DraftSampling(temperature=1.0, top_k=8)]).step(logits)[0]
    assert torch.equal(alone[:199], mixed[:199])
    assert (logits == logits.max(dim=-1, keepdim=True).values).sum(dim=-1).float().mean() > 2


def test_each_row_has_its_own_top_k() -> None:
    plan = _plan([DraftSampling(temperature=1.0, top_k=k) for k in (1, 3, 10)] + [None])
    logits = _logits(4, 30)
    for _ in range(50):
        ids, _, support, probs = plan.step(logits)
        assert support is not None
        assert probs is not None
        assert support.shape == probs.shape == (4, 10)
        assert [int(n) for n in (probs[:3] > 0).sum(dim=-1)] == [1, 3, 10]
        assert ids[0] == logits[0].argmax()
        assert ids[1] in logits[1].topk(3).indices


@pytest.mark.parametrize("seed", [None, 17])
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 12), (0.5, 5), (2.0, 40)])
def test_draws_follow_the_law(seed: int | None, temperature: float, top_k: int) -> None:
    """Chi-square of draws from the shared stream, 20 rows a step, and from a request's own."""
    sampling = DraftSampling(temperature=temperature, top_k=top_k, seed=seed)
    rows, steps, vocab_size = 20, 1000, 60
    one = _logits(1, vocab_size, seed=top_k)
    plan = _plan([sampling] + [DraftSampling(temperature=temperature, top_k=top_k)] * (rows - 1), seed=4)
    if seed is not None:
        steps, rows = 6000, 1
        plan = _plan([sampling])
    drawn = torch.cat([plan.step(one.expand(rows, -1))[0] for _ in range(steps)])
    law = _law(one[0], sampling)
    expected = law * rows * steps
    counted = expected >= 5
    counts = torch.bincount(drawn, minlength=vocab_size)
    assert int(counts[law == 0].sum()) == 0
    found = [*counts[counted].tolist(), int(counts[~counted].sum())]
    wanted = [*expected[counted].tolist(), float(expected[~counted].sum())]
    if wanted[-1] < 5:  # too few for the statistic: one cell with the first
        found, wanted = [found[0] + found[-1], *found[1:-1]], [wanted[0] + wanted[-1], *wanted[1:-1]]
    assert stats.chisquare(found, wanted).pvalue > 1e-4


def test_rows_of_the_shared_stream_draw_independently() -> None:
    """Chi-square of the joint law of two rows with equal logits."""
    sampling = DraftSampling(temperature=1.0, top_k=3)
    logits = torch.tensor([[1.0, 0.5, 0.0, -9.0]]).expand(2, -1)
    plan = _plan([sampling, sampling], seed=8)
    pairs = torch.stack([plan.step(logits)[0] for _ in range(6000)])
    law = _law(logits[0], sampling)[:3]
    counts = torch.bincount(pairs[:, 0] * 3 + pairs[:, 1], minlength=9)
    assert stats.chisquare(counts.tolist(), (torch.outer(law, law) * 6000).flatten().tolist()).pvalue > 1e-4


@given(st.lists(samplings, max_size=4), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 40))
def test_a_seeded_rows_draws_do_not_depend_on_its_neighbours(
    neighbours: list[DraftSampling | None], cycles: list[int], top_k: int
) -> None:
    mine = DraftSampling(temperature=1.5, top_k=top_k, seed=5)
    logits = _logits(1, 30)

    def draws(others: list[DraftSampling | None]) -> list[int]:
        sampler = DraftSampler(device=CPU, seed=len(others))
        found = []
        for steps in cycles:
            plan = sampler.plan([*(f"other {i}" for i in range(len(others))), "mine"], [*others, mine])
            found += [int(plan.step(logits.expand(len(others) + 1, -1))[0][-1]) for _ in range(steps)]
        return found

    assert draws([]) == draws(neighbours)


def test_a_seeded_cycle_draws_the_same_however_far_the_one_before_went() -> None:
    """Where others in the batch draft on, a cycle draws more tokens than its request proposes."""
    sampler = DraftSampler(device=CPU, seed=0)
    logits = _logits(1, 50)

    def cycle(seed: int, *, steps: int) -> list[int]:
        plan = sampler.plan(["a"], [DraftSampling(temperature=3.0, top_k=50, seed=seed)])
        return [int(plan.step(logits)[0]) for _ in range(steps)]

    first = cycle(2, steps=10)
    assert cycle(3, steps=10) != first
    cycle(2, steps=4)
    assert cycle(2, steps=10) == first
    sampler.release("a")
    sampler.release("never seen")
    assert cycle(2, steps=10) == first


def test_confidence_is_the_largest_probability() -> None:
    logits = _logits(5, 30)
    torch.testing.assert_close(confidence(logits), logits.float().softmax(dim=-1).amax(dim=-1))


def test_equal_seeds_of_the_shared_stream_draw_alike() -> None:
    """As the ranks of a tensor-parallel group must."""
    batch = [DraftSampling(temperature=2.0, top_k=20), None, DraftSampling(temperature=1.0, top_k=7, seed=1)]
    logits = _logits(3, 40)

    def draws(seed: int) -> list[list[int]]:
        plan = _plan(batch, seed=seed)
        return [plan.step(logits)[0].tolist() for _ in range(20)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampled", [True, False])
def test_a_broken_row_shows_and_leaves_the_others_alone(bad: float, sampled: bool) -> None:
    logits = _logits(3, 20)
    sampling = DraftSampling(temperature=1.0, top_k=5, seed=3) if sampled else None
    batch = [sampling, sampling, None]
    clean = _plan(batch).step(logits)
    broken = logits.clone()
    broken[1, 4] = bad
    ids, largest, _, _ = _plan(batch).step(broken)
    assert torch.isfinite(largest).tolist() == [True, False, True]
    assert [ids[0], ids[2]] == [clean[0][0], clean[0][2]]
    assert 0 <= int(ids[1]) < 20  # it is still fed back to the model
    broken[1] = float("-inf")
    assert not torch.isfinite(_plan(batch).step(broken)[1][1])
