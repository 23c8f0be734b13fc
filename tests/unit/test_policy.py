"""The policy against requests whose mean accepted counts are known."""

import math
import random
import statistics

import pytest

from vllm_tokentiming.policy import ARMS, FORCED, GREEDY, SAMPLED, Arm, Policy

# Mean accepted tokens a cycle of (exact@0.7, greedy), as measured on five tasks (docs/losslessness.md, "Figures").
TASKS = ((1.57, 1.15), (0.77, 0.48), (0.93, 0.64), (1.51, 1.50), (1.30, 1.02))
MOST = 4


def chance_of(mean: float) -> float:
    """Chance of each token's acceptance with which ``MOST`` proposed tokens bring ``mean``."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(1, MOST + 1)) < mean else (low, middle)
    return low


def accepted(chance: float, rng: random.Random) -> int:
    count = 0
    while count < MOST and rng.random() < chance:
        count += 1
    return count


def served(means: list[tuple[float, float]], *, cycles: int, seed: int, alone: bool = False) -> list[float]:
    """Mean accepted tokens expected of what was chosen, by request; all requests take turns."""
    rng = random.Random(seed)
    policy = Policy()
    requests = [policy.for_request(alone=alone) for _ in means]
    gained = [0.0] * len(means)
    for _ in range(cycles):
        for place, request in enumerate(requests):
            arm = request.choose()
            mean = means[place][ARMS.index(arm)]
            request.observe(arm, accepted(chance_of(mean), rng))
            gained[place] += mean / cycles
    return gained


@pytest.mark.parametrize("task", TASKS)
def test_a_task_on_its_own_loses_little_against_its_best_arm(task: tuple[float, float]) -> None:
    lengths = [1 + gained for seed in range(4) for gained in served([task] * 12, cycles=48, seed=seed)]
    assert statistics.mean(lengths) > 0.97 * (1 + max(task))


def test_mixed_tasks_lose_little_against_each_one_s_best_arm() -> None:
    means = list(TASKS) * 12
    lengths = [[1 + gained for gained in served(means, cycles=48, seed=seed)] for seed in range(2)]
    best = statistics.mean(1 + max(mean) for mean in means)
    assert statistics.mean(length for each in lengths for length in each) > 0.985 * best


def test_a_request_unlike_the_others_finds_its_own_way() -> None:
    gained = served([(1.5, 0.5)] * 11 + [(0.2, 1.8)], cycles=300, seed=1)
    assert gained[-1] > 1.3
    assert statistics.mean(gained[:-1]) > 1.35


def test_a_request_alone_depends_on_nobody() -> None:
    policy = Policy()
    for _ in range(500):
        policy.observe(SAMPLED, 0)
        policy.observe(GREEDY, MOST)

    def choices(policy: Policy, *, alone: bool) -> list[Arm]:
        request = policy.for_request(alone=alone)
        chosen = []
        for cycle in range(60):
            chosen.append(request.choose())
            request.observe(chosen[-1], cycle % 3)
        return chosen

    assert choices(policy, alone=True) == choices(Policy(), alone=True)
    assert choices(policy, alone=False) != choices(Policy(), alone=False)


def test_a_draft_that_nobody_chose_teaches_nothing() -> None:
    policy = Policy()
    request = policy.for_request(alone=False)
    before = [policy.advantage(arm, alone=False) for arm in ARMS]
    for _ in range(50):
        request.observe(FORCED, MOST)
    assert [policy.advantage(arm, alone=False) for arm in ARMS] == before


@pytest.mark.parametrize("sharpening", [-0.1, math.inf, math.nan])
def test_sharpening_out_of_range_is_refused(sharpening: float) -> None:
    with pytest.raises(ValueError, match="sharpening"):
        Arm(name="wrong", sharpening=sharpening)


def test_a_policy_needs_an_arm() -> None:
    with pytest.raises(ValueError, match="arm"):
        Policy(())
