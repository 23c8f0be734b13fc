"""What do presence, frequency and repetition penalties change?

Only the logits of tokens that stand in a request's prompt or output, so only these are touched here. vLLM counts every
entry of the vocabulary, for every row: a speculative step pays that once more for each proposed token. The results are
equal to vLLM's to the last bit, since each touched logit goes through the same operations in the same order.
"""

from __future__ import annotations

import torch


def apply_penalties(  # noqa: PLR0917 - vLLM's signature
    logits: torch.Tensor,
    prompt_tokens_tensor: torch.Tensor,
    output_tokens_tensor: torch.Tensor,
    presence_penalties: torch.Tensor,
    frequency_penalties: torch.Tensor,
    repetition_penalties: torch.Tensor,
) -> torch.Tensor:
    """Stands in for ``vllm.model_executor.layers.utils.apply_penalties``, under its parameters' names.

    Args:
        logits: float [rows, vocabulary]; changed in place.
        prompt_tokens_tensor: int64 [rows, longest prompt], padded with the size of the vocabulary.
        output_tokens_tensor: int64 [rows, longest output], padded likewise.
        presence_penalties: float [rows].
        frequency_penalties: float [rows].
        repetition_penalties: float [rows].

    Returns:
        ``logits``.
    """
    size = logits.shape[1]
    presence, frequency, repetition = (
        penalties.tolist() for penalties in (presence_penalties, frequency_penalties, repetition_penalties)
    )
    for row, row_logits in enumerate(logits):
        if presence[row] == 0 and frequency[row] == 0 and repetition[row] == 1:
            continue
        output = output_tokens_tensor[row]
        output = output[output < size]
        if repetition[row] != 1:
            prompt = prompt_tokens_tensor[row]
            seen = torch.cat((prompt[prompt < size], output))
            penalty = repetition_penalties[row]
            before = row_logits[seen]
            # A token that stands in `seen` twice is written twice, with the same value.
            row_logits[seen] = before * torch.where(before > 0, 1.0 / penalty, penalty)
        if presence[row] != 0 or frequency[row] != 0:
            said, counts = torch.unique(output, return_counts=True)
            row_logits[said] = row_logits[said] - frequency_penalties[row] * counts - presence_penalties[row]
    return logits
