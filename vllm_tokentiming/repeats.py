"""What followed the last time the text went like this? Proposals from a request's own text, for free.

The longest suffix of the text that stands in it once more is looked up, as prompt-lookup decoding does (Saxena, 2023;
vLLM's ``ngram``), but in an index that grows with the text, so a cycle costs what its new tokens cost and not a scan;
and the length of the match is known, on which the chance that the repeat goes on depends.

Exactness: the proposal is a function of committed tokens alone, so a point mass is its law.

Owns: :class:`RequestRepeats` one request's index, :class:`RepeatAcceptance` what the server learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

SHORTEST_MATCH: Final = 3
_LONGEST_MATCH: Final = 32
_LENGTH_BUCKETS: Final = (3, 4, 5, 7, 10, 16)
"""Match lengths from which on a chance is learned apart."""
_FIRST_CHANCE: Final = (0.4, 0.5, 0.6, 0.7, 0.8, 0.88)
_PRIOR_TOKENS: Final = 20.0
_MEMORY: Final = 0.999


class Repeat(NamedTuple):
    """A stretch of the text that may come again.

    Attributes:
        ids_in_target_vocab: what followed.
        match_length: so many tokens before it are the last ones of the text.
    """

    ids_in_target_vocab: list[int]
    match_length: int


class RequestRepeats:
    """An index of one request's text, in the target's vocabulary."""

    __slots__ = ("_ends", "_ids")

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of the text so far."""
        return len(self._ids)

    def commit(self, ids_in_target_vocab: Sequence[int]) -> None:
        """Append text."""
        ids, ends = self._ids, self._ends
        first = max(SHORTEST_MATCH, len(ids))
        ids += ids_in_target_vocab
        # A suffix is entered when something follows it; the latest occurrence stands.
        for end in range(first, len(ids)):
            ends[ids[end - 3], ids[end - 2], ids[end - 1]] = end

    def find(self, most: int) -> Repeat | None:
        """At most ``most`` tokens that followed the last occurrence of the text's end; None where there was none."""
        ids = self._ids
        end = self._ends.get(tuple(ids[-SHORTEST_MATCH:]))
        if end is None or most <= 0:
            return None
        length, last = SHORTEST_MATCH, len(ids)
        limit = min(_LONGEST_MATCH, end)
        while length < limit and ids[end - 1 - length] == ids[last - 1 - length]:
            length += 1
        following = ids[end : end + most]
        # The occurrence may overlap the end: then the text is periodic, and goes on with itself.
        while len(following) < most:
            following.append(following[len(following) - (last - end)])
        return Repeat(following, length)


class RepeatAcceptance:
    """Chance that a repeated token is accepted, by the length of the match."""

    def __init__(self) -> None:
        self._seen = [_PRIOR_TOKENS] * len(_LENGTH_BUCKETS)
        self._accepted = [_PRIOR_TOKENS * chance for chance in _FIRST_CHANCE]

    def expected(self, repeat: Repeat, *, alone: bool) -> float:
        """Tokens of a repeat that are expected to be accepted; ``alone``: as if nothing had been seen yet."""
        bucket = _bucket(repeat.match_length)
        chance = _FIRST_CHANCE[bucket] if alone else self._accepted[bucket] / self._seen[bucket]
        return chance * (1.0 - chance ** len(repeat.ids_in_target_vocab)) / max(1.0 - chance, 1e-9)

    def observe(self, repeat: Repeat, accepted: int) -> None:
        """What the verifier accepted of a repeat."""
        bucket = _bucket(repeat.match_length)
        judged = min(accepted + 1, len(repeat.ids_in_target_vocab))
        self._seen[bucket] = self._seen[bucket] * _MEMORY + judged
        self._accepted[bucket] = self._accepted[bucket] * _MEMORY + accepted


def _bucket(match_length: int) -> int:
    return sum(1 for least in _LENGTH_BUCKETS[1:] if match_length >= least)
