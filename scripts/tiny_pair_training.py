"""How is a tiny model trained and sampled on one thread? Packed streams, Muon and AdamW, bfloat16 passes.

``train`` owns the optimiser's state for its duration; the model is the caller's.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shape:
    """The size of a tiny Llama; head_dim is 64, which every attention backend supports."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        """Require what two-way tensor parallelism and padded kernels need."""
        if self.num_heads % 2 or self.num_kv_heads % 2 or self.vocab_size % 64 or self.intermediate_size % 64:
            raise ValueError(f"found {self}; heads must be even, vocabulary and intermediate size multiples of 64")


@dataclass(frozen=True)
class Schedule:
    """Training length: most steps see short windows, the last ``long_fraction`` long ones (same tokens a step)."""

    steps: int
    tokens_per_step: int = 1024
    short_window: int = 256
    long_window: int = 512
    long_fraction: float = 0.12
    learning_rate: float = 8e-3

    def __post_init__(self) -> None:
        """Require whole windows in a step."""
        if self.tokens_per_step % self.short_window or self.tokens_per_step % self.long_window:
            raise ValueError(f"found {self}; tokens_per_step must be a multiple of both windows")


def build_model(shape: Shape, *, bos_id: int, eos_id: int | list[int], pad_id: int, seed: int) -> LlamaForCausalLM:
    """Build an untrained model, float32, with tied embeddings."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=bos_id,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    return LlamaForCausalLM(config)


def _windows(stream: np.ndarray, window: int, batch: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Yield int64 ``[batch, window + 1]`` for ever: every epoch cuts the stream at another offset."""
    while True:
        offset = int(rng.integers(0, window))
        starts = np.arange(offset, len(stream) - window - 1, window)
        rng.shuffle(starts)
        for first in range(0, len(starts) - batch + 1, batch):
            rows = [stream[start : start + window + 1] for start in starts[first : first + batch]]
            yield torch.from_numpy(np.stack(rows).astype(np.int64))


def train(model: LlamaForCausalLM, streams: Sequence[np.ndarray], schedule: Schedule, *, seed: int, name: str) -> float:
    """Train in place; return the mean loss (nats a token) of the last 50 steps.

    Args:
        model: float32 model.
        streams: int arrays of token ids, documents end to end; used in turn, an epoch each, so that they can hold
            different cuts of the same text.
        schedule: how long.
        seed: of the order of windows.
        name: for the log.
    """
    rng = np.random.default_rng(seed)
    stream = np.concatenate(list(streams))
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=schedule.learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=schedule.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    long_from = int(schedule.steps * (1 - schedule.long_fraction))
    short = _windows(stream, schedule.short_window, schedule.tokens_per_step // schedule.short_window, rng)
    long = _windows(stream, schedule.long_window, schedule.tokens_per_step // schedule.long_window, rng)
    warmup = max(1, min(50, schedule.steps // 10))
    # Forward and backward run wholly in bfloat16 (a third faster here than autocast); the float32 weights are updated.
    quick = copy.deepcopy(model).to(torch.bfloat16).train()
    masters, copies = list(model.parameters()), list(quick.parameters())
    losses: list[float] = []
    began = time.monotonic()
    for step in range(schedule.steps):
        remaining = (schedule.steps - step) / schedule.steps
        factor = min(1.0, (step + 1) / warmup, 0.02 + remaining / 0.7)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = schedule.learning_rate * factor
        batch = next(long if step >= long_from else short)
        logits = quick(batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        for master, copied in zip(masters, copies, strict=True):
            if copied.grad is None:
                raise RuntimeError(f"found a weight of {name} without a gradient; every weight must take part")
            master.grad = copied.grad.float()
            copied.grad = None
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        with torch.no_grad():
            for master, copied in zip(masters, copies, strict=True):
                copied.copy_(master)
        losses.append(loss.item())
        if step % 100 == 99 or step + 1 == schedule.steps:
            speed = (step + 1) * schedule.tokens_per_step / (time.monotonic() - began)
            recent = float(np.mean(losses[-50:]))
            epochs = (step + 1) * schedule.tokens_per_step / len(stream)
            logger.info("%s step %d loss %.3f epochs %.1f tok/s %.0f", name, step + 1, recent, epochs, speed)
    if not math.isfinite(losses[-1]):
        raise RuntimeError(f"found loss {losses[-1]} after training {name}; a finite one is required; lower the rate")
    model.eval()
    return float(np.mean(losses[-50:]))


@torch.inference_mode()
def continue_texts(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_ids: frozenset[int],
    pad_id: int,
    temperature: float,
    seed: int,
    batch: int = 64,
) -> list[list[int]]:
    """Return each prompt's continuation, its end token included; greedy at temperature 0.

    Prompts are sorted by length so that little is padded (on the left).
    """
    torch.manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    results: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(order), batch):
        chosen = order[first : first + batch]
        width = max(len(prompts[index]) for index in chosen)
        ids = torch.tensor([[pad_id] * (width - len(prompts[i])) + list(prompts[i]) for i in chosen])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen])
        sampling = {"temperature": temperature, "top_k": 0} if temperature else {}
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(end_ids),
            pad_token_id=pad_id,
            do_sample=temperature > 0,
            **sampling,
        )
        for index, row in zip(chosen, output[:, width:].tolist(), strict=True):
            stop = next((place + 1 for place, token in enumerate(row) if token in end_ids), len(row))
            results[index] = row[:stop]
    return results
