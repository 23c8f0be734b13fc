"""One decoding cycle for a batch: committed target tokens → draft context → draft tokens → proxy tokens → rows.

Owns, per request id, the draft's context, how much of it the engine has seen, and what the request learned. Nothing
here raises because of one request: what fails is counted, and the request goes on without a proposal.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Final

from vllm_tokentiming.draft_length import DraftLength, DraftRow, RequestAcceptance
from vllm_tokentiming.engine.interface import DraftedTokens, DraftEngine, DraftRequest
from vllm_tokentiming.errors import UnencodableTextError
from vllm_tokentiming.metrics import Metrics
from vllm_tokentiming.policy import FORCED
from vllm_tokentiming.proposal_modes import ProposalMode
from vllm_tokentiming.repeats import Repeat, RepeatAcceptance, RequestRepeats
from vllm_tokentiming.requests import Candidate, Proposed, RequestState, TargetRequest
from vllm_tokentiming.transfer.interface import Draft, Proposals


class Pipeline:
    """Proposes target tokens for batches of requests.

    Args:
        mode: how drafts are sampled and become proposals.
        engine: runs the draft.
        length: how much is drafted.
        metrics: counts.
        repeats: how repeats of a request's own text fare; None: none are proposed.
    """

    def __init__(
        self,
        *,
        mode: ProposalMode,
        engine: DraftEngine,
        length: DraftLength,
        metrics: Metrics,
        repeats: RepeatAcceptance | None = None,
    ) -> None:
        self._mode = mode
        self._engine = engine
        self._length = length
        self._metrics = metrics
        self._repeats = repeats
        self._states: dict[str, RequestState] = {}

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

    def propose(self, requests: Sequence[TargetRequest | None], *, allow_rows: bool = True) -> Proposals:
        """Propose for each request, in order.

        Args:
            requests: None stands for a row that cannot be speculated on.
            allow_rows: False where rows would not fit the buffer: every proposal is then a point mass. Known before
                anything is drawn, because dropping rows by what came out would look at drawn values.
        """
        known = [request for request in requests if request is not None]
        self._length.begin_cycle(
            time.perf_counter(),
            {request.request_id: len(request.ids_in_target_vocab) for request in known},
            samples=any(request.temperature > 0 for request in known),
        )
        proposals = self._propose(requests, allow_rows=allow_rows, speculates=self._length.speculates())
        self._length.end_cycle(time.perf_counter(), num_proposed=sum(map(len, proposals.ids_in_target_vocab)))
        return proposals

    def _propose(self, requests: Sequence[TargetRequest | None], *, allow_rows: bool, speculates: bool) -> Proposals:
        begun = time.perf_counter()
        candidates = self._candidates(requests, allow_rows=allow_rows, speculates=speculates)
        if not speculates:
            candidates = self._without_costly_repeats(candidates)
        self._metrics.spent("context", time.perf_counter() - begun)
        if not candidates:
            return Proposals([[] for _ in requests])
        begun = time.perf_counter()
        drafts = [_NO_DRAFT] * len(requests)
        for candidate in candidates:
            if candidate.repeat is not None:
                drafts[candidate.place] = _NO_DRAFT._replace(proxy=candidate.repeat.ids_in_target_vocab)
        drafting = [candidate for candidate in candidates if candidate.repeat is None]
        drafted = self._draft_all(drafting) if drafting else []
        self._metrics.spent("draft", time.perf_counter() - begun)
        begun = time.perf_counter()
        for candidate, tokens in zip(drafting, drafted, strict=True):
            if tokens.reason is not None:
                self._metrics.silent(tokens.reason.value)
            if tokens.ids_in_draft_vocab:
                request, row = candidate.request, candidate.row
                steps = self._length.steps_to_propose(row)
                drafts[candidate.place] = Draft(
                    tokens.ids_in_draft_vocab[:steps],
                    None if tokens.law_ids is None else tokens.law_ids[:steps],
                    None if tokens.law_probs is None else tokens.law_probs[:steps],
                    steps,
                    request.max_proposal,
                    request.seed is not None,
                )
        proposals = self._proposals(drafts)
        appended = self._repeats_after(drafting, proposals)
        if appended:
            proposals = proposals.with_appended(
                [appended[place].ids_in_target_vocab if place in appended else [] for place in range(len(requests))]
            )
        self._remember(candidates, drafts, proposals, appended)
        self._metrics.spent("proposal", time.perf_counter() - begun)
        return proposals

    def _candidates(
        self, requests: Sequence[TargetRequest | None], *, allow_rows: bool, speculates: bool
    ) -> list[Candidate]:
        candidates = []
        for index, request in enumerate(requests):
            if request is None:
                self._metrics.silent("no_text")
                continue
            state = self._state_of(request)
            self._learn(request, state)
            repeat = self._repeat(request, state, speculates=speculates)
            if repeat is not None:
                row = DraftRow(acceptance=state.acceptance, max_steps=0, sampled=False)
                candidates.append(Candidate(index, request, state, FORCED, row, repeat))
                continue
            # With a seed, output must not depend on who else is served, nor on what takes how long.
            if not speculates and not state.acceptance.alone:
                self._metrics.silent("not_worthwhile")
                continue
            if not self._commit(request, state):
                continue
            if request.max_proposal > 0 and state.context.ends_inside_character:
                self._metrics.silent("inside_character")
                continue
            if not state.context.ids:
                self._metrics.silent("empty_context")
                continue
            arm = self._mode.choose(
                state.policy,
                temperature=request.temperature,
                point_mass_only=request.checks_values or not allow_rows,
            )
            row = DraftRow(
                acceptance=state.acceptance,
                max_steps=self._length.most_steps(request.max_proposal),
                sampled=arm.sharpening > 0,
            )
            candidates.append(Candidate(index, request, state, arm, row))
        if not any(candidate.request.max_proposal > 0 for candidate in candidates):
            # Warming alone is worth a pass only while a long prompt is being read.
            return [c for c in candidates if len(c.state.context.ids) - c.state.num_stable > 1]
        return candidates

    def _without_costly_repeats(self, candidates: list[Candidate]) -> list[Candidate]:
        """Where nothing is drafted, repeats pay for the pass that verifies them, or go; those of a seed always stay."""
        if self._repeats is None:
            return candidates
        free = [c.repeat for c in candidates if c.repeat is not None and not c.state.acceptance.alone]
        tokens = sum(len(repeat.ids_in_target_vocab) for repeat in free)
        expected = sum(self._repeats.expected(repeat, alone=False) for repeat in free)
        if not free or self._length.repeats_pay(tokens=tokens, expected=expected):
            return candidates
        for _ in free:
            self._metrics.silent("not_worthwhile")
        return [c for c in candidates if c.repeat is None or c.state.acceptance.alone]

    def _state_of(self, request: TargetRequest) -> RequestState:
        state = self._states.get(request.request_id)
        if state is not None and (
            state.owner is not request.owner
            or max(state.context.num_target_tokens, state.repeats.num_tokens) > len(request.ids_in_target_vocab)
        ):
            self.release(request.request_id)
            state = None
        if state is None:
            state = self._states[request.request_id] = RequestState(
                owner=request.owner,
                context=self._mode.new_context(),
                policy=self._mode.new_policy(alone=request.seed is not None),
                acceptance=RequestAcceptance(alone=request.seed is not None and request.temperature > 0),
                observer=self._mode.new_observer(),
                repeats=RequestRepeats(),
            )
        return state

    def _learn(self, request: TargetRequest, state: RequestState) -> None:
        """What the verifier made of the last proposal."""
        if state.proposal is None:
            return
        (proposed, known, candidate, appended), state.proposal = state.proposal, None
        # The verifier adds one token of its own to those that it accepted.
        accepted = min(max(len(request.ids_in_target_vocab) - known - 1, 0), proposed)
        if candidate.repeat is not None and self._repeats is not None:
            self._repeats.observe(candidate.repeat, accepted)
            return
        if appended is not None and self._repeats is not None:
            proposed -= len(appended.ids_in_target_vocab)
            if accepted >= proposed:
                self._repeats.observe(appended, accepted - proposed)
                accepted = proposed
        state.policy.observe(candidate.arm, accepted)
        self._length.observe_row(candidate.row, accepted_tokens=accepted, num_proposed=proposed)

    def _repeat(self, request: TargetRequest, state: RequestState, *, speculates: bool) -> Repeat | None:
        """What followed the same words earlier in the text, where that is likelier to pay than a draft."""
        if self._repeats is None:
            return None
        state.repeats.commit(request.ids_in_target_vocab[state.repeats.num_tokens :].tolist())
        repeat = state.repeats.find(request.max_proposal)
        if repeat is None:
            return None
        worth = self._length.worth(state.acceptance, speculates=speculates)
        return repeat if self._repeats.expected(repeat, alone=state.acceptance.alone) > worth else None

    def _commit(self, request: TargetRequest, state: RequestState) -> bool:
        """Bring the context up to date; False where the request cannot go on with speculation."""
        if state.given_up is not None:
            self._metrics.silent(state.given_up)
            return False
        new = request.ids_in_target_vocab[state.context.num_target_tokens :].tolist()
        if not new:
            return True
        try:
            state.context.commit(new)
            if state.observer is not None:
                state.observer.commit(new, state.context)
        except UnencodableTextError as error:
            self._give_up(request, state, "unencodable")
            self._metrics.warn_once("unencodable", "a request goes on without speculation: %s", error)
            return False
        except Exception:  # noqa: BLE001 - one request's text must not stop the batch
            self._give_up(request, state, "context_failed")
            self._metrics.warn_once(
                "context_failed", "a request goes on without speculation: its draft context failed", exc_info=True
            )
            return False
        state.num_stable = min(state.num_stable, state.context.num_stable)
        return True

    def _give_up(self, request: TargetRequest, state: RequestState, reason: str) -> None:
        state.given_up = reason
        self._engine.release(request.request_id)
        self._metrics.silent(reason)

    def _draft_all(self, candidates: Sequence[Candidate]) -> list[DraftedTokens]:
        requests = [
            # By place: keywords double the time that it takes.
            DraftRequest(
                request.request_id,
                state.context.ids,
                row.max_steps,
                state.num_stable,
                self._mode.sampling(arm, temperature=request.temperature, seed=_seed_of_cycle(request)),
            )
            for _, request, state, arm, row, _ in candidates
        ]
        missing = max(len(each.state.context.ids) - each.state.num_stable for each in candidates)
        stop_rule = self._length.pace([each.row for each in candidates], missing_tokens=missing)
        try:
            drafted = self._engine.draft(requests, stop_rule)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises, the step goes on
            for candidate in candidates:
                candidate.state.num_stable = 0
                self._metrics.silent("engine_failed")
            self._metrics.warn_once(
                "engine_failed", "the draft engine failed, requests go on without proposals: %s", error, exc_info=True
            )
            return [DraftedTokens(ids_in_draft_vocab=[])] * len(candidates)
        for candidate in candidates:
            candidate.state.num_stable = len(candidate.state.context.ids)
        return drafted

    def _proposals(self, drafts: list[Draft]) -> Proposals:
        """Proposals of all drafts; those that cannot become one are taken out of ``drafts``."""
        try:
            return self._mode.proposals(drafts)
        except Exception:  # noqa: BLE001 - one request's text must not stop the batch
            for index, draft in enumerate(drafts):
                try:
                    self._mode.proposals([draft])
                except Exception:  # noqa: BLE001 - likewise
                    drafts[index] = _NO_DRAFT
                    self._metrics.silent("proposal_failed")
                    self._metrics.warn_once("proposal_failed", "a draft could not be made a proposal", exc_info=True)
            return self._mode.proposals(drafts)

    def _repeats_after(self, candidates: Sequence[Candidate], proposals: Proposals) -> dict[int, Repeat]:
        """What followed earlier in the text where it went like its end and the draft's proposal, by place."""
        repeats: dict[int, Repeat] = {}
        if self._repeats is None:
            return repeats
        for place, request, state, _, row, _ in candidates:
            proposed = proposals.ids_in_target_vocab[place]
            repeat = state.repeats.find(request.max_proposal - len(proposed), after=proposed) if proposed else None
            if repeat is not None:
                repeat = self._repeats.worthwhile(
                    repeat, reach=row.reach, least=self._length.least_chance(row), alone=row.acceptance.alone
                )
            if repeat is not None:
                repeats[place] = repeat
        return repeats

    def _remember(
        self,
        candidates: Sequence[Candidate],
        drafts: Sequence[Draft],
        proposals: Proposals,
        appended: dict[int, Repeat],
    ) -> None:
        """Count proposals, and keep what the next cycle will tell about."""
        for candidate in candidates:
            drafted = len(drafts[candidate.place].ids_in_draft_vocab)
            count = len(proposals.ids_in_target_vocab[candidate.place])
            if count:
                repeat = appended.get(candidate.place)
                self._metrics.proposed(
                    draft_tokens=drafted,
                    proxy_tokens=count,
                    appended_tokens=len(repeat.ids_in_target_vocab) if repeat is not None else 0,
                    is_repeat=candidate.repeat is not None,
                )
                known = len(candidate.request.ids_in_target_vocab)
                candidate.state.proposal = Proposed(count, known, candidate, repeat)
            elif drafted:
                self._metrics.silent("no_proxy_tokens")


def _seed_of_cycle(request: TargetRequest) -> int | None:
    """Other draws in each cycle, the same whenever the request comes to this length."""
    return None if request.seed is None else (request.seed + len(request.ids_in_target_vocab)) % (1 << 63)


_NO_DRAFT: Final = Draft([], None, None, planned_steps=0, max_tokens=0)
