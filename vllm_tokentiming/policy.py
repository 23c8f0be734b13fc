"""Which way to draft pays for this request now: greedy and point mass, or sampled with exact rows, and how sharply.

Laws win where the target is uncertain, full re-tokenisation of a greedy draft wins where it is not, and sharpening
trades between the two; which of them a request needs is learned from its own accepted tokens, starting from what other
requests of the server saw.

Exactness: a choice is made before anything of its cycle is drawn, from accepted counts of the past alone, so it is one
of the things that were known when the rows were chosen (docs/losslessness.md).

Owns: :class:`Policy` the server's tallies, :class:`RequestPolicy` one request's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arm:
    """One way to draft; equal to itself only.

    Attributes:
        name: for metrics and tables.
        sharpening: the draft's temperature as a multiple of the request's; 0 is the greedy draft, whose rows are point
            masses.
    """

    name: str
    sharpening: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.sharpening < math.inf:
            raise ValueError(f"sharpening is {self.sharpening}; it must be 0 or more")


GREEDY: Final = Arm(name="greedy", sharpening=0.0)
FORCED: Final = Arm(name="forced", sharpening=0.0)
"""A greedy draft that nobody chose, such as a greedy request's: nothing is learned from it."""
ARMS: Final = (
    GREEDY,
    Arm(name="exact@1", sharpening=1.0),
    Arm(name="exact@0.7", sharpening=0.7),
    Arm(name="exact@0.4", sharpening=0.4),
)

_PRIOR_WEIGHT: Final = 6.0
"""Cycles that the server's mean counts for in a request's own."""

_EXPLORATION: Final = 0.35
"""Accepted tokens that one cycle's worth of doubt about an arm is worth."""

_MEMORY: Final = 0.98
"""What a tally keeps of itself with each new cycle: a text changes its nature as it goes on."""

_SERVER_MEMORY: Final = 0.999

_FIRST_GUESS: Final = (1.2, 1.3, 1.35, 1.3)
"""Accepted tokens per cycle before anything was seen; close to each other, so that a few cycles overrule them."""


@dataclass(slots=True)
class _Tally:
    cycles: float = 0.0
    accepted: float = 0.0

    def add(self, accepted: int, *, memory: float) -> None:
        self.cycles = self.cycles * memory + 1.0
        self.accepted = self.accepted * memory + accepted


class Policy:
    """The arms of a server, and what they brought so far.

    Args:
        arms: to choose from.
    """

    def __init__(self, arms: tuple[Arm, ...] = ARMS) -> None:
        if not arms:
            raise ValueError("a policy needs an arm at least")
        self.arms = arms
        self._tallies = {arm: _Tally() for arm in arms}
        guesses = dict(zip(ARMS, _FIRST_GUESS, strict=True))
        self._guesses = {arm: guesses.get(arm, 1.3) for arm in arms}

    def for_request(self, *, alone: bool) -> RequestPolicy:
        """The policy of one request.

        Args:
            alone: its choices must not depend on other requests (it has a seed).
        """
        return RequestPolicy(self, alone=alone)

    def prior_mean(self, arm: Arm, *, alone: bool) -> float:
        """Accepted tokens per cycle expected of an arm before a request has tried it."""
        guess, weight = self._guesses[arm], _PRIOR_WEIGHT
        if alone:
            return guess
        tally = self._tallies[arm]
        return (guess * weight + tally.accepted) / (weight + tally.cycles)

    def observe(self, arm: Arm, accepted: int) -> None:
        """One cycle of any request."""
        self._tallies[arm].add(accepted, memory=_SERVER_MEMORY)


class RequestPolicy:
    """One request's choices."""

    __slots__ = ("_alone", "_cycles", "_policy", "_tallies")

    def __init__(self, policy: Policy, *, alone: bool) -> None:
        self._policy = policy
        self._alone = alone
        self._tallies = {arm: _Tally() for arm in policy.arms}
        self._cycles = 0

    def choose(self) -> Arm:
        """The best arm by mean and doubt: UCB1 with a prior. Deterministic, so that seeds stay reproducible."""
        arms = self._policy.arms
        if len(arms) == 1:
            return arms[0]
        doubt = _EXPLORATION * math.sqrt(math.log(2.0 + self._cycles))
        best, best_score = arms[0], -math.inf
        for arm, tally in self._tallies.items():
            weight = _PRIOR_WEIGHT + tally.cycles
            prior = self._policy.prior_mean(arm, alone=self._alone)
            score = (prior * _PRIOR_WEIGHT + tally.accepted) / weight + doubt / math.sqrt(weight)
            if score > best_score:
                best, best_score = arm, score
        return best

    def observe(self, arm: Arm, accepted: int) -> None:
        """What came of a cycle: ``accepted`` of its proposed tokens. An arm that is no choice here teaches nothing."""
        if arm not in self._tallies:
            return
        self._cycles += 1
        for other, tally in self._tallies.items():
            if other is arm:
                tally.add(accepted, memory=_MEMORY)
            else:
                tally.cycles *= _MEMORY
                tally.accepted *= _MEMORY
        self._policy.observe(arm, accepted)
