"""What the pipeline asks before and after each cycle about how much to draft, and the answer that is always the same.

The answers that are learned are in ``adaptive_length``.

Owns: :class:`RequestAcceptance` one request's estimate, :class:`DraftRow` its part in one cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from vllm_tokentiming.engine.interface import StopRule

FIXED_WORTH: Final = 1.5
"""Of a draft, in tokens, where it is not known or must not be."""
FIXED_THRESHOLD: Final = 0.2
"""Least chance that a token is accepted for it to be worth a place, where times and other requests must not tell."""
_REQUEST_PRIOR: Final = 4.0


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


class DraftLength(Protocol):
    """Decides how much is drafted. One serves all requests, from one thread."""

    def begin_cycle(self, now: float, lengths: dict[str, int], *, samples: bool = False) -> None:
        """The verifier is done with the last proposals, whose cycle thus ends.

        Args:
            now: seconds, of any steady clock.
            lengths: known tokens of each request of the batch.
            samples: whether any of them is sampled.
        """

    def end_cycle(self, now: float, *, num_proposed: int) -> None:
        """The proposals of this cycle are made."""

    def speculates(self) -> bool:
        """Whether to draft in this cycle; asked once."""

    def most_steps(self, max_proposal: int) -> int:
        """Draft steps of a request that may propose so many tokens, at most."""

    def pace(self, rows: Sequence[DraftRow], *, missing_tokens: int) -> StopRule | None:
        """What ends this cycle's drafting before that; None: nothing does.

        Args:
            rows: the requests that draft.
            missing_tokens: most that the draft has to read before it drafts.
        """

    def steps_to_propose(self, row: DraftRow) -> int:
        """How many of a request's drafted tokens are to be proposed, at most."""

    def worth(self, acceptance: RequestAcceptance, *, speculates: bool) -> float:
        """Tokens that a draft of a request brings in a cycle, less those that the server makes in the time it takes.

        Args:
            acceptance: the request's own.
            speculates: whether it would draft; else what the least proposal must bring.
        """

    def repeats_pay(self, *, tokens: int, expected: float) -> bool:
        """Whether repeats are worth verifying in a cycle that drafts nothing.

        Args:
            tokens: that they propose, of all requests.
            expected: of these, how many are likely to be accepted.
        """

    def least_chance(self, row: DraftRow) -> float:
        """How likely a token that costs nothing to propose must be accepted for it to be worth verifying.

        Args:
            row: of the request whose draft it follows.
        """

    def observe_row(self, row: DraftRow, *, accepted_tokens: int, num_proposed: int) -> None:
        """What the verifier made of a proposal.

        Args:
            row: as the cycle left it.
            accepted_tokens: accepted proxy tokens.
            num_proposed: proxy tokens, one at least.
        """


class FixedLength:
    """Always the same number of draft steps (``adaptive_length: false``).

    Args:
        num_draft_tokens: that number.
    """

    def __init__(self, *, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens

    def begin_cycle(self, now: float, lengths: dict[str, int], *, samples: bool = False) -> None:
        """No cycle is timed."""

    def end_cycle(self, now: float, *, num_proposed: int) -> None:
        """Nor does it end."""

    def speculates(self) -> bool:
        """It always does."""
        return True

    def most_steps(self, max_proposal: int) -> int:
        """The same at the end of a request, too: only what is proposed is cut there."""
        return self._num_draft_tokens if max_proposal > 0 else 0

    def pace(self, rows: Sequence[DraftRow], *, missing_tokens: int) -> None:
        """Nothing ends a draft early."""

    def steps_to_propose(self, row: DraftRow) -> int:
        """All of them."""
        return row.max_steps

    def worth(self, acceptance: RequestAcceptance, *, speculates: bool) -> float:
        """A guess: nothing is learned here."""
        del acceptance, speculates
        return FIXED_WORTH

    def repeats_pay(self, *, tokens: int, expected: float) -> bool:
        """They do: they come with the drafts of others."""
        del tokens, expected
        return True

    def least_chance(self, row: DraftRow) -> float:
        """A guess, likewise."""
        del row
        return FIXED_THRESHOLD

    def observe_row(self, row: DraftRow, *, accepted_tokens: int, num_proposed: int) -> None:
        """Nothing is learned from it."""
