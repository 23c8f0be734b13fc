"""Exact enumeration of the output law of speculative sampling across two toy vocabularies.

Every draft sequence that can be drawn is drawn, a rule turns it into proxy tokens and rows, and both verifications are
followed analytically. Token by token: accept with min(1, q/P), else sample from norm(max(0, q − P)). In blocks: see
``block_verification``. After a rejection, or past the last proxy token, the target samples by itself. The result is the
law of the first output tokens, to compare with the target's own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import block_verification

Tokens = tuple[int, ...]
ProposalRows = list[tuple[int, dict[int, float]]]


@dataclass(frozen=True)
class Drafted:
    """One way in which drafting can go.

    ``planned_steps`` is what was known before the last token was drawn: see ``ChunkTransfer.exact_rows``.
    """

    ids: Tokens
    law_ids: np.ndarray
    law_probs: np.ndarray
    planned_steps: int

    def laws(self) -> list[dict[int, float]]:
        return [
            dict(zip(i.tolist(), p.tolist(), strict=True)) for i, p in zip(self.law_ids, self.law_probs, strict=True)
        ]


Rule = Callable[[Drafted], ProposalRows]
# What drafting does after so many tokens, from the law of the next: go on, stop before drawing it, or make it the last.
GO_ON, STOP, LAST = "go on", "stop", "last"
StopRule = Callable[[np.ndarray], str]


def longest_match(vocabulary: Sequence[bytes], data: bytes) -> Tokens | None:
    """A tokenizer: the longest token that fits, again and again."""
    ids, start = [], 0
    while start < len(data):
        fitting = [i for i, token in enumerate(vocabulary) if token and data.startswith(token, start)]
        if not fitting:
            return None
        ids.append(max(fitting, key=lambda i: len(vocabulary[i])))
        start += len(vocabulary[ids[-1]])
    return tuple(ids)


def ends_in_character(data: bytes) -> bool:
    """Only for the valid UTF-8 of these toys."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.end == len(data) and "unexpected end" in error.reason
    return False


