"""The default draft engine: a model loaded by vLLM, with its own paged KV cache, batched over requests.

Owns the draft's weights, KV and random streams, keyed by request id. A cycle: roll each request's cache back to where
its context changed, prefill the rest (bounded), then decode all requests together. One host synchronisation.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import get_model

from vllm_tokentiming.config import TokenTimingConfig
from vllm_tokentiming.engine.int8_checkpoint import INT8
from vllm_tokentiming.engine.interface import DraftedTokens, DraftRequest, Silence, StopRule
from vllm_tokentiming.engine.sampler import DraftSampler, confidence
from vllm_tokentiming.engine.vllm_config import int8_weights_of_steps, make_draft_vllm_config
from vllm_tokentiming.engine.vllm_forward import DraftForward
from vllm_tokentiming.engine.vllm_kv_blocks import DraftBlocks, DraftSequence
from vllm_tokentiming.engine.vllm_kv_cache import GIB, DraftKVCache, allocate_draft_kv_cache
from vllm_tokentiming.engine.vllm_solo_group import WholeModel
from vllm_tokentiming.errors import DraftCacheExhaustedError, DraftEngineError

logger = logging.getLogger(__name__)

_MAX_PREFILL_TOKENS = 2048
"""Draft prefill per cycle, at most: a long prompt must not hold up the other requests' tokens for seconds."""


@dataclass(slots=True, eq=False)
class _Row:
    """A request that drafts, or warms its cache, in this cycle."""

    index: int
    request: DraftRequest
    sequence: DraftSequence
    todo: list[int]
    logits: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class _Drawn:
    """What the steps of a cycle drew, on the device, a tensor for each step over the rows that drafted in it."""

    ids: list[torch.Tensor] = field(default_factory=list)
    largest: list[torch.Tensor] = field(default_factory=list)
    supports: list[torch.Tensor] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)
    confidences: list[torch.Tensor] = field(default_factory=list)

    def add(
        self, ids: torch.Tensor, largest: torch.Tensor, support: torch.Tensor | None, probs: torch.Tensor | None
    ) -> None:
        """One step, as ``SamplingPlan.step`` returns it."""
        self.ids.append(ids)
        self.largest.append(largest)
        if support is not None and probs is not None:
            self.supports.append(support)
            self.probs.append(probs)


