"""Exact enumeration of the output law of speculative sampling across two toy vocabularies.

Every draft sequence that can be drawn is drawn, a rule turns it into proxy tokens and rows, and vLLM's verification is
followed analytically: accept with min(1, q/P), else sample from norm(max(0, q − P)); after a rejection, or past the
last proxy token, the target samples by itself. The result is the law of the first output tokens, to compare with the
target's own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

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
    """``distance``: total variation to the target's law. ``accepted``: mean number of accepted proxy tokens."""

    distance: float
    accepted: float


def outcome(world: World, rule: Rule, *, steps: int, depth: int, stop: StopRule = lambda _law: GO_ON) -> Outcome:
    """Follow every draft through the verification and compare the law of the first ``depth`` output tokens."""
    # Mass by output prefix, from where on the target samples by itself.
    settled: dict[Tokens, float] = {}
    accepted = 0.0
    total = 0.0
    for drawn_with, drafted in world.drafts(steps, stop):
        weight = drawn_with
        total += weight
        prefix: Tokens = ()
        for token, row in rule(drafted):
            if prefix and prefix[-1] == world.target_end:
                break
            law = world.target_law(prefix)
            proposed = row[token]
            accept = min(1.0, law[token] / proposed) if proposed > 0 else 0.0
            residual = law.copy()
            for other, probability in row.items():
                residual[other] = max(0.0, residual[other] - probability)
            if accept < 1.0 and residual.sum() > 0:
                share = weight * (1.0 - accept) / residual.sum()
                for other in np.flatnonzero(residual).tolist():
                    key = (*prefix, other)[:depth]
                    settled[key] = settled.get(key, 0.0) + share * residual[other]
            weight *= accept
            accepted += weight
            prefix = (*prefix, token)
        settled[prefix[:depth]] = settled.get(prefix[:depth], 0.0) + weight
    assert abs(total - 1.0) < 1e-12, "the enumeration lost draft sequences"

    def distance(prefix: Tokens, arrived: float, due: float) -> float:
        """``arrived``: mass of the outputs that start with this prefix and came here by the target's own sampling."""
        arrived += settled.get(prefix, 0.0)
        if len(prefix) == depth or (prefix and prefix[-1] == world.target_end):
            return abs(arrived - due)
        law = world.target_law(prefix)
        return sum(distance((*prefix, t), arrived * law[t], due * law[t]) for t in range(len(world.target)))

    return Outcome(0.5 * distance((), 0.0, 1.0), accepted)
