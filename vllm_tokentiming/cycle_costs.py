"""What does a cycle cost and bring at one batch size, and does speculation pay there?

Speculation as a whole is a choice between two ways to run, of which the loser is tried now and then. Machines speed up
and slow down by more than the two ways differ, so times are only compared between neighbouring cycles: a cycle that
tries the other way is held against those just before it. Tokens need no such care. What trying costs is bounded: the
further apart the two ways are, the more rarely the worse one is tried; where they are close it is tried often.

Owns: :class:`CycleCosts` the estimates of one batch size, :class:`RepeatPrice` those of repeats there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_TIME_MEMORY: Final = 0.95
_OLD_EVIDENCE: Final = 0.4
_CONFIRMED: Final = 2
"""Cycles without speculation that must say that it loses, before it is believed."""
_MOST_CONFIRMING: Final = 8
"""Such cycles in a row, at most: where requests come and go in each of them, none tells anything."""
_RECENT_SHARE: Final = 0.25
_OUTLIER: Final = 4.0
"""A cycle that took so many times the usual waited for something else, such as a request to arrive."""
_COLD_CYCLES: Final = 2
"""Of speculation at a batch size: what they find uncompiled or unread makes them slow, and the rest should not pay."""
_FIRST_PROBE: Final = 8
"""Cycles; doubled from try to try."""
_FIRST_EVIDENCE: Final = 6.0
"""Cycles of a request after which the first probe is due: many requests show sooner what speculation brings."""
_FIRST_SPECULATIVE_PROBE: Final = 16
"""After speculation has lost: sooner, for it is the likelier one to have been misjudged on little evidence."""
_LONGEST_PROBE_INTERVAL: Final = 512
_SPECULATIVE_PROBE: Final = 4
"""Cycles of speculation in a row that try it where it has lost; the first one has to read what the draft missed."""
_RETURN: Final = 1.05
"""How much faster speculation must be where it has lost: the draft has to read what it missed, and where both ways are
level it would do so again and again."""
_PROBE_LOSS: Final = 0.01
"""Share of the time that trying the worse way may take, at most."""
_BARE_EVERY: Final = 64
"""Passes that verify repeats, until one is taken to hold them against."""
_INHERITED: Final = 0.2
"""What was learned at one batch size counts for so much at another."""
_LEAST_PRICED: Final = 0.3
_PRICE_MEMORY: Final = 0.99
_AVERAGE_MEMORY: Final = 0.998
_READING_MEMORY: Final = 0.995
_READING_PRIOR: Final = 100.0
"""Cycles: what a draft reads of the first prompts is read, and says little of how often that is needed."""
_NEW_REQUEST_WEIGHT: Final = 4.0
"""Cycles that a new request is taken for an average one."""


@dataclass(slots=True)
class Rate:
    """So many things in so many seconds, or for so many of whatever stands in their place, over recent cycles."""

    count: float = 0.0
    seconds: float = 0.0
    memory: float = _TIME_MEMORY

    def add(self, count: float, seconds: float) -> None:
        """Take note of one cycle."""
        self.count = self.count * self.memory + count
        self.seconds = self.seconds * self.memory + seconds

    def faded(self, share: float) -> Rate:
        """The same, for which what was noted counts for less."""
        return Rate(count=self.count * share, seconds=self.seconds * share, memory=self.memory)

    @property
    def value(self) -> float:
        """Things a second; 0 before anything was noted."""
        return self.count / self.seconds if self.seconds > 0.0 else 0.0


class VerifyTime:
    """Seconds of a verify pass against the tokens in it: decayed least squares, slope ≥ 0."""

    def __init__(self, sums: tuple[float, ...] = (0.0,) * 5) -> None:
        self._sums = sums  # weight, n, v, n², n·v

    def faded(self, share: float) -> VerifyTime:
        """The same, for which what was noted counts for less."""
        return VerifyTime(tuple(share * each for each in self._sums))

    def add(self, tokens: int, seconds: float) -> None:
        """Take note of one pass."""
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(old * _TIME_MEMORY + each for old, each in zip(self._sums, new, strict=True))

    @property
    def weight(self) -> float:
        """Passes that the estimates rest on."""
        return self._sums[0]

    @property
    def slope(self) -> float:
        """Seconds of one more token."""
        weight, n, v, nn, nv = self._sums
        spread = weight * nn - n * n
        # Without some spread in n, noise in v would make any slope.
        return max(0.0, (weight * nv - n * v) / spread) if spread > 0.05 * nn * weight else 0.0

    def of(self, tokens: int) -> float:
        """Seconds of a pass with so many tokens; something must have been noted."""
        weight, n, v, _, _ = self._sums
        return (v + self.slope * (tokens * weight - n)) / weight


class RepeatPrice:
    """What it costs to verify repeats where nothing is drafted.

    A pass over one more token than a kernel's tile holds can take a third longer, and then many more cost nothing: the
    price has a part that the first token pays. It is held against the passes just before that verified nothing.
    """

    def __init__(self) -> None:
        self._bare: float | None = None
        self._since_bare = 0
        self._longer = VerifyTime()

    def add(self, tokens: int, seconds: float) -> None:
        """Take note of a cycle that drafted nothing and proposed so many tokens."""
        if not tokens:
            self._bare = seconds if self._bare is None else self._bare + _RECENT_SHARE * (seconds - self._bare)
            self._since_bare = 0
        elif self._bare is not None:
            self._longer.add(tokens, seconds / self._bare - 1.0)
            self._since_bare += 1

    def pays(self, tokens: int, expected: float) -> bool:
        """Whether so many proposed tokens are worth verifying.

        Args:
            tokens: of all requests.
            expected: how many of them are accepted, for each request of the batch.
        """
        if self._bare is None or self._since_bare >= _BARE_EVERY:
            return False  # a pass to hold others against
        if self._longer.weight < _LEAST_PRICED or expected > self._longer.of(tokens):
            return True
        # Prices that lead to no purchase grow old.
        self._longer = self._longer.faded(_PRICE_MEMORY)
        return False


class CycleCosts:
    """Estimates of one batch size, and the choice that follows from them."""

    def __init__(self) -> None:
        self.rate = Rate()
        """Tokens of each request, of cycles with speculation: what is alike at another batch size."""
        self.verify = VerifyTime()
        self.repeats = RepeatPrice()
        self.drafting = Rate()
        """Draft steps."""
        self.drafts = Rate()
        """Cycles that drafted, by the time that drafting took."""
        self._gain = Rate()
        """Tokens that a cycle with speculation makes for each request."""
        self._plain_gain = Rate()
        """And one without: more than one where it proposes repeats."""
        self._average_gain = Rate(memory=_AVERAGE_MEMORY)
        self._slowdown = Rate()
        """Seconds of cycles with speculation, over those of neighbours without."""
        self._reading = Rate(seconds=_READING_PRIOR, memory=_READING_MEMORY)
        """Seconds in which the draft read prompts, over cycles with speculation: no cycle that is compared has them."""
        self._recent: dict[bool, float] = {}
        """Seconds of the last cycles of each way."""
        self._pairs = self._confirming = 0
        self._cold = _COLD_CYCLES
        self._interval = _FIRST_PROBE
        self._wait, self._waited = _FIRST_PROBE, 0
        """Cycles between the last probe and the next one, and how many of these have passed."""
        self._probing = 0
        self._lost = 0.0
        """Of the last try: tokens for each request that the other way would have made in the time, less those made."""
        self._was_better = True

    def of_another_batch(self, *, larger: bool) -> CycleCosts:
        """What is known of a batch size before it was seen: about the same times, until it shows its own.

        Args:
            larger: verifying costs more there, so what loses here loses there too.
        """
        costs = CycleCosts()
        costs.rate, costs.verify = self.rate.faded(_INHERITED), self.verify.faded(_INHERITED)
        costs.drafting, costs.drafts = self.drafting.faded(_INHERITED), self.drafts.faded(_INHERITED)
        costs._average_gain = self._average_gain.faded(_INHERITED)
        if larger and not self.better():
            costs._gain, costs._slowdown = self._gain.faded(_INHERITED), self._slowdown.faded(_INHERITED)
            costs._plain_gain = self._plain_gain.faded(_INHERITED)
            costs._pairs = _CONFIRMED
        return costs

    def better(self) -> bool:
        """Whether speculation is faster, as far as is known; it is the first guess."""
        margin = 1.0 if self._was_better else _RETURN
        plain = self._recent.get(False)
        reading = self._reading.value / plain if plain else 0.0
        level = (self._slowdown.value + reading) * self._tokens_of_a_pass
        return self._slowdown.seconds == 0.0 or self._gain.value >= margin * level

    def greet(self, batch: int) -> None:
        """Another request came. Until it shows what it is like, it is an average one, which may change the choice.

        Args:
            batch: requests, this one included; the more, the less it changes.
        """
        if self._average_gain.seconds:
            shown = self._gain.faded(1.0 - 1.0 / batch)
            self._gain = Rate(
                count=shown.count + self._average_gain.value * _NEW_REQUEST_WEIGHT,
                seconds=shown.seconds + _NEW_REQUEST_WEIGHT,
            )
        if not self._was_better:
            # The surer the choice is, the less one request counts.
            self._wait = min(self._wait, self._waited + self._interval * batch // 8)

    def choose(self) -> tuple[bool, bool]:
        """Whether this cycle speculates, and whether that is to try it only."""
        better = self.better()
        if self._probing:
            self._probing -= 1
            return True, True
        if not better and self._pairs < _CONFIRMED and self._confirming < _MOST_CONFIRMING:
            self._confirming += 1
            return False, True
        if better != self._was_better:
            self._was_better, self._lost = better, 0.0
            self._interval = self._wait = _FIRST_PROBE if better else _FIRST_SPECULATIVE_PROBE
            self._waited = 0
        self._waited += 1
        if self._waited < self._wait or self._lost > _PROBE_LOSS * self._waited:
            return better, False
        # The longer one way has won, the more rarely the other is tried.
        self._wait, self._waited, self._lost = self._interval, 0, 0.0
        self._interval = min(2 * self._interval, _LONGEST_PROBE_INTERVAL)
        # What it was like long ago counts for less.
        self._slowdown = self._slowdown.faded(_OLD_EVIDENCE)
        if better:
            self._pairs = self._confirming = 0
        else:
            self._gain = self._gain.faded(_OLD_EVIDENCE)
            self._probing = _SPECULATIVE_PROBE - 1
        return not better, True

    @property
    def _tokens_of_a_pass(self) -> float:
        return max(1.0, self._plain_gain.value)

    def is_odd(self, *, seconds: float, speculates: bool) -> bool:
        """Whether a cycle's time tells nothing: one of the first, or one that waited for something else."""
        if speculates and self._cold > 0:
            self._cold -= 1
            return True
        usual = self._recent.get(speculates)
        if usual is None or seconds <= _OUTLIER * usual:
            return False
        # Once; if it goes on like this, it is the usual.
        del self._recent[speculates]
        return True

    def compare(self, *, tokens: int, batch: int, seconds: float, speculates: bool, is_probe: bool) -> None:
        """Take note of what a cycle made in its time."""
        if not speculates:
            self._plain_gain.add(tokens, batch)
        else:
            self._gain.add(tokens, batch)
            self._average_gain.add(tokens, batch)
            if self._slowdown.seconds == 0.0 and self._gain.seconds >= _FIRST_EVIDENCE:
                self._wait = 0
        other = self._recent.get(not speculates)
        if is_probe and other is not None:
            self._pairs += 1
            self._slowdown.add(*((seconds, other) if speculates else (other, seconds)))
            others_tokens = self._tokens_of_a_pass if speculates else self._gain.value
            self._lost += seconds / other * others_tokens - tokens / batch
        usual = self._recent.get(speculates, seconds)
        self._recent[speculates] = usual + _RECENT_SHARE * (seconds - usual)

    def read(self, seconds: float) -> None:
        """Take note of a cycle with speculation, not one that tries it: how long its draft read prompts, then drafted.

        Small beside the answers of one request, but with many at once each prompt holds up all the others.
        """
        self._reading.add(seconds, 1.0)

    def lose(self, *, tokens: int, batch: int, seconds: float) -> None:
        """Take note of a cycle that tried speculation and read what the draft had missed.

        Its time says nothing of either way, but it was lost, so the next try has to be the further away.
        """
        plain = self._recent.get(False)
        if plain is not None:
            self._lost += seconds / plain * self._tokens_of_a_pass - tokens / batch