class VllmDraftEngine:
    """Draft engine on vLLM's model loader, attention backends, quantisation and compilation.

    Args:
        target: the target's config; the draft shares its device and loading options.
        options: the plugin's.

    Raises:
        ConfigError, UnsupportedModelError: see ``make_draft_vllm_config`` and ``allocate_draft_kv_cache``.
    """

    def __init__(self, target: VllmConfig, options: TokenTimingConfig) -> None:
        started = time.monotonic()
        self.config = make_draft_vllm_config(target, options)
        model_config = self.config.model_config
        int8_steps = int8_weights_of_steps(target, model_config, options)
        # Another folder than the user's holds int8 weights; what vLLM calls their format says less.
        self._quantization = INT8 if model_config.model != options.draft_model else model_config.quantization
        self._device = torch.device(target.device_config.device)
        self._whole = WholeModel(target.parallel_config, device=self._device)
        logger.info("loading the draft model %s", options.draft_model)
        with self._whole.alone(), set_model_tag("tokentiming_draft"):
            self._model = get_model(vllm_config=self.config)
            self._cache: DraftKVCache = allocate_draft_kv_cache(
                self.config, device=self._device, memory=options.draft_kv_cache_memory
            )
        self._blocks = DraftBlocks(num_blocks=self._cache.num_blocks, block_size=self._cache.block_size)
        scheduler = self.config.scheduler_config
        self._forward = DraftForward(
            model=self._model,
            config=self.config,
            cache=self._cache,
            device=self._device,
            max_tokens=max(scheduler.max_num_seqs, min(scheduler.max_num_batched_tokens, _MAX_PREFILL_TOKENS)),
            max_requests=scheduler.max_num_seqs,
        )
        self._sampler = DraftSampler(device=self._device, seed=options.seed)
        self._warm_up(int8_steps)
        logger.info("the draft model is ready after %.1f s", time.monotonic() - started)

    @property
    def vocab_size(self) -> int:
        """Rows of the draft's logits."""
        return int(self.config.model_config.get_vocab_size())

    @property
    def max_model_len(self) -> int:
        """Longest context plus drafted tokens."""
        return int(self.config.model_config.max_model_len)

    @property
    def num_requests(self) -> int:
        """Requests with state here."""
        return len(self._blocks)

    def describe(self) -> str:
        """Engine, dtype and KV budget, for the start-up log."""
        tokens = (self._cache.num_blocks - 1) * self._cache.block_size
        dtype = str(self.config.model_config.dtype).removeprefix("torch.")
        if self._quantization is not None:
            dtype += f", {self._quantization}"
        return f"vllm ({dtype}, KV {self._cache.num_bytes / GIB:.2f} GiB = {tokens} tokens)"

    def restrict(self, allowed: npt.NDArray[np.bool_]) -> None:
        """See :class:`~vllm_tokentiming.engine.interface.DraftEngine`."""
        self._sampler.restrict(allowed)

    def release(self, request_id: str) -> None:
        """Free what is kept for a request; unknown ids are ignored."""
        self._blocks.release(request_id)
        self._sampler.release(request_id)

    def draft(self, requests: Sequence[DraftRequest], stop_rule: StopRule | None = None) -> list[DraftedTokens]:
        """Draft for every request, in order; ``stop_rule`` as for ``DraftEngine``.

        Raises:
            DraftEngineError: the step failed as a whole; the KV of the requests is then dropped.
        """
        results: list[DraftedTokens | None] = [None] * len(requests)
        try:
            with self._whole.alone():
                rows = self._plan(requests, results)
                self._prefill(rows)
                ready = [row for row in rows if row.logits is not None and row.request.num_steps > 0]
                for row in rows:
                    if row.logits is None:
                        results[row.index] = DraftedTokens(ids_in_draft_vocab=[], reason=Silence.PREFILLING)
                    elif row.request.num_steps <= 0:
                        results[row.index] = DraftedTokens(ids_in_draft_vocab=[], reason=Silence.WARMING)
                if ready:
                    self._decode(ready, results, stop_rule)
        except Exception as error:
            for request in requests:
                self._forget(request.request_id)
            raise DraftEngineError(f"the draft model failed: {type(error).__name__}: {error}") from error
        return [result for result in results if result is not None]

    def _plan(self, requests: Sequence[DraftRequest], results: list[DraftedTokens | None]) -> list[_Row]:
        busy = {request.request_id for request in requests}
        rows: list[_Row] = []
        for index, request in enumerate(requests):
            context = request.context_ids
            if len(context) + request.num_steps > self.max_model_len:
                # Its KV would only take room from requests that can still draft.
                self._blocks.release(request.request_id)
                results[index] = DraftedTokens(ids_in_draft_vocab=[], reason=Silence.CONTEXT_TOO_LONG)
                continue
            if not context:
                # Nothing to compute logits from yet, as for a prompt of special tokens that the draft does not have.
                self._blocks.release(request.request_id)
                results[index] = DraftedTokens(ids_in_draft_vocab=[], reason=Silence.WARMING)
                continue
            sequence = self._blocks.sequence(request.request_id, context)
            kept = self._blocks.roll_back(sequence, _common_prefix(sequence.ids, request))
            try:
                self._blocks.reserve(sequence, len(context) + max(0, request.num_steps - 1), busy=busy)
            except DraftCacheExhaustedError:
                self._blocks.release(request.request_id)
                results[index] = DraftedTokens(ids_in_draft_vocab=[], reason=Silence.CACHE_EXHAUSTED)
                continue
            rows.append(_Row(index=index, request=request, sequence=sequence, todo=list(context[kept:])))
        return rows

    def _prefill(self, rows: Sequence[_Row]) -> None:
        budget = self._forward.max_tokens
        # Short remainders first: requests that only catch up with the verifier draft in this cycle, whoever else waits.
        part: list[tuple[_Row, list[int]]] = []
        for row in sorted(rows, key=lambda row: len(row.todo)):
            take = min(len(row.todo), budget)
            if take <= 0 or len(part) >= self._forward.max_requests:
                break
            budget -= take
            part.append((row, row.todo[:take]))
        if not part:
            return
        logits = self._forward.prefill(
            ids=[ids for _, ids in part],
            starts=[len(row.sequence.ids) for row, _ in part],
            block_ids=[row.sequence.block_ids() for row, _ in part],
        )
        for place, (row, ids) in enumerate(part):
            row.sequence.ids.extend(ids)
            if len(ids) == len(row.todo):
                row.logits = logits[place]
            if row.sequence.num_registered < len(row.sequence.ids) // self._cache.block_size:
                self._blocks.register_prefix(row.sequence)

    def _decode(self, rows: list[_Row], results: list[DraftedTokens | None], stop_rule: StopRule | None) -> None:
        # Longest drafts first, so that the rows still drafting are always the first ones.
        rows = sorted(rows, key=lambda row: -row.request.num_steps)
        drawn = self._draw(rows, stop_rule)
        # Rows still drafting shrink from step to step; the steps are laid end to end for one transfer.
        host_ids, finite = torch.cat(drawn.ids).tolist(), torch.isfinite(torch.cat(drawn.largest)).tolist()
        begins = np.cumsum([0, *(len(ids) for ids in drawn.ids)])
        law_ids = torch.cat(drawn.supports).to("cpu", torch.int32).numpy() if drawn.supports else None
        law_probs = torch.cat(drawn.probs).cpu().numpy() if drawn.probs else None
        for place, row in enumerate(rows):
            count = min(row.request.num_steps, len(drawn.ids))
            where = begins[:count] + place
            if not all(finite[i] for i in where):
                self._forget(row.request.request_id)
                results[row.index] = DraftedTokens(ids_in_draft_vocab=[], reason=Silence.NOT_FINITE)
                continue
            ids_of_row = [host_ids[i] for i in where]
            # The last drafted token was never an input, so it has no KV.
            row.sequence.ids.extend(ids_of_row[:-1])
            sampling = row.request.sampling
            drawn_from_laws = sampling is not None and sampling.temperature > 0
            results[row.index] = DraftedTokens(
                ids_in_draft_vocab=ids_of_row,
                law_ids=law_ids[where] if drawn_from_laws and law_ids is not None else None,
                law_probs=law_probs[where] if drawn_from_laws and law_probs is not None else None,
            )

    def _draw(self, rows: Sequence[_Row], stop_rule: StopRule | None) -> _Drawn:
        plan = self._sampler.plan([row.request.request_id for row in rows], [row.request.sampling for row in rows])
        steps = [row.request.num_steps for row in rows]
        logits = torch.stack([row.logits for row in rows if row.logits is not None])
        self._forward.begin_decode(
            lengths=[len(row.sequence.ids) for row in rows], block_ids=[row.sequence.block_ids() for row in rows]
        )
        # A rule that is asked in each step makes the host wait for the device in each step.
        asks_at_once = self._device.type == "cpu"
        drawn = _Drawn()
        more = True
        for step in range(steps[0]):
            if step:
                logits = self._forward.decode_step(drawn.ids[-1][: sum(1 for s in steps if s > step)])
            if stop_rule is not None:
                drawn.confidences.append(confidence(logits))
                more = not asks_at_once or _ask(stop_rule, rows, drawn.confidences[-1])
            drawn.add(*plan.step(logits))
            if not more:
                break
        if stop_rule is not None and not asks_at_once:
            # Its answers are the same afterwards: they do not depend on drawn tokens.
            lengths = [len(each) for each in drawn.confidences]
            for step_confidence in torch.split(torch.cat(drawn.confidences).cpu(), lengths):
                if not _ask(stop_rule, rows, step_confidence):
                    break
        return drawn

    def _forget(self, request_id: str) -> None:
        self._cache.clear(self._blocks.forget(request_id))

    def _warm_up(self, int8_steps: Path | None) -> None:
        compiled = bool(self.config.compilation_config.mode)
        if compiled:
            logger.info("compiling the draft model; this can take a minute or two on the first start")
        with self._whole.alone(), _compilation_settings(self.config, self._device):
            if compiled:
                self._forward.warm_up()
        if self._device.type == "cpu":
            # What it imports of vLLM is for CPUs.
            from vllm_tokentiming.engine.vllm_decode_check import agreed_step

            with self._whole.alone():
                step = agreed_step(self._model, cache=self._cache, forward=self._forward, int8_weights=int8_steps)
            self._forward.hand_step = step
            if step is not None and step.takes_every_pass:
                self._quantization = INT8
        # A short real cycle touches every kernel once, so that the first request does not pay for it.
        warm = DraftRequest(request_id="warm-up", context_ids=[0, 0], num_steps=2)
        self.draft([warm])
        self._forget(warm.request_id)
        self.release(warm.request_id)
        # Only now: vLLM drops what is captured before it has profiled memory.
        if self.config.compilation_config.cudagraph_mode:
            self._forward.use_graphs()


def _ask(stop_rule: StopRule, rows: Sequence[_Row], step_confidence: torch.Tensor) -> bool:
    return stop_rule.more([row.index for row in rows[: len(step_confidence)]], step_confidence.tolist())


def _common_prefix(ids: Sequence[int], request: DraftRequest) -> int:
    """Tokens of the cache that the new context keeps; the last context token is always recomputed, for its logits."""
    context = request.context_ids
    most = min(len(ids), len(context) - 1)
    same = min(request.num_stable, most)
    while same < most and ids[same] == context[same]:
        same += 1
    return same


@contextlib.contextmanager
def _compilation_settings(config: VllmConfig, device: torch.device) -> Iterator[None]:
    if device.type != "cpu":
        yield
        return
    # Kernels with packed weights are only compiled in with inductor's freezing on, as the CPU worker does.
    from vllm.v1.worker.cpu_model_runner import _set_global_compilation_settings

    with _set_global_compilation_settings(config):
        yield
