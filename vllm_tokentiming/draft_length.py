"""How many tokens is it worth drafting, and is it worth drafting at all?

A cycle takes a verify pass v(n) of n tokens and some draft steps of c seconds. One more step pays while the tokens that
it is expected to bring are more than what the server makes in that time anyway: Σ reach · α > (c + dv/dn) · rate,
summed over the requests that draft together (the marginal rule for a ratio of expectations). *reach* is the chance
that the verifier accepts all that a request has drafted so far; acceptance is learned by the draft's own confidence.
Speculation as a whole is a choice between two ways to run, by batch size, of which the loser is tried now and then.

Exactness: everything here is either from the past or a draft law's shape, and is decided before the token of that law
is drawn (docs/losslessness.md, "When drafting ends early").

Owns: :class:`DraftLength` the server's estimates, :class:`RequestAcceptance` one request's. Not shared between threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_BUCKETS: Final = 10
"""Of the draft's confidence, the largest probability of its law."""
_PRIOR_STEPS: Final = 20.0
_MEMORY: Final = 0.999
_REQUEST_PRIOR: Final = 4.0
_TIME_MEMORY: Final = 0.95
_OLD_EVIDENCE: Final = 0.2
FIXED_WORTH: Final = 1.5
"""Of a draft, in tokens, where it is not known or must not be."""
_LEAST_WORTH: Final = 0.3
_OUTLIER: Final = 4.0
"""A cycle that took so many times the usual waited for something else, such as a request to arrive."""
_FIXED_THRESHOLD: Final = 0.2
"""Least reach · α for another step where it must not depend on times or on other requests."""
_CATCHING_UP: Final = 32
"""Tokens that a draft reads at most in a cycle whose time tells about others."""
_COLD_CYCLES: Final = 2
"""Of speculation at a batch size: what they find uncompiled or unread makes them slow, and the rest should not pay."""
_FIRST_PROBE: Final = 8
_PROBE_EVERY: Final = 64
_FIRST_SPECULATIVE_PROBE: Final = 16
"""After speculation has lost: sooner, for it is the likelier one to have been misjudged on little evidence."""
_LONGEST_PROBE_INTERVAL: Final = 512
_SPECULATIVE_PROBE: Final = 4
"""Cycles of speculation in a row that try it where it has lost; the first one has to read what the draft missed."""


def prior_acceptance(bucket: int) -> float:
    """Chance that a token of this confidence is accepted, before anything was seen: a guess that is soon overruled."""
    return 0.15 + 0.7 * (bucket + 0.5) / _BUCKETS


class _Acceptance:
    """Chance of acceptance by confidence, from decayed counts."""

    def __init__(self) -> None:
        self._seen = [_PRIOR_STEPS] * _BUCKETS
        self._accepted = [prior_acceptance(bucket) * _PRIOR_STEPS for bucket in range(_BUCKETS)]

    def of(self, bucket: int) -> float:
        return self._accepted[bucket] / self._seen[bucket]

    @property
    def mean(self) -> float:
        return sum(self._accepted) / sum(self._seen)

    def add(self, bucket: int, *, accepted: bool) -> None:
        self._seen[bucket] = self._seen[bucket] * _MEMORY + 1.0
        self._accepted[bucket] = self._accepted[bucket] * _MEMORY + accepted


class RequestAcceptance:
    """How one request's drafts fare beside the server's average.

    Args:
        alone: nothing may depend on other requests or on times (it has a seed): the prior stays what it is.
    """

    __slots__ = ("_accepted", "_expected", "alone")

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
        self._accepted = self._expected = _REQUEST_PRIOR

    @property
    def factor(self) -> float:
        """Its acceptance over the average one at the same confidence."""
        return self._accepted / self._expected

    def add(self, *, accepted: bool, expected: float) -> None:
        """One drafted token that the verifier judged."""
        self._accepted = self._accepted * 0.98 + accepted + 0.02 * _REQUEST_PRIOR
        self._expected = self._expected * 0.98 + expected + 0.02 * _REQUEST_PRIOR


@dataclass(slots=True)
class _Rate:
    """So many things in so many seconds, over recent cycles."""

    count: float = 0.0
    seconds: float = 0.0

    def add(self, count: float, seconds: float) -> None:
        self.count = self.count * _TIME_MEMORY + count
        self.seconds = self.seconds * _TIME_MEMORY + seconds

    def fade(self, share: float) -> None:
        self.count *= share
        self.seconds *= share

    @property
    def value(self) -> float:
        return self.count / self.seconds if self.seconds > 0.0 else 0.0


class _VerifyTime:
    """Seconds of a verify pass against the tokens in it: decayed least squares, slope ≥ 0."""

    def __init__(self) -> None:
        self._sums: tuple[float, ...] = (0.0,) * 5  # weight, n, v, n², n·v

    def add(self, tokens: int, seconds: float) -> None:
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(old * _TIME_MEMORY + each for old, each in zip(self._sums, new, strict=True))

    @property
    def slope(self) -> float:
        weight, n, v, nn, nv = self._sums
        spread = weight * nn - n * n
        # Without some spread in n, noise in v would make any slope.
        return max(0.0, (weight * nv - n * v) / spread) if spread > 0.05 * nn * weight else 0.0


