"""Block verification for vLLM's CPU runner: which proposed tokens stand, and what comes after them.

Sun et al., arXiv 2403.10444: a proposal's tokens are judged together. The output has the target's law, as with one
token judged after the other, and no fewer tokens are accepted on average. vLLM has it for its GPU runner V2 alone
(``rejection_sample_method: block``). Only the token that is really needed after a rejection is drawn, with one random
number; vLLM's own function draws one of 152,000 numbers for each request, which takes 5 ms. The bonus tokens, which
are needed only where all is accepted, are drawn likewise. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
import torch

PLACEHOLDER: Final = -1
"""What vLLM expects in the place of tokens that are not there."""

_BLOCK: Final = 128
"""Tokens whose probabilities are summed before the running sum: most vocabularies are a multiple of it."""

_BELOW_ONE: Final = 1.0 - 2.0**-53

_SEEDS: Final = 2**31


def rejection_sample(  # noqa: PLR0917 - vLLM's signature
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,  # noqa: ARG001 - vLLM's signature
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: Any,
    **_of_other_methods: object,
) -> torch.Tensor:
    """Stands for vLLM's function of this name.

    Args:
        draft_token_ids: int32 [proposed tokens]; ids below 0 are padding, which is always rejected.
        num_draft_tokens: how many of them each request has.
        max_spec_len: the most that a request may have.
        cu_num_draft_tokens: unused, the running sum of ``num_draft_tokens``.
        draft_probs: float32 [proposed tokens, target vocabulary]; None where all are point masses.
        target_logits: float32 [proposed tokens, target vocabulary], after temperature, top-k and top-p.
        bonus_token_ids: int64 [requests, 1], used where all is accepted.
        sampling_metadata: vLLM's: ``all_greedy``, ``temperature`` and ``generators`` are read.
        _of_other_methods: unused: acceptance without judging, which the plugin does not take, and the precision of
            noise that is not drawn here.

    Returns:
        int32 [requests, max_spec_len + 1]: accepted tokens, one more, and placeholders.
    """
    starts = list(accumulate(num_draft_tokens, initial=0))
    ids, bonus = draft_token_ids.tolist(), bonus_token_ids.flatten().tolist()
    is_greedy = greedy_requests(sampling_metadata, len(num_draft_tokens))
    outcomes = [(0, PLACEHOLDER)] * len(num_draft_tokens)
    if not all(is_greedy):
        outcomes = [
            (accepted, bonus[row] if accepted == num_draft_tokens[row] else other)
            for row, (accepted, other) in enumerate(
                judge_blocks(ids, starts, draft_probs, target_logits, sampling_metadata.generators)
            )
        ]
    if any(is_greedy):
        # NumPy's argmax takes a quarter of torch's time, and also finds the first of equals.
        likeliest = target_logits.numpy().argmax(axis=-1).tolist()
        for row, (start, end) in enumerate(pairwise(starts)):
            if is_greedy[row]:
                outcomes[row] = judge_greedily(ids[start:end], [*likeliest[start:end], bonus[row]])
    return output_ids(ids, starts, outcomes, max_spec_len)


def greedy_requests(sampling_metadata: Any, count: int) -> list[bool]:
    """Which of the first ``count`` requests are at temperature 0."""
    if sampling_metadata.all_greedy:
        return [True] * count
    greedy: list[bool] = (sampling_metadata.temperature[:count] == 0).tolist()
    return greedy


def judge_greedily(ids: Sequence[int], likeliest: Iterable[int]) -> tuple[int, int]:
    """How many of a request's tokens are the likeliest ones, and the one that follows them.

    Args:
        ids: [tokens].
        likeliest: [tokens + 1], the target's; not asked for beyond the first that differs.
    """
    return next((i, found) for i, found in enumerate(likeliest) if i == len(ids) or ids[i] != found)


def output_ids(
    ids: Sequence[int], starts: Sequence[int], outcomes: Sequence[tuple[int, int]], max_spec_len: int
) -> torch.Tensor:
    """What vLLM's runner reads: int32 [requests, max_spec_len + 1].

    Args:
        ids: [proposed tokens].
        starts: where each request's tokens start, and the end of the last one's.
        outcomes: of each request how many tokens stand, and the one after them.
        max_spec_len: the most that a request may have.
    """
    output = np.full((len(outcomes), max_spec_len + 1), PLACEHOLDER, dtype=np.int32)
    for row, (start, (accepted, after)) in enumerate(zip(starts, outcomes, strict=False)):
        output[row, :accepted] = ids[start : start + accepted]
        output[row, accepted] = after
    return torch.from_numpy(output)


def judge_blocks(
    ids: list[int],
    starts: list[int],
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    generators: dict[int, torch.Generator],
) -> list[tuple[int, int]]:
    """For each request: how many of its tokens stand, and the token that takes the next one's place.

    Args:
        ids: int [proposed tokens]; below 0 is padding.
        starts: where each request's tokens start, and the end of the last one's.
        draft_probs: float32 [proposed tokens, target vocabulary], or None.
        target_logits: float32 [proposed tokens, target vocabulary], after temperature.
        generators: of the requests that have seeds.
    """
    from vllm.v1.sample.rejection_sampler import generate_uniform_probs

    counts = [end - start for start, end in pairwise(starts)]
    chances = generate_uniform_probs(len(ids), counts, generators, target_logits.device).tolist()
    numbers = torch.rand(len(counts), dtype=torch.float64)
    for row, generator in generators.items():
        if row < len(counts) and counts[row]:  # the generators of others stay as they are
            numbers[row].uniform_(generator=generator)
    target_probs = target_logits.softmax(dim=-1, dtype=torch.float32)
    weights, residuals = residual_laws(ids, starts, draft_probs, target_probs)
    masses = residuals.sum(dim=-1).tolist()
    accepted = [
        accepted_length(limits(weights[start + row : end + row + 1], masses[start:end]), chances[start:end])
        for row, (start, end) in enumerate(pairwise(starts))
    ]
    rejecting = [row for row, count in enumerate(counts) if accepted[row] < count]
    others = [PLACEHOLDER] * len(counts)
    # Rows by index_select: it copies them whole, where an index in brackets looks at each number.
    places = torch.tensor([starts[row] + accepted[row] for row in rejecting], dtype=torch.long)
    for row, token in zip(rejecting, draw(residuals.index_select(0, places), numbers[rejecting]), strict=True):
        others[row] = token
    return list(zip(accepted, others, strict=True))


def residual_laws(
    ids: Sequence[int], starts: Sequence[int], draft_probs: torch.Tensor | None, target_probs: torch.Tensor
) -> tuple[list[float], torch.Tensor]:
    """What is left of the target's laws for the tokens that take proposed ones' places.

    Args:
        ids: int [proposed tokens].
        starts: where each request's tokens start, and the end of the last one's.
        draft_probs: float32 [proposed tokens, target vocabulary], or None.
        target_probs: float32 [proposed tokens, target vocabulary]; what is left is written over them.

    Returns:
        For each request the chance that its first i tokens stand, i = 0 … their number (the paper's p_i), all in one
        list; and float32 [proposed tokens, target vocabulary], max(p_i · target - draft, 0), not normalised.
    """
    device = target_probs.device
    proposed = torch.tensor(ids, dtype=torch.long, device=device).unsqueeze(-1)
    safe = proposed.clamp(min=0)
    target_at = target_probs.gather(1, safe).flatten().tolist()
    draft_at = draft_probs.gather(1, safe).flatten().tolist() if draft_probs is not None else [1.0] * len(ids)
    weights, before = [], []
    for start, end in pairwise(starts):
        weight = 1.0
        weights.append(weight)
        for i in range(start, end):
            before.append(weight)
            possible = ids[i] >= 0 and draft_at[i] > 0.0 and target_at[i] > 0.0  # false where it is not a number
            weight = min(1.0, weight * target_at[i] / draft_at[i]) if possible else 0.0
            weights.append(weight)
    # In place, since the laws of four tokens are 2.4 MB.
    residuals = target_probs.mul_(torch.tensor(before, dtype=torch.float32, device=device).unsqueeze(-1))
    if draft_probs is not None:
        residuals.sub_(draft_probs).clamp_(min=0.0)
    else:
        residuals.scatter_(1, safe, residuals.gather(1, safe).masked_fill_(proposed >= 0, 0.0))
    return weights, residuals


def limits(weights: Sequence[float], masses: Sequence[float]) -> list[float]:
    """Below which a uniform number lets the first i tokens of one request stand, i = 1 … their number (equation 5).

    Args:
        weights: [tokens + 1], p_0 …
        masses: [tokens], the sums of its residual laws.
    """
    inner = [
        mass / (mass + 1.0 - weight) if mass > 0.0 else 0.0
        for weight, mass in zip(weights[1:], masses[1:], strict=False)
    ]
    return [*inner, weights[-1]] if masses else []


def accepted_length(limits: Sequence[float], chances: Sequence[float]) -> int:
    """The longest prefix that stands; ``chances``: [tokens], uniform in [0, 1)."""
    standing = (length for length in range(len(limits), 0, -1) if chances[length - 1] < limits[length - 1])
    return next(standing, 0)


def draw(residuals: torch.Tensor, numbers: torch.Tensor) -> list[int]:
    """One token from each law, by inverting its running sum: that of blocks first, then that inside of one.

    Args:
        residuals: float32 [laws, vocabulary], not normalised.
        numbers: float64 [laws], uniform in [0, 1).
    """
    size = residuals.shape[-1]
    if size % _BLOCK:
        residuals = torch.nn.functional.pad(residuals, (0, -size % _BLOCK))
    blocks = residuals.reshape(len(residuals), residuals.shape[-1] // _BLOCK, _BLOCK)
    sums = blocks.sum(dim=-1).double()
    ends = sums.cumsum(dim=-1)
    wanted = numbers.unsqueeze(-1) * ends[:, -1:]
    block = torch.searchsorted(ends, wanted, right=True).clamp_(max=ends.shape[-1] - 1)  # [laws, 1]
    inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1).cumsum(dim=-1, dtype=torch.float64)
    # As a share, since both sums of a block are rounded: below 1, so that no token without probability is met.
    share = (wanted - (ends - sums).gather(1, block)) / sums.gather(1, block)
    place = torch.searchsorted(inside, share.clamp_(0.0, _BELOW_ONE) * inside[:, -1:], right=True)
    drawn: list[int] = (block * _BLOCK + place).flatten().clamp_(max=size - 1).tolist()
    return drawn


def draw_by_seed(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Stands for vLLM's ``fused_gumbel_argmax``, which hashes a seed with every entry of the vocabulary.

    Here a seed gives one number, by which the running sum of the probabilities is inverted: 2^31 numbers that lie
    evenly in [0, 1), so that a token's probability is met to within 2^-31.

    Args:
        logits: float32 [laws, vocabulary].
        seeds: int64 [laws], uniform in [0, 2^31).

    Returns:
        int64 [laws].
    """
    numbers = (seeds.double() + _fractions(seeds)) / _SEEDS
    return torch.tensor(draw(logits.softmax(dim=-1), numbers), dtype=torch.int64)


def _fractions(seeds: torch.Tensor) -> torch.Tensor:
    """Where between two multiples of 2^-31 each number lies, float64 in [0, 1): SplitMix64 (Steele et al., 2014)."""
    mixed = seeds.numpy().astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)
