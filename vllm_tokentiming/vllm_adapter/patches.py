"""Faults of stock vLLM that stand in our way, each mended behind a probe that shows the fault.

A patch is applied only where its probe finds the fault, so a vLLM that mends it needs no change here; "block
verification", "direct verification", "drawing by one number", "penalties of seen tokens" and "top-k and top-p of
candidates" are put in place on every CPU, for their own sake too. All concern every speculative method, not only ours,
and most of them CPU without triton-cpu alone (vLLM 0.32; 0.33's source has the same faults).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from vllm_tokentiming.vllm_adapter import direct_verification, penalties, top_k_top_p, verification

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
        cpu_only: the fault is in what runs on CPU alone.
    """

    name: str
    symptom: str
    cause: str
    removal: str
    is_needed: Callable[[], bool]
    apply: Callable[[], None]
    cpu_only: bool = True


def apply_patches(device: torch.device) -> list[str]:
    """Apply the patches that this process needs; returns their names. Safe to call again."""
    applied = []
    for patch in PATCHES:
        if (device.type == "cpu" or not patch.cpu_only) and patch.is_needed():
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


def _every_entry_is_sorted() -> bool:
    from vllm.v1.sample.ops import topk_topp_sampler

    return topk_topp_sampler.apply_top_k_top_p_pytorch is not top_k_top_p.apply_top_k_top_p


def _mend_top_k_top_p() -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.apply_top_k_top_p_pytorch = top_k_top_p.apply_top_k_top_p


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


def _tokens_are_judged_alone() -> bool:
    from vllm.v1.sample import rejection_sampler

    return rejection_sampler.rejection_sample is not verification.rejection_sample


def _mend_verification() -> None:
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.rejection_sample = verification.rejection_sample


def _bonus_tokens_are_always_drawn() -> bool:
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    return not getattr(RejectionSampler.forward, "_tokentiming", False)


def _mend_copies() -> None:
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    stock = RejectionSampler.forward

    @functools.wraps(stock)
    def forward(
        self: Any, metadata: Any, draft_probs: torch.Tensor | None, logits: torch.Tensor, sampling_metadata: Any
    ) -> Any:
        if not direct_verification.applies(self, logits, sampling_metadata):
            return stock(self, metadata, draft_probs, logits, sampling_metadata)
        token_ids = direct_verification.verify(metadata, draft_probs, logits, sampling_metadata)
        return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=None)

    forward._tokentiming = True  # type: ignore[attr-defined]
    RejectionSampler.forward = forward


def _every_entry_is_hashed() -> bool:
    stock = getattr(torch.ops._C, "fused_gumbel_argmax", None)
    return stock is not None and stock is not verification.draw_by_seed


def _mend_draws() -> None:
    torch.ops._C.fused_gumbel_argmax = verification.draw_by_seed  # type: ignore[attr-defined]


def _every_entry_is_counted() -> bool:
    from vllm.v1.sample.ops import penalties as stock

    return stock.apply_penalties is not penalties.apply_penalties


def _mend_penalties() -> None:
    from vllm.v1.sample.ops import penalties as stock

    stock.apply_penalties = penalties.apply_penalties