class _Mode:
    """Speculate or not, at one batch size."""

    def __init__(self) -> None:
        self.rates = {True: _Rate(), False: _Rate()}
        self.verify = _VerifyTime()
        self.drafting = _Rate()
        """Draft steps."""
        self.drafts = _Rate()
        """Cycles that drafted, by the time that drafting took."""
        self._cold = _COLD_CYCLES
        self._until_probe = _FIRST_PROBE
        self._interval = _PROBE_EVERY
        self._probing = 0
        self._was_better = True

    def is_cold(self) -> bool:
        """Whether this cycle of speculation is one of the first; each call counts one."""
        self._cold -= 1
        return self._cold >= 0

    def better(self) -> bool:
        """Whether speculation is faster, as far as is known; it is the first guess."""
        plain = self.rates[False].value
        return plain == 0.0 or self.rates[True].value >= plain

    def hurry(self) -> None:
        """Another request came, which may be of another kind. The surer the choice is, the less that counts."""
        self._until_probe = min(self._until_probe, self._interval // 8)

    def choose(self) -> bool:
        better = self.better()
        if self._probing:
            self._probing -= 1
            return True
        if better != self._was_better:
            interval = _PROBE_EVERY if better else _FIRST_SPECULATIVE_PROBE
            self._was_better, self._interval, self._until_probe = better, interval, interval
        self._until_probe -= 1
        if self._until_probe > 0:
            return better
        # The longer one way has won, the more rarely the other is tried.
        self._until_probe = self._interval
        self._interval = min(2 * self._interval, _LONGEST_PROBE_INTERVAL)
        self._probing = 0 if better else _SPECULATIVE_PROBE - 1
        # What it was like long ago counts for little.
        self.rates[not better].fade(_OLD_EVIDENCE)
        return not better


@dataclass(slots=True, eq=False)
class DraftRow:
    """One request's part in a cycle's decisions.

    Attributes:
        acceptance: the request's own.
        max_steps: draft steps at most, 0 for a request that only warms its cache.
        sampled: whether its tokens are drawn from laws; greedy ones are judged apart.
        reach: chance that all that it has drafted is accepted.
        confidences: buckets of the tokens that are to be proposed, in order.
        stopped: whether it drafts no further token.
    """

    acceptance: RequestAcceptance
    max_steps: int
    sampled: bool
    reach: float = 1.0
    confidences: list[int] = field(default_factory=list)
    stopped: bool = False


class Pace:
    """Says, law by law, whether a cycle goes on drafting. See :meth:`DraftLength.pace`."""

    def __init__(
        self,
        owner: DraftLength,
        rows: Sequence[DraftRow],
        *,
        step_cost: float,
        token_cost: float,
        missing_tokens: int,
    ) -> None:
        self.steps = 0
        self.missing_tokens = missing_tokens
        self._owner = owner
        self._rows = rows
        self._step_cost = step_cost
        self._token_cost = token_cost

    def more(self, indices: Sequence[int], confidence: Sequence[float]) -> bool:
        """Take note of the laws of one step; whether another step is worth its time.

        Called before tokens are drawn from these laws, so that a stop does not look at drawn tokens.

        Args:
            indices: requests that draft a token now, by their place in the batch.
            confidence: the largest probability of each one's law.
        """
        self.steps += 1
        worth, must = 0.0, False
        for index, value in zip(indices, confidence, strict=True):
            row = self._rows[index]
            if row.stopped:
                continue
            bucket = 0 if math.isnan(value) else min(int(value * _BUCKETS), _BUCKETS - 1)
            row.confidences.append(bucket)
            chance, following = self._owner.chances(row, bucket)
            row.reach *= chance
            gain = row.reach * following
            alone = row.acceptance.alone
            if len(row.confidences) >= row.max_steps or gain <= (_FIXED_THRESHOLD if alone else self._token_cost):
                row.stopped = True
            elif alone:
                must = True
            else:
                worth += gain
        return must or worth > self._step_cost


@dataclass(slots=True)
class _Cycle:
    """A cycle from one proposal to the next."""

    began: float
    lengths: dict[str, int]
    speculates: bool = True
    steps: int = 0
    tells: bool = True
    draft_seconds: float = 0.0
    num_proposed: int = 0


class DraftLength:
    """Learns what drafting costs and brings, and decides how much of it to do.

    Args:
        timed: False leaves out all that depends on clocks, and always drafts: for several ranks that must decide alike.
    """

    def __init__(self, *, timed: bool = True) -> None:
        self._timed = timed
        self._acceptance = {True: _Acceptance(), False: _Acceptance()}
        self._prior = _Acceptance()
        self._modes: dict[int, _Mode] = {}
        self._cycle = _Cycle(began=0.0, lengths={})
        self._pace: Pace | None = None
        self._drafted = _Rate()
        """Accepted tokens, by drafted proposals."""

    def begin_cycle(self, now: float, lengths: dict[str, int]) -> None:
        """The verifier is done with the last proposals, whose cycle thus ends.

        Args:
            now: seconds, of any steady clock.
            lengths: known tokens of each request of the batch.
        """
        last, self._cycle = self._cycle, _Cycle(began=now, lengths=lengths)
        if not self._timed:
            return
        if not lengths.keys() <= last.lengths.keys():
            self._mode(len(lengths)).hurry()
        gains = [length - last.lengths.get(request_id, length) for request_id, length in lengths.items()]
        # With a request that came, went or was read in between, the time was not that of verifying alone.
        if last.tells and gains and len(lengths) == len(last.lengths) and min(gains) > 0:
            self._observe(last, tokens=sum(gains), seconds=now - last.began)

    def end_cycle(self, now: float, *, num_proposed: int) -> None:
        """The proposals of this cycle are made."""
        cycle = self._cycle
        cycle.draft_seconds, cycle.num_proposed = now - cycle.began, num_proposed
        if self._pace is not None:
            cycle.steps = self._pace.steps
            cycle.tells = self._pace.missing_tokens <= _CATCHING_UP
            self._pace = None

    def speculates(self) -> bool:
        """Whether to draft in this cycle."""
        self._cycle.speculates = not self._timed or self._mode(len(self._cycle.lengths)).choose()
        return self._cycle.speculates

    def pace(self, rows: Sequence[DraftRow], *, missing_tokens: int) -> Pace:
        """The decisions of one cycle.

        Args:
            rows: the requests that draft.
            missing_tokens: most that the draft has to read before it drafts.
        """
        mode = self._mode(len(self._cycle.lengths))
        rate, steps_per_second = mode.rates[True].value, mode.drafting.value
        self._pace = Pace(
            self,
            rows,
            step_cost=rate / steps_per_second if steps_per_second else 0.0,
            token_cost=rate * mode.verify.slope if self._timed else _FIXED_THRESHOLD,
            missing_tokens=missing_tokens,
        )
        return self._pace

    def worth(self, acceptance: RequestAcceptance, *, speculates: bool) -> float:
        """Tokens that a draft of a request brings in a cycle, less those that the server makes in the time it takes.

        Args:
            acceptance: the request's own.
            speculates: whether it would draft; else what the least proposal must bring.
        """
        if acceptance.alone:
            return FIXED_WORTH
        if not speculates:
            return _LEAST_WORTH
        mode = self._mode(len(self._cycle.lengths))
        if not mode.drafts.seconds or not self._drafted.seconds:
            return FIXED_WORTH
        cost = mode.rates[True].value / mode.drafts.value / len(self._cycle.lengths)
        return max(self._drafted.value * acceptance.factor - cost, _LEAST_WORTH)

    def chances(self, row: DraftRow, bucket: int) -> tuple[float, float]:
        """Chance that a token of this confidence is accepted, and that of an average next one."""
        if row.acceptance.alone:
            return self._prior.of(bucket), self._prior.mean
        learned, factor = self._acceptance[row.sampled], row.acceptance.factor
        return min(0.99, learned.of(bucket) * factor), min(0.99, learned.mean * factor)

    def observe_row(self, row: DraftRow, *, accepted_tokens: int, num_proposed: int) -> None:
        """What the verifier made of a proposal.

        Args:
            row: as the cycle left it.
            accepted_tokens: accepted proxy tokens; their share is taken for that of the drafted tokens.
            num_proposed: proxy tokens, one at least.
        """
        self._drafted.add(accepted_tokens, 1.0)
        accepted = math.floor(accepted_tokens / num_proposed * len(row.confidences) + 1e-9)
        for place, bucket in enumerate(row.confidences[: accepted + 1]):
            learned = self._acceptance[row.sampled]
            row.acceptance.add(accepted=place < accepted, expected=learned.of(bucket))
            learned.add(bucket, accepted=place < accepted)

    def _observe(self, cycle: _Cycle, *, tokens: int, seconds: float) -> None:
        batch = len(cycle.lengths)
        mode = self._mode(batch)
        if cycle.speculates and mode.is_cold():
            return
        rate = mode.rates[cycle.speculates]
        if rate.value > 0.0 and seconds * rate.value > _OUTLIER * tokens:
            return
        rate.add(tokens, seconds)
        mode.verify.add(batch + cycle.num_proposed, seconds - cycle.draft_seconds)
        if cycle.steps:
            mode.drafting.add(cycle.steps, cycle.draft_seconds)
            mode.drafts.add(1.0, cycle.draft_seconds)

    def _mode(self, batch: int) -> _Mode:
        # Sizes that differ by less than a factor of two cost about the same per request.
        return self._modes.setdefault(max(batch, 1).bit_length(), _Mode())
