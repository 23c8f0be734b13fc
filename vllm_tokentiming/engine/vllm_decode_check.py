"""Does the hand-written decode step do what vLLM's layers do? Asked once, at start-up, with this draft's own weights.

Logits alone do not tell: 16-bit norms round otherwise than vLLM's, int8 activations amplify that from layer to layer,
and a step that forgets to write its KV is hardly further off. The KV of the first two layers is still within rounding,
and everything that a layer does shows in the KV of the next.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_tokentiming.engine import vllm_int8_layers as int8_layers
from vllm_tokentiming.engine import vllm_int8_step
from vllm_tokentiming.engine.vllm_decode_step import LlamaDecodeStep, why_unfit
from vllm_tokentiming.engine.vllm_kv_cache import DraftKVCache

if TYPE_CHECKING:
    from vllm_tokentiming.engine.vllm_forward import DraftForward, HandStep

logger = logging.getLogger(__name__)

_LENGTHS = (3, 9)
_STEPS = 2


@dataclass(frozen=True, slots=True)
class _Limits:
    kv_error: float
    correlation: float


_FLOAT32 = _Limits(kv_error=1e-3, correlation=0.9999)
_SIXTEEN_BITS = _Limits(kv_error=0.02, correlation=0.98)
_QUANTIZED = _Limits(kv_error=0.06, correlation=0.9)
"""About three times what SmolLM2-135M and Qwen2.5-0.5B differ by; a rotation by one position makes 0.07–0.14."""


def agreed_step(
    model: Any, *, cache: DraftKVCache, forward: DraftForward, int8_weights: Path | None = None
) -> HandStep | None:
    """The hand-written step, where this draft has one and it agrees with vLLM's; else None, and the log says why.

    Args:
        model: the draft, loaded by vLLM.
        cache: its KV.
        forward: its passes on vLLM's layers.
        int8_weights: folder with weights for steps of few rows, where the model's own are float ones.
    """
    reason = why_unfit(model, cache)
    if reason is None:
        try:
            step, int8_reason = _int8_step(model, cache, int8_weights)
        except ValueError as error:
            step, int8_reason = None, str(error)
        if step is not None:
            int8_reason = disagreement(forward, step, cache)
            if int8_reason is None:
                passes = "every pass" if step.takes_every_pass else "passes of few tokens"
                logger.info("the draft takes %s on int8 kernels of its own", passes)
                return step
        logger.info("the draft takes its decode steps without int8 kernels of its own: %s", int8_reason)
        step = LlamaDecodeStep(model, cache=cache)
        reason = disagreement(forward, step, cache)
        if reason is None:
            logger.info("the draft takes its decode steps on vLLM's kernels directly")
            return step
    logger.info("the draft takes its decode steps through vLLM's layers: %s", reason)
    return None


def _int8_step(model: Any, cache: DraftKVCache, int8_weights: Path | None) -> tuple[HandStep | None, str | None]:
    """A step on int8 kernels, or why there is none.

    Raises:
        ValueError: the weights' shapes do not fit.
    """
    if int8_weights is not None:
        reason = vllm_int8_step.why_unfit(model, cache)
        step = None if reason else vllm_int8_step.Int8Step(model, cache=cache, folder=int8_weights)
        return step, reason
    reason = int8_layers.why_unfit(model.model)
    if reason is not None:
        return None, reason
    return LlamaDecodeStep(model, cache=cache, int8_layers=int8_layers.of_packed_model(model.model)), None


@torch.inference_mode()
def disagreement(forward: DraftForward, step: HandStep, cache: DraftKVCache) -> str | None:
    """Take the same steps both ways from a cache that nobody uses yet; None where they agree.

    Returns:
        What differs, for the log.
    """
    rows = min(len(_LENGTHS), forward.max_requests, cache.num_blocks - 1)
    lengths, block_ids = _LENGTHS[:rows], [[1 + row] for row in range(rows)]
    used = [1 + row for row in range(rows)]
    ids = [[(7 * i + row) % step.vocab_size for i in range(length)] for row, length in enumerate(lengths)]

    def run(by_hand: HandStep | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        cache.clear(used)
        forward.hand_step = by_hand
        forward.prefill(ids=ids, starts=[0] * rows, block_ids=block_ids)
        forward.begin_decode(lengths=lengths, block_ids=block_ids)
        tokens = [torch.arange(rows) + 5 * turn for turn in range(_STEPS)]
        logits = torch.cat([forward.decode_step(ids % step.vocab_size) for ids in tokens])
        return logits.double(), [kv[used].double() for kv in cache.tensors[:2]]

    try:
        logits, caches = run(None)
        hand_logits, hand_caches = run(step)
    except Exception as error:  # noqa: BLE001 - private kernels: whatever it is, vLLM's own path is there
        return f"its check failed with {type(error).__name__}: {error}"
    finally:
        forward.hand_step = None
        cache.clear(used)
    limits = _QUANTIZED if step.is_quantized else _FLOAT32 if step.dtype == torch.float32 else _SIXTEEN_BITS
    for number, (kv, hand_kv) in enumerate(zip(caches, hand_caches, strict=True)):
        difference = float((hand_kv - kv).norm() / kv.norm())
        if not difference <= limits.kv_error:  # NaN too
            return f"the KV that it writes in layer {number} differs by {difference:.3f}"
    pairs = torch.stack([logits, hand_logits], dim=1)
    correlation = min(float(torch.corrcoef(pair)[0, 1]) for pair in pairs)
    if not correlation >= limits.correlation:
        return f"its logits correlate with vLLM's by no more than {correlation:.3f}"
    return None
