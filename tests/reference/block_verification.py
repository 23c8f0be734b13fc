"""Block verification, as Sun et al. write it (arXiv 2403.10444, algorithm 2), for one request, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

Law = Sequence[float]


def prefix_chances(tokens: Sequence[int], draft_laws: Sequence[Law], target_laws: Sequence[Law]) -> list[float]:
    """p_0 … p_n: given the tokens so far, the chance that they all stand."""
    chances = [1.0]
    for token, draft, target in zip(tokens, draft_laws, target_laws, strict=True):
        possible = token >= 0 and draft[token] > 0.0
        chances.append(min(chances[-1] * target[token] / draft[token], 1.0) if possible else 0.0)
    return chances


def residual(chance: float, draft: Law, target: Law) -> list[float]:
    """max(p · target - draft, 0), not normalised."""
    return [max(chance * q - p, 0.0) for p, q in zip(draft, target, strict=True)]


def limits(tokens: Sequence[int], draft_laws: Sequence[Law], target_laws: Sequence[Law]) -> list[float]:
    """h_1 … h_n: below which a uniform number lets the first i tokens stand."""
    chances, found = prefix_chances(tokens, draft_laws, target_laws), []
    for i in range(1, len(tokens) + 1):
        if i == len(tokens):
            found.append(chances[i])
            continue
        mass = sum(residual(chances[i], draft_laws[i], target_laws[i]))
        found.append(mass / (mass + 1.0 - chances[i]) if mass > 0.0 else 0.0)
    return found


def verify(
    tokens: Sequence[int],
    draft_laws: Sequence[Law],
    target_laws: Sequence[Law],
    uniforms: Sequence[float],
    number: float,
) -> tuple[int, int]:
    """How many tokens stand, and the token in the next one's place (-1 where all stand), by inverting its law."""
    accepted = 0
    for i, limit in enumerate(limits(tokens, draft_laws, target_laws), start=1):
        if uniforms[i - 1] < limit:
            accepted = i
    if accepted == len(tokens):
        return accepted, -1
    chance = prefix_chances(tokens, draft_laws, target_laws)[accepted]
    law = residual(chance, draft_laws[accepted], target_laws[accepted])
    rest = number * sum(law)
    for token, probability in enumerate(law):
        rest -= probability
        if rest < 0.0:
            return accepted, token
    return accepted, len(law) - 1