def _spent_budget(*, row: int) -> Any:
    """What vLLM keeps of thinking budgets, in a batch of two with the one of ``row`` spent."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    thinking = SimpleNamespace(reasoning_start_token_ids=[1], reasoning_end_token_ids=[2])
    holder = ThinkingBudgetStateHolder(thinking, 2, 1, torch.device("cpu"), is_pin_memory=False)
    added = (row, SamplingParams(thinking_token_budget=0), [1], list[int]())
    holder.sync_batch(BatchUpdate(batch_size=2, removed=[], added=[added], moved=[]))
    return holder


def _budget_hits_others() -> bool:
    holder, nothing = _spent_budget(row=1), [list[int](), list[int]()]
    holder.update_state(nothing, nothing)
    logits = holder.apply_to_logits(torch.zeros(2, 4), predict_bonus_token=False, spec_token_ids=nothing)
    return bool(logits[0].any())


def _mend_thinking_budget() -> None:
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    stock = ThinkingBudgetStateHolder.apply_to_logits

    @functools.wraps(stock)
    def apply_to_logits(
        self: Any, logits: torch.Tensor, predict_bonus_token: bool, spec_token_ids: list[list[int]] | None
    ) -> torch.Tensor:
        # Without any proposal the rows are one to a request, as they are for the bonus tokens.
        forced: torch.Tensor = stock(self, logits, predict_bonus_token or not any(spec_token_ids or ()), spec_token_ids)
        return forced

    ThinkingBudgetStateHolder.apply_to_logits = apply_to_logits


def _budget_is_inherited() -> bool:
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    holder = _spent_budget(row=0)
    moved = (1, 0, MoveDirectionality.UNIDIRECTIONAL)
    holder.sync_batch(BatchUpdate(batch_size=1, removed=[], added=[], moved=[moved]))
    return bool(holder.has_tracked_requests())


def _mend_budget_of_moved() -> None:
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    stock = ThinkingBudgetStateHolder.sync_batch

    @functools.wraps(stock)
    def sync_batch(self: Any, batch_update: BatchUpdate | None) -> None:
        for _, row, direction in batch_update.moved if batch_update else ():
            if direction is MoveDirectionality.UNIDIRECTIONAL:
                self._state.pop(row, None)  # a request goes where another one has ended
        stock(self, batch_update)

    ThinkingBudgetStateHolder.sync_batch = sync_batch


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
        name="top-k and top-p of candidates",
        symptom="top_p takes 8 to 13 ms for every row (152,000 logits), top_k 0.2 to 0.4 ms, also for a row that is to "
        "follow proposals and is thrown away where one of them is rejected; and a step with top_k and no proposed "
        "token kills the engine",
        cause="apply_top_k_top_p_pytorch sorts the whole vocabulary, and apply_top_k_only takes the maximum of an "
        "empty tensor",
        removal="when the tokens that cannot be left are not sorted, and no rows are taken",
        is_needed=_every_entry_is_sorted,
        apply=_mend_top_k_top_p,
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
        name="block verification",
        symptom="at temperature > 0 fewer tokens are accepted than can be, verifying takes 5 ms longer for every "
        "request of a batch (152,000 logits), and a prompt that the prefix cache holds up to its last token may begin "
        "with a token of a wrong law",
        cause="vLLM has block verification for its GPU runner V2 alone; rejection_sample draws a random number for "
        "every entry of the vocabulary; and the scheduler pads the first step of such a prompt with proposals of id "
        "-1, at which the CPU kernel reads a probability out of bounds (Triton's rejects ids below 0)",
        removal="when rejection_sample_method=block works on CPU, without these two faults",
        is_needed=_tokens_are_judged_alone,
        apply=_mend_verification,
    ),
    Patch(
        name="direct verification",
        symptom="verifying four tokens of one request takes 0.5 ms longer than it need, and three of each of four "
        "requests 1 to 2 ms (152,000 logits)",
        cause="RejectionSampler.forward copies the logits of proposed tokens three times, once of them for logprobs "
        "that nobody has asked for, and samples a bonus token for every request before it verifies",
        removal="when it copies no logits and draws bonus tokens where they are needed",
        is_needed=_bonus_tokens_are_always_drawn,
        apply=_mend_copies,
    ),
    Patch(
        name="drawing by one number",
        symptom="at temperature > 0 drawing a token takes 0.9 ms for every request of a batch (152,000 logits), also "
        "one that is to follow proposals and is thrown away where one of them is rejected",
        cause="fused_gumbel_argmax hashes the seed with every entry of the vocabulary, on one thread",
        removal="when it takes no longer than inverting the running sum of the probabilities",
        is_needed=_every_entry_is_hashed,
        apply=_mend_draws,
    ),
    Patch(
        name="penalties of seen tokens",
        symptom="repetition, presence and frequency penalties take 0.8 to 1 ms for every row (152,000 logits), also "
        "for one that is to follow proposals and is thrown away where one of them is rejected",
        cause="apply_penalties counts every entry of the vocabulary and writes every logit",
        removal="when it touches the tokens of the prompt and the output alone",
        is_needed=_every_entry_is_counted,
        apply=_mend_penalties,
    ),
    Patch(
        name="thinking budget without proposals",
        symptom="where one request's thinking_token_budget is spent, the end of thinking is forced on another request",
        cause="in a step without proposals ThinkingBudgetStateHolder counts proposed tokens as rows, so every request "
        "seems to begin at row 0",
        removal="when such a step is laid out as one row a request",
        is_needed=_budget_hits_others,
        apply=_mend_thinking_budget,
        cpu_only=False,
    ),
    Patch(
        name="thinking budget of finished requests",
        symptom="a request without thinking_token_budget may be under that of one that has ended (in any vLLM)",
        cause="ThinkingBudgetStateHolder.sync_batch keeps the state of a row to which a request without a budget moves",
        removal="when a move leaves nothing of the row that it goes to",
        is_needed=_budget_is_inherited,
        apply=_mend_budget_of_moved,
        cpu_only=False,
    ),
)
