"""How many drafted tokens does the target accept? A slow, plain loop over Hugging Face models, temperature 0.

It restates greedy speculative decoding across tokenizers from its definition: draft a few tokens, re-tokenise their
text for the target, count how many agree with the target's own greedy continuation. It owns no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tiny_pair_tokenizers import DRAFT_BEGIN, DRAFT_END, TARGET_TURN_END, without_prefix
from tiny_pair_training import continue_texts
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Acceptance:
    """Counts over some prompts."""

    proposed: int
    accepted: int
    cycles: int
    first_accepted: int

    @property
    def rate(self) -> float:
        """Accepted share of the proposed target tokens."""
        return self.accepted / max(1, self.proposed)

    @property
    def tokens_per_cycle(self) -> float:
        """Target tokens that one verification yields, its own one included."""
        return 1 + self.accepted / max(1, self.cycles)

    def __str__(self) -> str:
        """Give the figures on one line."""
        first = self.first_accepted / max(1, self.cycles)
        return (
            f"{self.rate:.1%} of {self.proposed} proposed target tokens accepted, first {first:.1%}, "
            f"{self.tokens_per_cycle:.2f} tokens a cycle over {self.cycles} cycles"
        )


@torch.inference_mode()
def _draft_greedily(draft: LlamaForCausalLM, ids_in_draft_vocab: list[int], steps: int, end_id: int) -> list[int]:
    drafted: list[int] = []
    step = draft(torch.tensor([ids_in_draft_vocab]), use_cache=True, logits_to_keep=1)
    while True:
        drafted.append(int(step.logits[0, -1].argmax()))
        if len(drafted) == steps or drafted[-1] == end_id:
            return drafted
        step = draft(torch.tensor([drafted[-1:]]), past_key_values=step.past_key_values, use_cache=True)


def measure_acceptance(
    target: tuple[LlamaForCausalLM, PreTrainedTokenizerFast],
    draft: tuple[LlamaForCausalLM, PreTrainedTokenizerFast],
    prompts: Sequence[str],
    *,
    num_draft_tokens: int = 5,
    max_new_tokens: int = 64,
) -> Acceptance:
    """Count accepted tokens on ``prompts`` (text in the target's form, turn marks literal)."""
    target_model, target_tokenizer = target
    draft_model, draft_tokenizer = draft
    mid_text = without_prefix(draft_tokenizer)
    begin_id, end_id = draft_tokenizer.convert_tokens_to_ids([DRAFT_BEGIN, DRAFT_END])
    turn_end_id = target_tokenizer.convert_tokens_to_ids(TARGET_TURN_END)
    end_ids = frozenset(target_model.generation_config.eos_token_id)
    encoded = [target_tokenizer(prompt).input_ids for prompt in prompts]
    references = continue_texts(
        target_model,
        encoded,
        max_new_tokens=max_new_tokens,
        end_ids=end_ids,
        pad_id=0,
        temperature=0.0,
        seed=0,
        batch=1,
    )
    proposed = accepted = cycles = first = 0
    for prompt_ids, reference in zip(encoded, references, strict=True):
        done = 0
        while done < len(reference):
            text = target_tokenizer.decode(prompt_ids + reference[:done])
            context = [begin_id, *mid_text.encode(" " + text.replace(TARGET_TURN_END, DRAFT_END)).ids]
            drafted = _draft_greedily(draft_model, context, num_draft_tokens, end_id)
            ended = drafted[-1] == end_id
            # A first ▁ is a real space in mid-text, which the tokenizer's own decoder would strip.
            pieces = mid_text.decode([*context[:1], *drafted[: len(drafted) - ended]], skip_special_tokens=False)
            proposal = target_tokenizer(pieces.removeprefix(DRAFT_BEGIN)).input_ids + ([turn_end_id] if ended else [])
            agreed = 0
            for token, wanted in zip(proposal, reference[done:], strict=False):
                if token != wanted:
                    break
                agreed += 1
            cycles += 1
            first += agreed > 0
            accepted += agreed
            # What lies past the end of the continuation cannot be judged, so it does not count as proposed.
            proposed += min(len(proposal), len(reference) - done)
            done += agreed + 1
    return Acceptance(proposed=proposed, accepted=accepted, cycles=cycles, first_accepted=first)
