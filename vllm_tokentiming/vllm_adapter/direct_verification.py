"""Verification on CPU that reads the logits where the model wrote them, where only temperature changes them.

``RejectionSampler.forward`` converts and copies the logits of all proposed tokens, and samples a bonus token for every
request, which is thrown away where a proposed one is rejected. Here rows are looked at when their turn comes, and a
bonus token is drawn where it is needed. Generators are asked for the same numbers in the same order, so that both ways
give the same tokens: a request with a seed does not depend on what another one in its batch has asked for. Owns
nothing.
"""

from __future__ import annotations

from itertools import accumulate, compress
from typing import Any

import torch

from vllm_tokentiming.vllm_adapter import verification


def applies(sampler: Any, logits: torch.Tensor, sampling_metadata: Any) -> bool:
    """Whether nothing but temperature changes the logits of this batch, and nobody asks for logprobs.

    Args:
        sampler: vLLM's ``RejectionSampler``.
        logits: [proposed tokens + requests, target vocabulary].
        sampling_metadata: vLLM's.
    """
    from vllm.v1.sample import rejection_sampler

    budgets = sampling_metadata.thinking_budget_state_holder
    return (
        logits.device.type == "cpu"
        # Whoever has put another function there wants it to be called.
        and rejection_sampler.rejection_sample is verification.rejection_sample
        and not sampler.synthetic_mode
        and not sampler.use_fp64_gumbel
        and sampling_metadata.max_num_logprobs is None
        and not sampling_metadata.logprob_token_ids
        and sampling_metadata.no_penalties
        and not sampling_metadata.bad_words_token_ids
        and sampling_metadata.allowed_token_ids_mask is None
        and sampling_metadata.top_k is None
        and sampling_metadata.top_p is None
        and (budgets is None or not budgets.has_tracked_requests())
        and all(map(_rests, sampling_metadata.logitsprocs.all))
    )


def _rests(processor: Any) -> bool:
    """Whether a logits processor has nothing to do in this batch; one that is not vLLM's may always have."""
    from vllm.v1.sample.logits_processor import builtin

    if type(processor) is builtin.MinTokensLogitsProcessor:
        return not processor.min_toks
    if type(processor) is builtin.LogitBiasLogitsProcessor:
        return not processor.biases
    return type(processor) is builtin.MinPLogitsProcessor and not processor.min_p_count


def verify(
    metadata: Any, draft_probs: torch.Tensor | None, logits: torch.Tensor, sampling_metadata: Any
) -> torch.Tensor:
    """Which proposed tokens stand, and what comes after them.

    Args:
        metadata: vLLM's ``SpecDecodeMetadata``.
        draft_probs: float32 [proposed tokens, target vocabulary]; None where all are point masses.
        logits: of the model's dtype, [proposed tokens + requests, target vocabulary].
        sampling_metadata: vLLM's, of a batch to which this :func:`applies`.

    Returns:
        int32 [requests, most proposed tokens + 1], as :func:`verification.rejection_sample`.
    """
    counts, ids = metadata.num_draft_tokens, metadata.draft_token_ids.tolist()
    starts = list(accumulate(counts, initial=0))
    is_greedy = verification.greedy_requests(sampling_metadata, len(counts))
    outcomes = [(0, verification.PLACEHOLDER)] * len(counts)
    if not all(is_greedy):
        outcomes = _judge_sampled(metadata, starts, draft_probs, logits, sampling_metadata)
    rows, bonus_rows = metadata.target_logits_indices.tolist(), metadata.bonus_logits_indices.tolist()
    for request in compress(range(len(counts)), is_greedy):
        start, end = starts[request], starts[request + 1]
        likeliest = map(likeliest_token, (logits[row] for row in (*rows[start:end], bonus_rows[request])))
        outcomes[request] = verification.judge_greedily(ids[start:end], likeliest)
    return verification.output_ids(ids, starts, outcomes, metadata.max_spec_len)


def _judge_sampled(
    metadata: Any,
    starts: list[int],
    draft_probs: torch.Tensor | None,
    logits: torch.Tensor,
    sampling_metadata: Any,
) -> list[tuple[int, int]]:
    """For each request how many of its tokens stand, and the one after them; those of greedy ones mean nothing."""
    counts, generators = metadata.num_draft_tokens, sampling_metadata.generators
    temperatures = sampling_metadata.temperature[: len(counts)]
    temperatures = torch.where(temperatures == 0, 1.0, temperatures)
    seeds = _bonus_seeds(len(counts), generators)  # first, as vLLM draws them
    target_logits = _cooled(
        logits.index_select(0, metadata.target_logits_indices), temperatures.repeat_interleave(torch.tensor(counts))
    )
    outcomes = verification.judge_blocks(
        metadata.draft_token_ids.tolist(), starts, draft_probs, target_logits, generators
    )
    complete = [request for request, (accepted, _) in enumerate(outcomes) if accepted == counts[request]]
    if complete:
        bonus_logits = _cooled(logits.index_select(0, metadata.bonus_logits_indices[complete]), temperatures[complete])
        for request, token in zip(
            complete, verification.draw_by_seed(bonus_logits, seeds[complete]).tolist(), strict=True
        ):
            outcomes[request] = counts[request], token
    return outcomes


def _cooled(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Float32 [rows, target vocabulary], by the temperature of each row."""
    logits = logits.float()
    return logits if bool((temperatures == 1.0).all()) else logits.div_(temperatures.unsqueeze(-1))


def _bonus_seeds(count: int, generators: dict[int, torch.Generator]) -> torch.Tensor:
    """The seeds that vLLM's sampler would draw bonus tokens by, int64 [requests]."""
    seeds = torch.randint(0, 2**31, (count,))
    for request, generator in generators.items():
        seeds[request] = torch.randint(0, 2**31, (1,), generator=generator).item()
    return seeds


def likeliest_token(logits: torch.Tensor) -> int:
    """The first of the largest, as vLLM's greedy sampling takes it; ``logits``: [target vocabulary]."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        # Positive numbers of 16 bits are in the order of their bits: no conversion, and a tenth of its time.
        bits = logits.view(torch.int16).numpy()
        place = int(bits.argmax())
        if bits[place] > 0:
            return place
        logits = logits.float()
    return int(logits.numpy().argmax())
