"""How many tokens is it worth drafting, and is it worth drafting at all?

A cycle takes a verify pass v(n) of n tokens and some draft steps of c seconds. One more step pays while the tokens that
it is expected to bring are more than what the server makes in that time anyway: Σ reach · α > (c + dv/dn) · rate,
summed over the requests that draft together (the marginal rule for a ratio of expectations). *reach* is the chance
that the verifier accepts all that a request has drafted so far; acceptance is learned by the draft's own confidence.
Whether to speculate at all is the choice of ``cycle_costs``, by batch size.

Exactness: everything here is either from the past or a draft law's shape, and is decided before the token of that law
is drawn (docs/losslessness.md, "When drafting ends early").

Owns: :class:`AdaptiveLength` the server's estimates. Not shared between threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vllm_tokentiming.cycle_costs import CycleCosts, Rate
from vllm_tokentiming.draft_length import FIXED_THRESHOLD, FIXED_WORTH, DraftRow, RequestAcceptance

_BUCKETS: Final = 10
"""Of the draft's confidence, the largest probability of its law."""
_PRIOR_STEPS: Final = 20.0
_MEMORY: Final = 0.999
_LEAST_WORTH: Final = 0.3
_LEAST_CHANCE: Final = 0.05
"""Of a token that costs nothing to propose: to verify it takes 1 to 4 % of a pass, which noise may hide."""
_MANY: Final = 4
"""Requests whose repeats average out."""
_CATCHING_UP: Final = 32
"""Tokens that a draft reads at most in a cycle whose time tells about others."""


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


