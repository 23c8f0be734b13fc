"""The Hugging Face draft engine: for the command line, parity tests, and drafts vLLM cannot load. Simple, not fast.

Owns the draft's weights, one ``DynamicCache`` per request (least recently used dropped first) and the random streams,
keyed by request id. Each request is its own forward pass, so nothing is padded and no row can disturb another.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer

from vllm_tokentiming.config import TokenTimingConfig
from vllm_tokentiming.engine.int8_checkpoint import AUTO
from vllm_tokentiming.engine.interface import DraftedTokens, DraftRequest, Silence, StopRule
from vllm_tokentiming.engine.sampler import DraftSampler, confidence
from vllm_tokentiming.errors import ConfigError, DraftCacheExhaustedError, DraftEngineError, UnsupportedModelError

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_MAX_PREFILL_TOKENS = 2048
"""Draft prefill per cycle, at most: a long prompt must not hold up the other requests' tokens for seconds."""
_UNSTATED_MAX_LEN = 2048
"""For models whose config names no longest context (vLLM assumes the same)."""
_PROBE_IDS = ((1, 2, 3), (6, 5, 4), (7, 8))
"""Context, rejected tokens, and what comes instead."""


def _full_attention_cache() -> Any:
    # Without a config all layers keep everything: those made from one drop what left a sliding window, and such a cache
    # cannot roll back. The masks still apply the window.
    return DynamicCache()


