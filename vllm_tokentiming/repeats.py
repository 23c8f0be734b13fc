"""What followed the last time the text went like this? Proposals from a request's own text, for free.

The longest suffix of the text that stands in it once more is looked up, as prompt-lookup decoding does (Saxena, 2023;
vLLM's ``ngram``), but in an index that grows with the text, so a cycle costs what its new tokens cost and not a scan;
and the length of the match is known, on which the chance that the repeat goes on depends.

Also looked up is the text with a draft's proposal after it: what followed there is appended to the proposal.

Exactness: a repeat is a function of committed tokens, and of tokens proposed before it where it is appended to these;
so the law of each of its tokens, given what was revealed before, is a point mass (docs/losslessness.md, "Point masses
are always right").

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

    def find(self, most: int, *, after: Sequence[int] = ()) -> Repeat | None:
        """At most ``most`` tokens that followed the last occurrence of the text's end; None where there was none.

        Args:
            most: tokens.
            after: what may come next: the end that is looked up is that of the text with it.
        """
        known = len(self._ids)
        self._ids += after
        try:
            return self._find(most)
        finally:
            del self._ids[known:]

    def _find(self, most: int) -> Repeat | None:
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

    def chance(self, repeat: Repeat, *, alone: bool) -> float:
        """That of each of its tokens, those before it accepted; ``alone``: as if nothing had been seen yet."""
        bucket = _bucket(repeat.match_length)
        return _FIRST_CHANCE[bucket] if alone else self._accepted[bucket] / self._seen[bucket]

    def expected(self, repeat: Repeat, *, alone: bool) -> float:
        """Tokens of a repeat that are expected to be accepted; ``alone``: likewise."""
        chance = self.chance(repeat, alone=alone)
        return chance * (1.0 - chance ** len(repeat.ids_in_target_vocab)) / max(1.0 - chance, 1e-9)

    def worthwhile(self, repeat: Repeat, *, reach: float, least: float, alone: bool) -> Repeat | None:
        """As many of a repeat's tokens as are likely enough to be accepted, after others; None where none is.

        Args:
            repeat: what is to follow those.
            reach: chance that they are accepted.
            least: and that of each token of the repeat, at least.
            alone: as above.
        """
        chance, count = self.chance(repeat, alone=alone), 0
        while count < len(repeat.ids_in_target_vocab) and reach * chance > least:
            reach *= chance
            count += 1
        return Repeat(repeat.ids_in_target_vocab[:count], repeat.match_length) if count else None

    def observe(self, repeat: Repeat, accepted: int) -> None:
        """What the verifier accepted of a repeat."""
        bucket = _bucket(repeat.match_length)
        judged = min(accepted + 1, len(repeat.ids_in_target_vocab))
        self._seen[bucket] = self._seen[bucket] * _MEMORY + judged
        self._accepted[bucket] = self._accepted[bucket] * _MEMORY + accepted


def _bucket(match_length: int) -> int:
    return sum(1 for least in _LENGTH_BUCKETS[1:] if match_length >= least)
