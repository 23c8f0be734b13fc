"""Faults of stock vLLM that stand in our way, each mended behind a probe that shows the fault.

A patch is applied only where its probe finds the fault, so a vLLM that mends it needs no change here. All concern CPU
without triton-cpu, and every speculative method, not only ours (vLLM 0.32; the first three unchanged in 0.33's source).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A mend for one fault.

    Attributes:
        name: for the log.
        symptom: what users see without it.
        cause: where in vLLM it comes from.
        removal: when this patch can go.
        is_needed: True where the fault shows.
        apply: mends it, for this process.
    """

    name: str
    symptom: str
    cause: str
    removal: str
    is_needed: Callable[[], bool]
    apply: Callable[[], None]


def apply_patches(device: torch.device) -> list[str]:
    """Apply the patches that this process needs; returns their names. Safe to call again."""
    if device.type != "cpu":
        return []
    applied = []
    for patch in PATCHES:
        if patch.is_needed():
            patch.apply()
            applied.append(patch.name)
            logger.info("patched vLLM: %s (%s)", patch.name, patch.symptom)
    return applied


def _expand_is_broken() -> bool:
    from vllm.v1.sample import rejection_sampler

    if getattr(rejection_sampler.expand_batch_to_tokens, "_tokentiming", False):
        return False
    written = torch.full((3,), -7.0)
    try:
        rejection_sampler._expand(written, torch.tensor([0.5, 2.0]), torch.tensor([1, 3], dtype=torch.int32), 0, 0)
    except Exception:  # noqa: BLE001 - however the kernel fails, it does not do its job
        return True
    return written.tolist() != [0.5, 2.0, 2.0]


def _mend_expand() -> None:
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return values.repeat_interleave(counts.long(), output_size=num_tokens)

    expand_batch_to_tokens._tokentiming = True  # type: ignore[attr-defined]
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def _top_k_of_no_rows_raises() -> bool:
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only

    if getattr(rejection_sampler.apply_sampling_constraints, "_tokentiming", False):
        return False
    try:
        apply_top_k_only(torch.empty(0, 8), torch.empty(0, dtype=torch.int32))
    except (RuntimeError, IndexError):
        return True
    return False


def _mend_top_k() -> None:
    from vllm.v1.sample import rejection_sampler

    stock = rejection_sampler.apply_sampling_constraints

    @functools.wraps(stock)
    def apply_sampling_constraints(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return logits if logits.shape[0] == 0 else stock(logits, *args, **kwargs)

    apply_sampling_constraints._tokentiming = True  # type: ignore[attr-defined]
    rejection_sampler.apply_sampling_constraints = apply_sampling_constraints


def _generator_has_no_offset() -> bool:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner._bookkeeping_sync, "_tokentiming", False):
        return False
    try:
        torch.Generator(device="cpu").get_offset()
    except (RuntimeError, NotImplementedError):
        return True
    return False


def _mend_generator_rewind() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    stock_sample, stock_bookkeeping = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    def discarded_generators(runner: Any) -> dict[int, torch.Generator]:
        rows = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
        generators = runner.input_batch.generators
        return {row: generators[row] for row in rows if row in generators}

    @functools.wraps(stock_sample)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What vLLM means by "offset - 4": the sample of an unfinished prefill is thrown away, and so is its random
        # number.
        before = [(generator, generator.get_state()) for generator in discarded_generators(self).values()]
        output = stock_sample(self, *args, **kwargs)
        for generator, state in before:
            generator.set_state(state)
        return output

    @functools.wraps(stock_bookkeeping)
    def bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        rewound = discarded_generators(self)
        for row in rewound:
            del self.input_batch.generators[row]
        try:
            return stock_bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(rewound)

    bookkeeping_sync._tokentiming = True  # type: ignore[attr-defined]
    GPUModelRunner._sample = sample
    GPUModelRunner._bookkeeping_sync = bookkeeping_sync


def _padding_is_judged() -> bool:
    from vllm.v1.sample import rejection_sampler

    if getattr(rejection_sampler.rejection_sample, "_tokentiming", False):
        return False
    memory = torch.zeros(2, 4)
    memory[0, -1] = 1.0  # what stands before the law
    output = torch.full((1, 2), -1, dtype=torch.int32)
    rejection_sampler._rejection_random_sample(
        output,
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([-1], dtype=torch.int32),
        None,
        memory[1:],
        torch.tensor([[2]]),
        torch.tensor([3]),
        torch.tensor([0.5], dtype=torch.float64),
        torch.tensor([False]),
        1,
        None,
    )
    return output.tolist() != [[3, -1]]


def _mend_padding() -> None:
    from vllm.v1.sample import rejection_sampler

    stock = rejection_sampler.rejection_sample

    @functools.wraps(stock)
    def rejection_sample(draft_token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Token 0 is a proposal like any other. It has no row, so it is judged as a point mass, which is lossless.
        judged: torch.Tensor = stock(draft_token_ids.clamp(min=0), *args, **kwargs)
        return judged

    rejection_sample._tokentiming = True  # type: ignore[attr-defined]
    rejection_sampler.rejection_sample = rejection_sample


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="expand_batch_to_tokens",
        symptom="temperature, top_p and top_k of every speculative method are garbage at temperature > 0",
        cause="the CPU kernel behind rejection_sampler._expand writes to a copy, so uninitialised memory is returned",
        removal="when _expand writes to its output on CPU",
        is_needed=_expand_is_broken,
        apply=_mend_expand,
    ),
    Patch(
        name="apply_sampling_constraints",
        symptom="a step with top_k and no proposed token kills the engine",
        cause="apply_top_k_only takes the maximum of an empty tensor",
        removal="when apply_top_k_only takes no rows",
        is_needed=_top_k_of_no_rows_raises,
        apply=_mend_top_k,
    ),
    Patch(
        name="generator rewind",
        symptom="a seeded request with a chunked prefill kills the engine (CPU Generator does not use offset)",
        cause="_bookkeeping_sync rewinds generators of discarded samples by their Philox offset, which only CUDA has",
        removal="when _bookkeeping_sync rewinds by state, or not at all on CPU",
        is_needed=_generator_has_no_offset,
        apply=_mend_generator_rewind,
    ),
    Patch(
        name="padded proposals",
        symptom="a prompt that the prefix cache holds up to its last token may begin with a token of a wrong law, at "
        "temperature > 0",
        cause="the scheduler pads the first step of such a prompt with proposals of id -1, at which the CPU kernel "
        "reads a probability out of bounds (Triton's rejects ids below 0)",
        removal="when rejection_random_sample_kernel rejects ids below 0 on CPU",
        is_needed=_padding_is_judged,
        apply=_mend_padding,
    ),
)