@dataclass(frozen=True)
class World:
    """A toy pair of vocabularies with random laws. Empty tokens are specials; ``*_end`` are the end tokens, or -1.

    The laws depend on every token before, not on the text alone: nothing may hang on how a text was tokenised.
    """

    draft: tuple[bytes, ...]
    target: tuple[bytes, ...]
    seed: int
    draft_end: int = -1
    target_end: int = -1
    top_k: int = 99
    concentration: float = 0.7
    _cache: dict = field(default_factory=dict, compare=False)

    def _law(self, tag: str, context: Tokens, size: int) -> np.ndarray:
        key = (tag, context)
        if key not in self._cache:
            generator = np.random.default_rng(zlib.crc32(f"{tag}|{context}|{self.seed}".encode()))
            self._cache[key] = generator.dirichlet(np.full(size, self.concentration))
        return self._cache[key]

    def draft_law(self, context: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """Its top-k tokens, renormalised."""
        law = self._law("draft", context, len(self.draft))
        ids = np.argsort(-law)[: self.top_k].astype(np.int32)
        return ids, law[ids] / law[ids].sum()

    def target_law(self, context: Tokens) -> np.ndarray:
        return self._law("target", context, len(self.target))

    def encode(self, run: Tokens, last: int) -> Tokens:
        """The chunk encoder that a product would use with these vocabularies."""
        data = b"".join(self.draft[i] for i in (*run, last))
        if ends_in_character(data) or (not self.draft[last] and last != self.draft_end):
            return ()
        encoding = longest_match(self.target, data)
        if encoding is None:
            return ()
        return (*encoding, self.target_end) if last == self.draft_end else encoding

    def drafts(self, steps: int, stop: StopRule = lambda _law: GO_ON) -> Iterator[tuple[float, Drafted]]:
        """Every draft with its probability."""

        def extend(ids: Tokens, laws: list, weight: float, planned: int) -> Iterator[tuple[float, Drafted]]:
            ended = bool(ids) and ids[-1] == self.draft_end
            law = None
            if len(ids) < planned and not ended:
                law = self.draft_law(ids)
                decision = stop(law[1]) if ids else GO_ON
                if decision == LAST:
                    planned = len(ids) + 1
                elif decision == STOP:
                    law = None
            if law is None:
                yield (
                    weight,
                    Drafted(ids, np.array([i for i, _ in laws]), np.array([p for _, p in laws]), planned),
                )
                return
            for draft_id, probability in zip(law[0].tolist(), law[1].tolist(), strict=True):
                if probability > 0:
                    yield from extend((*ids, draft_id), [*laws, law], weight * probability, planned)

        yield from extend((), [], 1.0, steps)


@dataclass(frozen=True)
class Outcome:
    """``distance``: total variation to the target's law, the larger one of both verifications. ``accepted``: mean
    number of accepted proxy tokens, judged one after the other; ``accepted_in_blocks``: judged together."""

    distance: float
    accepted: float
    accepted_in_blocks: float


# What can come of a proposal: how often, accepted tokens, and the token in the next one's place, or None.
Verification = Callable[[World, ProposalRows], Iterator[tuple[float, int, int | None]]]


def token_by_token(world: World, proposal: ProposalRows) -> Iterator[tuple[float, int, int | None]]:
    chance, prefix = 1.0, ()
    for accepted, (token, row) in enumerate(proposal):
        law = world.target_law(prefix)
        proposed = row[token]
        accept = min(1.0, law[token] / proposed) if proposed > 0 else 0.0
        residual = law.copy()
        for other, probability in row.items():
            residual[other] = max(0.0, residual[other] - probability)
        if accept < 1.0 and residual.sum() > 0:
            for other in np.flatnonzero(residual).tolist():
                yield chance * (1.0 - accept) * residual[other] / residual.sum(), accepted, other
        chance *= accept
        prefix = (*prefix, token)
    yield chance, len(proposal), None


def in_blocks(world: World, proposal: ProposalRows) -> Iterator[tuple[float, int, int | None]]:
    tokens = [token for token, _ in proposal]
    target_laws = [world.target_law(tuple(tokens[:i])).tolist() for i in range(len(tokens))]
    draft_laws = [[row.get(t, 0.0) for t in range(len(world.target))] for _, row in proposal]
    chances = block_verification.prefix_chances(tokens, draft_laws, target_laws)
    rest = 1.0  # the chance that no longer prefix stands
    for length, limit in reversed(list(enumerate([1.0, *block_verification.limits(tokens, draft_laws, target_laws)]))):
        chance, rest = rest * limit, rest * (1.0 - limit)
        if length == len(tokens):
            yield chance, length, None
        elif chance > 0.0:
            law = block_verification.residual(chances[length], draft_laws[length], target_laws[length])
            for other, probability in enumerate(law):
                yield chance * probability / sum(law), length, other


def outcome(world: World, rule: Rule, *, steps: int, depth: int, stop: StopRule = lambda _law: GO_ON) -> Outcome:
    """Follow every draft through each verification and compare the law of the first ``depth`` output tokens."""
    proposals = [(weight, rule(drafted)) for weight, drafted in world.drafts(steps, stop)]
    assert abs(sum(weight for weight, _ in proposals) - 1.0) < 1e-12, "the enumeration lost draft sequences"
    one_by_one = _outcome(world, proposals, token_by_token, depth)
    blocks = _outcome(world, proposals, in_blocks, depth)
    return Outcome(max(one_by_one[0], blocks[0]), one_by_one[1], blocks[1])


def _outcome(
    world: World, proposals: list[tuple[float, ProposalRows]], verification: Verification, depth: int
) -> tuple[float, float]:
    # Mass by output prefix, from where on the target samples by itself.
    settled: dict[Tokens, float] = {}
    mean_accepted = 0.0
    for weight, proposal in proposals:
        tokens = tuple(token for token, _ in proposal)
        for chance, accepted, other in verification(world, proposal):
            prefix = tokens[:accepted] if other is None else (*tokens[:accepted], other)
            if world.target_end in prefix:  # nothing is output after it
                prefix = prefix[: prefix.index(world.target_end) + 1]
            settled[prefix[:depth]] = settled.get(prefix[:depth], 0.0) + weight * chance
            mean_accepted += weight * chance * accepted

    def distance(prefix: Tokens, arrived: float, due: float) -> float:
        """``arrived``: mass of the outputs that start with this prefix and came here by the target's own sampling."""
        arrived += settled.get(prefix, 0.0)
        if len(prefix) == depth or (prefix and prefix[-1] == world.target_end):
            return abs(arrived - due)
        law = world.target_law(prefix)
        return sum(distance((*prefix, t), arrived * law[t], due * law[t]) for t in range(len(world.target)))

    return 0.5 * distance((), 0.0, 1.0), mean_accepted