class Pace:
    """Says, law by law, whether a cycle goes on drafting. See :meth:`AdaptiveLength.pace`."""

    def __init__(
        self,
        owner: AdaptiveLength,
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
            if len(row.confidences) >= row.max_steps or gain <= (FIXED_THRESHOLD if alone else self._token_cost):
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
    samples: bool = False
    speculates: bool = True
    is_probe: bool = False
    steps: int = 0
    tells: bool = True
    draft_seconds: float = 0.0
    num_proposed: int = 0


class AdaptiveLength:
    """Learns what drafting costs and brings, and decides how much of it to do: a ``DraftLength``, which says the rest.

    Args:
        num_draft_tokens: draft steps in a cycle, at most.
        timed: False leaves out all that depends on clocks, and always drafts: for several ranks that must decide alike.
    """

    def __init__(self, *, num_draft_tokens: int, timed: bool = True) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._timed = timed
        self._acceptance = {True: _Acceptance(), False: _Acceptance()}
        self._prior = _Acceptance()
        self._costs: dict[tuple[int, bool], CycleCosts] = {}
        self._cycle = _Cycle(began=0.0, lengths={})
        self._pace: Pace | None = None
        self._drafted = Rate()
        """Accepted tokens, by drafted proposals."""

    def begin_cycle(self, now: float, lengths: dict[str, int], *, samples: bool = False) -> None:
        """Learn from the cycle that ends here. Sampled ones are timed apart: greedy ones gain more, and cost less."""
        last, self._cycle = self._cycle, _Cycle(began=now, lengths=lengths, samples=samples)
        if not self._timed:
            return
        if not lengths.keys() <= last.lengths.keys():
            self._costs_of(self._cycle).greet(len(lengths))
        gains = [length - last.lengths.get(request_id, length) for request_id, length in lengths.items()]
        # With a request that came, went or was read in between, the time was not that of verifying alone.
        if gains and len(lengths) == len(last.lengths) and min(gains) > 0:
            if last.tells:
                self._observe(last, tokens=sum(gains), seconds=now - last.began)
            elif last.is_probe:
                self._costs_of(last).lose(tokens=sum(gains), batch=len(lengths), seconds=now - last.began)

    def end_cycle(self, now: float, *, num_proposed: int) -> None:
        """The proposals of this cycle are made."""
        cycle = self._cycle
        cycle.draft_seconds, cycle.num_proposed = now - cycle.began, num_proposed
        if self._pace is not None:
            cycle.steps = self._pace.steps
            cycle.tells = self._pace.missing_tokens <= _CATCHING_UP
            self._pace = None
            if self._timed and cycle.speculates and not cycle.is_probe:
                self._costs_of(cycle).read(0.0 if cycle.tells else cycle.draft_seconds)

    def speculates(self) -> bool:
        """Whether to draft in this cycle."""
        cycle = self._cycle
        if self._timed:
            cycle.speculates, cycle.is_probe = self._costs_of(cycle).choose()
        return cycle.speculates

    def most_steps(self, max_proposal: int) -> int:
        """None that could not be proposed."""
        return min(self._num_draft_tokens, max_proposal)

    def pace(self, rows: Sequence[DraftRow], *, missing_tokens: int) -> Pace:
        """Weighs each step against what the server makes in its time."""
        costs = self._costs_of(self._cycle)
        steps_per_second = costs.drafting.value
        self._pace = Pace(
            self,
            rows,
            step_cost=self._rate / steps_per_second if steps_per_second else 0.0,
            token_cost=self._token_cost(),
            missing_tokens=missing_tokens,
        )
        return self._pace

    def steps_to_propose(self, row: DraftRow) -> int:
        """Those that the pace asked for: an engine may have drafted on."""
        return len(row.confidences)

    def worth(self, acceptance: RequestAcceptance, *, speculates: bool) -> float:
        """By what drafts brought and took; for a request on its own a guess."""
        if acceptance.alone:
            return FIXED_WORTH
        if not speculates:
            return _LEAST_WORTH
        costs = self._costs_of(self._cycle)
        if not costs.drafts.seconds or not self._drafted.seconds:
            return FIXED_WORTH
        cost = costs.rate.value / costs.drafts.value
        return max(self._drafted.value * acceptance.factor - cost, _LEAST_WORTH)

    def repeats_pay(self, *, tokens: int, expected: float) -> bool:
        """By the price of verifying them."""
        if not self._timed:
            return True
        return self._costs_of(self._cycle).repeats.pays(tokens, expected / max(len(self._cycle.lengths), 1))

    def chances(self, row: DraftRow, bucket: int) -> tuple[float, float]:
        """Chance that a token of this confidence is accepted, and that of an average next one."""
        if row.acceptance.alone:
            return self._prior.of(bucket), self._prior.mean
        learned, factor = self._acceptance[row.sampled], row.acceptance.factor
        return min(0.99, learned.of(bucket) * factor), min(0.99, learned.mean * factor)

    def least_chance(self, row: DraftRow) -> float:
        """What verifying one more token costs, if that can be told from nothing."""
        return FIXED_THRESHOLD if row.acceptance.alone else max(self._token_cost(), _LEAST_CHANCE)

    def observe_row(self, row: DraftRow, *, accepted_tokens: int, num_proposed: int) -> None:
        """Learn by confidence; the share of accepted proxy tokens is taken for that of the drafted ones."""
        self._drafted.add(accepted_tokens, 1.0)
        accepted = math.floor(accepted_tokens / num_proposed * len(row.confidences) + 1e-9)
        for place, bucket in enumerate(row.confidences[: accepted + 1]):
            learned = self._acceptance[row.sampled]
            row.acceptance.add(accepted=place < accepted, expected=learned.of(bucket))
            learned.add(bucket, accepted=place < accepted)

    def _token_cost(self) -> float:
        """Tokens that the server makes in the time that verifying one more takes."""
        # Unknown costs must not invite the longest draft of all.
        known = self._timed and self._rate > 0.0
        return self._rate * self._costs_of(self._cycle).verify.slope if known else FIXED_THRESHOLD

    @property
    def _rate(self) -> float:
        """Tokens a second, of the whole batch."""
        return self._costs_of(self._cycle).rate.value * len(self._cycle.lengths)

    def _observe(self, cycle: _Cycle, *, tokens: int, seconds: float) -> None:
        batch = len(cycle.lengths)
        costs = self._costs_of(cycle)
        if costs.is_odd(seconds=seconds, speculates=cycle.speculates):
            return
        costs.verify.add(batch + cycle.num_proposed, seconds - cycle.draft_seconds)
        if cycle.speculates:
            costs.rate.add(tokens / batch, seconds)
        elif not cycle.steps:
            costs.repeats.add(cycle.num_proposed, seconds)
        if cycle.steps:
            costs.drafting.add(cycle.steps, cycle.draft_seconds)
            costs.drafts.add(1.0, cycle.draft_seconds)
        # Repeats come with either way, and of few requests they say nothing of drafts. Of many somebody always has one.
        if cycle.steps if cycle.speculates else (not cycle.num_proposed or batch >= _MANY):
            costs.compare(
                tokens=tokens, batch=batch, seconds=seconds, speculates=cycle.speculates, is_probe=cycle.is_probe
            )

    def _costs_of(self, cycle: _Cycle) -> CycleCosts:
        # Sizes that differ by less than a factor of two cost about the same per request.
        size, samples = max(len(cycle.lengths), 1).bit_length(), cycle.samples
        if (size, samples) not in self._costs:
            # Sampled requests gain less than greedy ones, so what loses for these loses for those too.
            known = [(bits, samples) for bits in range(size - 1, 0, -1)]
            known += [(bits, False) for bits in range(size, 0, -1)] if samples else []
            known += sorted(key for key in self._costs if key[0] > size)
            like = next((key for key in known if key in self._costs), None)
            self._costs[size, samples] = (
                CycleCosts() if like is None else self._costs[like].of_another_batch(larger=size >= like[0])
            )
        return self._costs[size, samples]
