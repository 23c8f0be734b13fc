"""Which way to draft pays for this request now: greedy and point mass, or sampled with exact rows.

Laws win where the target is uncertain; full re-tokenisation of a greedy draft can win where it is not. Which of them a
request needs is learned from its own accepted tokens, starting from what other requests of the server saw.

One draft temperature serves all: 0.7 times the request's (docs/losslessness.md, "Figures").

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
SAMPLED: Final = Arm(name="exact@0.7", sharpening=0.7)
ARMS: Final = (SAMPLED, GREEDY)

_FIRST_GUESS: Final = {SAMPLED: 1.0, GREEDY: 0.85}
"""Accepted tokens per cycle of each arm, beside the other's, before anything was seen."""

_FIRST_LEVEL: Final = 1.2
"""Accepted tokens per cycle of a request before anything was seen of it."""

_LEVEL_WEIGHT: Final = 4.0
_LEAST_LEVEL: Final = 0.3
"""Below it, a single accepted token would count for too much."""

_SERVER_WEIGHT: Final = 200.0
_PRIOR_WEIGHT: Final = 40.0
"""Cycles that the server's mean counts for in a request's own: one cycle tells little, and a wrong turn costs much."""

_EXPLORATION: Final = 0.2
"""Accepted tokens that one cycle's worth of doubt about an arm is worth."""

_MEMORY: Final = 0.98
"""What a tally keeps of itself with each new cycle: a text changes its nature as it goes on."""

_SERVER_MEMORY: Final = 0.999


@dataclass(slots=True)
class _Tally:
    """Cycles, and what they brought in sum."""

    cycles: float = 0.0
    accepted: float = 0.0

    def fade(self, memory: float) -> None:
        self.cycles *= memory
        self.accepted *= memory

    def add(self, accepted: float) -> None:
        self.cycles += 1.0
        self.accepted += accepted


class Policy:
    """The arms of a server, and how they compare.

    Requests differ more from each other than arms do within one, so an arm is judged by what it brought beside the
    level of the request that chose it.

    Args:
        arms: to choose from.
    """

    def __init__(self, arms: tuple[Arm, ...] = ARMS) -> None:
        if not arms:
            raise ValueError("a policy needs an arm at least")
        self.arms = arms
        self._tallies = {
            arm: _Tally(cycles=_SERVER_WEIGHT, accepted=_SERVER_WEIGHT * _FIRST_GUESS.get(arm, 1.0)) for arm in arms
        }

    def for_request(self, *, alone: bool) -> RequestPolicy:
        """The policy of one request.

        Args:
            alone: its choices must not depend on other requests (it has a seed).
        """
        return RequestPolicy(self, alone=alone)

    def advantage(self, arm: Arm, *, alone: bool) -> float:
        """What an arm brings, as a multiple of the level of the request."""
        if alone:
            return _FIRST_GUESS.get(arm, 1.0)
        tally = self._tallies[arm]
        return tally.accepted / tally.cycles

    def observe(self, arm: Arm, share: float) -> None:
        """One cycle of any request: what it brought, over the request's level."""
        tally = self._tallies[arm]
        tally.fade(_SERVER_MEMORY)
        tally.add(share)


class RequestPolicy:
    """One request's choices."""

    __slots__ = ("_alone", "_cycles", "_level", "_policy", "_tallies")

    def __init__(self, policy: Policy, *, alone: bool) -> None:
        self._policy = policy
        self._alone = alone
        self._tallies = {arm: _Tally() for arm in policy.arms}
        self._level = _Tally(cycles=_LEVEL_WEIGHT, accepted=_LEVEL_WEIGHT * _FIRST_LEVEL)
        self._cycles = 0

    def choose(self) -> Arm:
        """The best arm by mean and doubt: UCB1 with a prior. Deterministic, so that seeds stay reproducible."""
        arms = self._policy.arms
        if len(arms) == 1:
            return arms[0]
        doubt = _EXPLORATION * math.sqrt(math.log(2.0 + self._cycles))
        level = self._level.accepted / self._level.cycles
        best, best_score = arms[0], -math.inf
        for arm, tally in self._tallies.items():
            weight = _PRIOR_WEIGHT + tally.cycles
            prior = self._policy.advantage(arm, alone=self._alone) * level
            score = (prior * _PRIOR_WEIGHT + tally.accepted) / weight + doubt / math.sqrt(weight)
            if score > best_score:
                best, best_score = arm, score
        return best

    def observe(self, arm: Arm, accepted: int) -> None:
        """What came of a cycle: ``accepted`` of its proposed tokens. An arm that is no choice here teaches nothing."""
        if arm not in self._tallies:
            return
        self._cycles += 1
        for tally in self._tallies.values():
            tally.fade(_MEMORY)
        self._tallies[arm].add(accepted)
        level = self._level.accepted / self._level.cycles
        self._level.add(accepted / self._policy.advantage(arm, alone=self._alone))
        self._policy.observe(arm, accepted / max(level, _LEAST_LEVEL))