@dataclass(slots=True, eq=False)
class _Sequence:
    """One request's draft context: ``ids`` are the tokens that ``cache`` holds, ``reserved`` those it may grow to."""

    ids: list[int] = field(default_factory=list)
    cache: Any = field(default_factory=_full_attention_cache)
    reserved: int = 0

    def roll_back(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens."""
        excess = len(self.ids) - num_tokens
        if excess > 0:
            # A negative argument is the number of tokens to remove in every version; a positive one is deprecated.
            self.cache.crop(-excess)
            del self.ids[num_tokens:]


@dataclass(slots=True, eq=False)
class _Row:
    """A request that drafts, or warms its cache, in this cycle."""

    index: int
    request: DraftRequest
    sequence: _Sequence
    todo: list[int]
    logits: torch.Tensor | None = None


class TransformersDraftEngine:
    """Draft engine on a Hugging Face causal language model.

    Args:
        model: in evaluation mode, on its device.
        name: what error messages call it.
        max_model_len: longest context plus drafted tokens.
        max_cached_tokens: tokens whose KV is kept, over all requests.
        seed: of the shared random stream.

    Raises:
        UnsupportedModelError: the model's cache cannot roll back.
    """

    def __init__(self, model: Any, *, name: str, max_model_len: int, max_cached_tokens: int, seed: int) -> None:
        self._model = model
        self._device: torch.device = model.device
        self._last_logits_only = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._max_model_len = max_model_len
        self._max_cached_tokens = max_cached_tokens
        self._max_prefill_tokens = _MAX_PREFILL_TOKENS
        # Least recently used first.
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()
        self._sampler = DraftSampler(device=self._device, seed=seed)
        self._vocab_size, self.bytes_per_token = self._probe(name)

    @classmethod
    def from_options(cls, options: TokenTimingConfig, *, device: str, dtype: torch.dtype, max_num_seqs: int) -> Self:
        """Load the draft that the options name.

        Args:
            options: the plugin's.
            device: where the model and its KV live.
            dtype: of the weights where the options say "auto".
            max_num_seqs: requests that draft together; with the longest context, the default KV budget.

        Raises:
            ConfigError: it cannot be loaded, or an option asks for what this engine cannot do.
            UnsupportedModelError: it can be loaded, but not serve as a draft.
        """
        if options.draft_quantization not in (None, AUTO):
            raise ConfigError(
                f"draft_quantization is {options.draft_quantization!r} with engine='transformers', which takes the "
                "weights as they are. Leave it out, or use engine='vllm'."
            )
        if options.draft_dtype != "auto":
            dtype = getattr(torch, options.draft_dtype)
        logger.info("loading the draft model %s", options.draft_model)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                options.draft_model,
                revision=options.draft_revision,
                trust_remote_code=options.draft_trust_remote_code,
                dtype=dtype,
            )
        except Exception as error:
            raise ConfigError(
                f"transformers cannot load {options.draft_model!r} as a draft model: {_first_line(error)} Required: a "
                "folder or Hub id with a config.json and weights of a decoder-only language model. Check the path, or "
                "HF_HUB_OFFLINE, or draft_trust_remote_code for models that bring code."
            ) from error
        max_model_len = _longest_context(model.config, options)
        engine = cls(
            model.to(device).eval(),
            name=options.draft_model,
            max_model_len=max_model_len,
            max_cached_tokens=max_model_len,
            seed=options.seed,
        )
        engine.limit_cache(memory=options.draft_kv_cache_memory, max_num_seqs=max_num_seqs)
        return engine

    @property
    def vocab_size(self) -> int:
        """Rows of the draft's logits."""
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest context plus drafted tokens."""
        return self._max_model_len

    @property
    def num_requests(self) -> int:
        """Requests with KV here."""
        return len(self._sequences)

    def describe(self) -> str:
        """Engine, dtype and KV budget, for the start-up log."""
        dtype = str(self._model.dtype).removeprefix("torch.")
        gib = self._max_cached_tokens * self.bytes_per_token / _GIB
        return f"transformers ({dtype}, KV at most {gib:.2f} GiB = {self._max_cached_tokens} tokens)"

    def limit_cache(self, *, memory: float | None, max_num_seqs: int) -> None:
        """Bound the KV.

        Args:
            memory: GiB, or None for what all requests can need, at most 1 GiB on CPU and 4 GiB elsewhere.
            max_num_seqs: requests that draft together.

        Raises:
            ConfigError: the memory holds fewer than two tokens.
        """
        if memory is None:
            cap = (1 if self._device.type == "cpu" else 4) * _GIB // self.bytes_per_token
            self._max_cached_tokens = max(self._max_model_len, min(max_num_seqs * self._max_model_len, cap))
            return
        self._max_cached_tokens = int(memory * _GIB) // self.bytes_per_token
        if self._max_cached_tokens < 2:
            raise ConfigError(
                f"draft_kv_cache_memory is {memory} GiB, room for {self._max_cached_tokens} tokens of "
                f"{self.bytes_per_token} bytes. Required: at least 2 tokens. Raise it, or leave it out."
            )

    def restrict(self, allowed: npt.NDArray[np.bool_]) -> None:
        """See :class:`~vllm_tokentiming.engine.interface.DraftEngine`."""
        self._sampler.restrict(allowed)

    def release(self, request_id: str) -> None:
        """Free what is kept for a request; unknown ids are ignored."""
        self._sequences.pop(request_id, None)
        self._sampler.release(request_id)

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest], stop_rule: StopRule | None = None) -> list[DraftedTokens]:
        """Draft for every request, in order; ``stop_rule`` as for ``DraftEngine``.

        Raises:
            DraftEngineError: the step failed as a whole; the KV of the requests is then dropped.
        """
        results: list[DraftedTokens | None] = [None] * len(requests)
        try:
            rows = self._plan(requests, results)
            self._prefill(rows)
            ready = [row for row in rows if row.logits is not None and row.request.num_steps > 0]
            for row in rows:
                if row.logits is None:
                    results[row.index] = _silent(Silence.PREFILLING)
                elif row.request.num_steps <= 0:
                    results[row.index] = _silent(Silence.WARMING)
            if ready:
                self._decode(ready, results, stop_rule)
        except Exception as error:
            for request in requests:
                self._sequences.pop(request.request_id, None)
            raise DraftEngineError(f"the draft model failed: {type(error).__name__}: {error}") from error
        return [result for result in results if result is not None]

    def _plan(self, requests: Sequence[DraftRequest], results: list[DraftedTokens | None]) -> list[_Row]:
        busy = {request.request_id for request in requests}
        rows: list[_Row] = []
        for index, request in enumerate(requests):
            context = request.context_ids
            if len(context) + request.num_steps > self._max_model_len:
                self._sequences.pop(request.request_id, None)
                results[index] = _silent(Silence.CONTEXT_TOO_LONG)
                continue
            if not context:
                # Nothing to compute logits from yet, as for a prompt of special tokens that the draft does not have.
                self._sequences.pop(request.request_id, None)
                results[index] = _silent(Silence.WARMING)
                continue
            sequence = self._sequences.setdefault(request.request_id, _Sequence())
            self._sequences.move_to_end(request.request_id)
            kept = _common_prefix(sequence.ids, request)
            sequence.roll_back(kept)
            try:
                self._reserve(sequence, len(context) + max(0, request.num_steps - 1), busy=busy)
            except DraftCacheExhaustedError:
                self._sequences.pop(request.request_id, None)
                results[index] = _silent(Silence.CACHE_EXHAUSTED)
                continue
            rows.append(_Row(index=index, request=request, sequence=sequence, todo=list(context[kept:])))
        return rows

    def _reserve(self, sequence: _Sequence, num_tokens: int, *, busy: Collection[str]) -> None:
        sequence.reserved = num_tokens
        excess = sum(other.reserved for other in self._sequences.values()) - self._max_cached_tokens
        for request_id in [rid for rid in self._sequences if rid not in busy]:
            if excess <= 0:
                break
            excess -= self._sequences.pop(request_id).reserved
        if excess > 0:
            raise DraftCacheExhaustedError(
                f"the draft's KV cache is exhausted: {excess} tokens more than {self._max_cached_tokens} are needed. "
                "Raise draft_kv_cache_memory, or lower --max-num-seqs or draft_max_model_len."
            )

    def _prefill(self, rows: Sequence[_Row]) -> None:
        budget = self._max_prefill_tokens
        # Short remainders first: requests that only catch up with the verifier draft in this cycle, whoever else waits.
        for row in sorted(rows, key=lambda row: len(row.todo)):
            take = min(len(row.todo), budget)
            if take <= 0:
                break
            budget -= take
            logits = self._append(row.sequence, row.todo[:take])
            del row.todo[:take]
            if not row.todo:
                row.logits = logits

    def _decode(self, rows: list[_Row], results: list[DraftedTokens | None], stop_rule: StopRule | None) -> None:
        # Longest drafts first, so that the rows still drafting are always the first ones.
        rows = sorted(rows, key=lambda row: -row.request.num_steps)
        plan = self._sampler.plan([row.request.request_id for row in rows], [row.request.sampling for row in rows])
        drafted: list[list[int]] = [[] for _ in rows]
        supports: list[list[torch.Tensor]] = [[] for _ in rows]
        probs: list[list[torch.Tensor]] = [[] for _ in rows]
        finite = [True] * len(rows)
        for step in range(rows[0].request.num_steps):
            active = [row for row in rows if row.request.num_steps > step]
            if step:
                for place, row in enumerate(active):
                    row.logits = self._append(row.sequence, drafted[place][-1:])
            logits = torch.stack([row.logits for row in active if row.logits is not None])
            more = stop_rule is None or stop_rule.more([row.index for row in active], confidence(logits).tolist())
            ids, largest, support, law = plan.step(logits)
            for place, (token, good) in enumerate(zip(ids.tolist(), torch.isfinite(largest).tolist(), strict=True)):
                drafted[place].append(token)
                finite[place] &= good
                if support is not None and law is not None:
                    supports[place].append(support[place])
                    probs[place].append(law[place])
            if not more:
                break
        for place, row in enumerate(rows):
            if not finite[place]:
                self._sequences.pop(row.request.request_id, None)
                results[row.index] = _silent(Silence.NOT_FINITE)
                continue
            sampling = row.request.sampling
            drawn = sampling is not None and sampling.temperature > 0
            results[row.index] = DraftedTokens(
                ids_in_draft_vocab=drafted[place],
                law_ids=torch.stack(supports[place]).cpu().numpy().astype(np.int32) if drawn else None,
                law_probs=torch.stack(probs[place]).cpu().numpy() if drawn else None,
            )

    def _append(self, sequence: _Sequence, ids: Sequence[int]) -> torch.Tensor:
        """Extend the sequence; return the logits after its last token, [V]."""
        keep = {"logits_to_keep": 1} if self._last_logits_only else {}
        output = self._model(
            input_ids=torch.tensor([list(ids)], device=self._device),
            past_key_values=sequence.cache,
            use_cache=True,
            **keep,
        )
        sequence.ids.extend(ids)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    @torch.inference_mode()
    def _probe(self, name: str) -> tuple[int, int]:
        """Reject a few tokens once, as every cycle will; return the rows of the logits, and the KV bytes per token.

        Raises:
            UnsupportedModelError: what comes after differs from a context computed whole: the model keeps state that
                does not roll back, or its tokens see those after them.
        """
        largest = self._model.config.get_text_config().vocab_size - 1
        kept, rejected, rest = ([min(i, largest) for i in ids] for ids in _PROBE_IDS)
        try:
            expected = self._append(_Sequence(), [*kept, *rest]).float()
            sequence = _Sequence()
            self._append(sequence, kept)
            self._append(sequence, rejected)
            _require_plain_layers(sequence)
            sequence.roll_back(len(kept))
            found = self._append(sequence, rest).float()
            _require_plain_layers(sequence)
            # Rounding in bfloat16 stays far below this share of the logits' range.
            tolerance = 0.05 * float(expected.max() - expected.min())
            torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance, equal_nan=True)
        except Exception as error:
            raise UnsupportedModelError(
                f"the cache of {name!r} ({type(self._model).__name__}) cannot roll back: {_first_line(error)} Required "
                "of a draft: a decoder-only model with attention layers only, because its state must roll back when "
                "proposals are rejected. Choose another draft."
            ) from error
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in sequence.cache.layers)
        return len(expected), size // len(sequence.ids)


def _require_plain_layers(sequence: _Sequence) -> None:
    layers = sequence.cache.layers
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    lengths = sorted({int(layer.get_seq_length()) for layer in layers if type(layer) is DynamicLayer})
    if odd or lengths != [len(sequence.ids)]:
        kinds = ", ".join(odd) or "DynamicLayer"
        raise ValueError(f"its cache has layers {kinds} of {lengths or 'no'} tokens for {len(sequence.ids)}.")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def _longest_context(config: Any, options: TokenTimingConfig) -> int:
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    wanted = options.draft_max_model_len
    if own is None:
        if wanted is None:
            logger.warning(
                "the draft's config names no longest context; taking %d (draft_max_model_len)", _UNSTATED_MAX_LEN
            )
        return wanted or _UNSTATED_MAX_LEN
    if wanted is not None and wanted > own:
        raise ConfigError(
            f"draft_max_model_len is {wanted}, but {options.draft_model!r} was made for at most {own} tokens. Set it "
            f"to {own} or less, or leave it out."
        )
    return int(wanted or own)


def _common_prefix(ids: Sequence[int], request: DraftRequest) -> int:
    """Tokens of the cache that the new context keeps; the last context token is always recomputed, for its logits."""
    context = request.context_ids
    most = min(len(ids), len(context) - 1)
    same = min(request.num_stable, most)
    while same < most and ids[same] == context[same]:
        same += 1
    return same


def _silent(reason: Silence) -> DraftedTokens:
    return DraftedTokens(ids_in_draft_vocab=[], reason=reason)
