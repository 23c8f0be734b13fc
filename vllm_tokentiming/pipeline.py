"""One decoding cycle for a batch: committed target tokens → draft context → draft tokens → proxy tokens → rows.

Owns, per request id, the draft's context and how much of it the engine has seen. Nothing here raises because of one request: what
fails is counted, and the request goes on without a proposal.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.alignment import Aligner
from vllm_tokentiming.config import TokenTimingConfig
from vllm_tokentiming.engine.interface import DraftedTokens, DraftEngine, DraftRequest, DraftSampling
from vllm_tokentiming.errors import DraftEngineError, UnencodableTextError
from vllm_tokentiming.metrics import Metrics
from vllm_tokentiming.transfer.interface import NOTHING, Proposal
from vllm_tokentiming.transfer.paper import paper_rows
from vllm_tokentiming.vocabulary import DraftContext, ProxyTokenizer, SpecialTokenMap, Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """One request of the target's batch.

    Attributes:
        request_id: key of all state.
        owner: the object that stands for this life of the request; an id that comes back with another owner is a new request.
        ids_in_target_vocab: int32 [L], prompt and output so far. A view: valid during the call only.
        max_proposal: most tokens to propose; 0 where the target's prefill is unfinished, which may still warm the draft.
        temperature: the request's; 0 is greedy.
        seed: of the draft's stream for this request, or None.
        checks_values: something looks at the proposed values before the verifier does (structured output drops what its
            grammar forbids), so only point masses are lossless.
    """

    request_id: str
    owner: object
    ids_in_target_vocab: npt.NDArray[np.int32]
    max_proposal: int
    temperature: float
    seed: int | None = None
    checks_values: bool = False


@dataclass(slots=True, eq=False)
class _RequestState:
    """What is kept of a request between cycles."""

    owner: object
    context: DraftContext
    num_stable: int = 0
    """Leading ids of the context that the engine has seen and that have not changed since."""
    unencodable: bool = False


@dataclass(slots=True, eq=False)
class _Candidate:
    """A request that drafts, or warms its cache, in this cycle."""

    index: int
    request: TargetRequest
    state: _RequestState
    sampling: DraftSampling | None


class Pipeline:
    """Proposes target tokens for batches of requests.

    Args:
        target: the target's vocabulary.
        draft: the draft's.
        special_tokens: which of their special tokens mean the same.
        engine: runs the draft.
        options: the plugin's.
        num_draft_tokens: draft steps in a cycle.
        metrics: counts.
    """

    def __init__(
        self,
        *,
        target: Vocabulary,
        draft: Vocabulary,
        special_tokens: SpecialTokenMap,
        engine: DraftEngine,
        options: TokenTimingConfig,
        num_draft_tokens: int,
        metrics: Metrics,
    ) -> None:
        self._target = target
        self._draft = draft
        self._special_tokens = special_tokens
        self._engine = engine
        self._options = options
        self._num_draft_tokens = num_draft_tokens
        self._metrics = metrics
        self._proxy_tokenizer = ProxyTokenizer(target, draft, special_tokens)
        self._aligner = Aligner(
            draft.flat_bytes,
            draft.byte_offsets,
            target.flat_bytes,
            target.byte_offsets,
            window_radius=options.window_radius,
        )
        self._states: dict[str, _RequestState] = {}

    @property
    def num_requests(self) -> int:
        """Requests with state here."""
        return len(self._states)

    def retain(self, live: Collection[str]) -> None:
        """Free the state of every request that is not live any more."""
        for request_id in [rid for rid in self._states if rid not in live]:
            self.release(request_id)

    def release(self, request_id: str) -> None:
        """Free a request's state; unknown ids are ignored."""
        self._states.pop(request_id, None)
        self._engine.release(request_id)

    def propose(self, requests: Sequence[TargetRequest | None]) -> list[Proposal]:
        """Propose for each request, in order; None stands for a row that cannot be speculated on."""
        proposals = [NOTHING] * len(requests)
        begun = time.perf_counter()
        candidates = self._candidates(requests)
        self._spent("context", begun)
        if not candidates:
            return proposals
        begun = time.perf_counter()
        drafted = self._draft_all(candidates)
        self._spent("draft", begun)
        if drafted is None:
            return proposals
        begun = time.perf_counter()
        proxies = [self._proxy(candidate, tokens) for candidate, tokens in zip(candidates, drafted, strict=True)]
        self._spent("proxy", begun)
        for candidate, tokens, proposal in zip(
            candidates, drafted, self._transfer(candidates, drafted, proxies), strict=True
        ):
            proposals[candidate.index] = proposal
            if proposal.ids_in_target_vocab:
                self._metrics.proposed(
                    draft_tokens=len(tokens.ids_in_draft_vocab), proxy_tokens=len(proposal.ids_in_target_vocab)
                )
        return proposals

    def _candidates(self, requests: Sequence[TargetRequest | None]) -> list[_Candidate]:
        candidates = []
        for index, request in enumerate(requests):
            if request is None:
                self._metrics.silent("no_text")
                continue
            state = self._state_of(request)
            if not self._commit(request, state):
                continue
            if request.max_proposal > 0 and state.context.ends_inside_character:
                self._metrics.silent("inside_character")
                continue
            if not state.context.ids:
                self._metrics.silent("empty_context")
                continue
            candidates.append(
                _Candidate(index=index, request=request, state=state, sampling=self._sampling_of(request))
            )
        if not any(candidate.request.max_proposal > 0 for candidate in candidates):
            # Warming alone is worth a pass only while a long prompt is being read.
            return [c for c in candidates if len(c.state.context.ids) - c.state.num_stable > 1]
        return candidates

    def _state_of(self, request: TargetRequest) -> _RequestState:
        state = self._states.get(request.request_id)
        if state is not None and (
            state.owner is not request.owner or state.context.num_target_tokens > len(request.ids_in_target_vocab)
        ):
            self.release(request.request_id)
            state = None
        if state is None:
            state = self._states[request.request_id] = _RequestState(
                owner=request.owner, context=DraftContext(self._target, self._draft, self._special_tokens)
            )
        return state

    def _commit(self, request: TargetRequest, state: _RequestState) -> bool:
        """Bring the context up to date; False where the request cannot go on with speculation."""
        if state.unencodable:
            self._metrics.silent("unencodable")
            return False
        new = request.ids_in_target_vocab[state.context.num_target_tokens :]
        if not len(new):
            return True
        try:
            state.context.commit(new.tolist())
        except UnencodableTextError as error:
            state.unencodable = True
            self._engine.release(request.request_id)
            self._metrics.silent("unencodable")
            self._metrics.warn_once("unencodable", "a request goes on without speculation: %s", error)
            return False
        except Exception:  # noqa: BLE001 - one request's text must not stop the batch
            state.unencodable = True
            self._engine.release(request.request_id)
            self._metrics.silent("context_failed")
            self._metrics.warn_once(
                "context_failed", "a request goes on without speculation: its draft context failed", exc_info=True
            )
            return False
        state.num_stable = min(state.num_stable, state.context.num_stable)
        return True

    def _sampling_of(self, request: TargetRequest) -> DraftSampling | None:
        """How this request's tokens are drafted.

        A point mass is accepted with the target's probability of the token, so there the draft's likeliest token is the best guess
        at any temperature; laws need tokens that were drawn from them.
        """
        if request.temperature <= 0:
            return None
        temperature = self._options.draft_temperature
        if temperature is None:
            if self._options.transfer == "point_mass" or request.checks_values:
                return None
            temperature = request.temperature
        if temperature <= 0:
            return None
        return DraftSampling(temperature=temperature, top_k=self._options.draft_top_k, seed=request.seed)

    def _draft_all(self, candidates: Sequence[_Candidate]) -> list[DraftedTokens] | None:
        requests = [
            DraftRequest(
                request_id=candidate.request.request_id,
                context_ids=candidate.state.context.ids,
                num_steps=self._num_draft_tokens if candidate.request.max_proposal > 0 else 0,
                num_stable=candidate.state.num_stable,
                sampling=candidate.sampling,
            )
            for candidate in candidates
        ]
        try:
            drafted = self._engine.draft(requests)
        except DraftEngineError as error:
            for candidate in candidates:
                candidate.state.num_stable = 0
                self._metrics.silent("engine_failed")
            self._metrics.warn_once(
                "engine_failed", "the draft engine failed, requests go on without proposals: %s", error, exc_info=True
            )
            return None
        for candidate in candidates:
            candidate.state.num_stable = len(candidate.state.context.ids)
        return drafted

    def _proxy(self, candidate: _Candidate, drafted: DraftedTokens) -> list[int]:
        if drafted.reason is not None:
            self._metrics.silent(drafted.reason)
        if not drafted.ids_in_draft_vocab:
            return []
        try:
            proxy = self._proxy_tokenizer.proxy(drafted.ids_in_draft_vocab)
        except Exception:  # noqa: BLE001 - one request's text must not stop the batch
            self._metrics.silent("proxy_failed")
            self._metrics.warn_once("proxy_failed", "a proposal could not be re-tokenised", exc_info=True)
            return []
        if not proxy:
            self._metrics.silent("no_proxy_tokens")
        return proxy[: candidate.request.max_proposal]

    def _transfer(
        self, candidates: Sequence[_Candidate], drafted: Sequence[DraftedTokens], proxies: Sequence[list[int]]
    ) -> list[Proposal]:
        proposals = [Proposal(ids_in_target_vocab=proxy) if proxy else NOTHING for proxy in proxies]
        if self._options.transfer != "paper":
            return proposals
        with_laws = [
            place
            for place, candidate in enumerate(candidates)
            if proxies[place] and drafted[place].law_probs is not None and not candidate.request.checks_values
        ]
        if not with_laws:
            return proposals
        begun = time.perf_counter()
        alignment = self._aligner.align(
            *_flatten([drafted[place].ids_in_draft_vocab for place in with_laws]),
            *_flatten([proxies[place] for place in with_laws]),
        )
        self._spent("alignment", begun)
        begun = time.perf_counter()
        start = 0
        for place in with_laws:
            proxy, tokens = proxies[place], drafted[place]
            stop = start + len(proxy)
            rows = paper_rows(
                ids_in_draft_vocab=tokens.ids_in_draft_vocab,
                law_ids=tokens.law_ids,
                law_probs=tokens.law_probs,
                ids_in_target_vocab=proxy,
                last_draft_index=alignment.last_draft_index[start:stop],
            )
            proposals[place] = Proposal(ids_in_target_vocab=proxy, rows=rows)
            start = stop
        self._spent("transfer", begun)
        return proposals

    def _spent(self, stage: str, begun: float) -> None:
        self._metrics.spent(stage, time.perf_counter() - begun)


def _flatten(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.fromiter((i for row in rows for i in row), dtype=np.int32, count=int(offsets[-1])), offsets
