"""How a request's draft is sampled and becomes a proposal: one mode for each value of ``transfer``.

A mode decides what is drawn before it is drawn, and what rows its tokens get after. Modes share one class: they differ
in the arms that a request may choose from, and in what makes rows out of a sampled draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.config import TokenTimingConfig
from vllm_tokentiming.engine.interface import DraftedTokens, DraftSampling
from vllm_tokentiming.pair import BoundaryObserver, ExactPair, Pair
from vllm_tokentiming.policy import ARMS, FORCED, GREEDY, Arm, Policy, RequestPolicy
from vllm_tokentiming.transfer.exact import ChunkTransfer
from vllm_tokentiming.transfer.extendable import Extendable
from vllm_tokentiming.transfer.interface import NOTHING, Proposal
from vllm_tokentiming.transfer.paper import paper_rows
from vllm_tokentiming.transfer.special_cases import tli_transfer
from vllm_tokentiming.vocabulary import DraftContext

_FIXED = Arm(name="fixed", sharpening=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampledDraft:
    """A draft with the laws that it was drawn from, and what was known before; see :meth:`ProposalMode.proposal`."""

    ids_in_draft_vocab: list[int]
    law_ids: npt.NDArray[np.int32]
    law_probs: npt.NDArray[np.float64]
    planned_steps: int
    max_tokens: int
    alone: bool


class ProposalMode:
    """The mode of one pair under given options.

    Args:
        pair: the vocabularies.
        options: ``transfer``, ``draft_temperature``, ``draft_top_k`` and those of the exact transfer are read.
    """

    def __init__(self, pair: Pair, options: TokenTimingConfig) -> None:
        self._pair = pair
        self._top_k = options.draft_top_k
        self._fixed_temperature = options.draft_temperature
        self.restricts_draft = options.transfer == "tli"
        self._policy = Policy(_arms(options))
        self._exact: ExactPair | None = None
        self._with_laws: Callable[[_SampledDraft], Proposal] | None = None
        if options.transfer == "exact":
            self._exact = ExactPair(
                pair,
                longest_run=options.longest_run,
                learn=options.extendable == "online",
                extend=options.extendable != "off",
            )
            self._with_laws = self._exact_proposal
        elif options.transfer == "paper":
            self._with_laws = self._paper_proposal
        elif options.transfer == "tli":
            self._target_of_draft = pair.shared_tokens()
            self._tli = tli_transfer(
                self._target_of_draft,
                target_vocab_size=pair.target.model_vocab_size,
                end_ids_in_draft_vocab=pair.draft.end_ids,
            )
            self._nothing = Extendable.nothing(pair.draft.model_vocab_size)
            self._with_laws = self._tli_proposal

    def shared_tokens(self) -> npt.NDArray[np.bool_]:
        """Bool [draft vocabulary]: tokens that the target has too, for an engine that must draft nothing else."""
        return self._pair.shared_tokens() >= 0

    def new_context(self) -> DraftContext:
        """The context of a new request."""
        return DraftContext(self._pair.target, self._pair.draft, self._pair.special_tokens)

    def new_policy(self, *, alone: bool) -> RequestPolicy:
        """The policy of a new request; ``alone``: independent of other requests."""
        return self._policy.for_request(alone=alone)

    def new_observer(self) -> BoundaryObserver | None:
        """What watches a new request's text for E, if anything does."""
        return None if self._exact is None else self._exact.observer()

    def choose(self, policy: RequestPolicy, *, temperature: float, point_mass_only: bool) -> Arm:
        """How this cycle drafts. Greedy requests need no rows."""
        if temperature <= 0 or point_mass_only:
            return FORCED
        return policy.choose()

    def sampling(self, arm: Arm, *, temperature: float, seed: int | None) -> DraftSampling | None:
        """What the engine is asked for under an arm; None drafts greedily."""
        if arm is _FIXED and self._fixed_temperature is not None:
            temperature = self._fixed_temperature
        else:
            temperature *= arm.sharpening
        if temperature <= 0 and not self.restricts_draft:
            return None
        return DraftSampling(temperature=temperature, top_k=self._top_k, seed=seed, shared_only=self.restricts_draft)

    def proposal(self, drafted: DraftedTokens, *, planned_steps: int, max_tokens: int, alone: bool) -> Proposal:
        """Proxy tokens and rows of one draft.

        Args:
            drafted: from the engine.
            planned_steps: how many tokens were to be drafted, as known before any was drawn.
            max_tokens: proxy tokens wanted at most.
            alone: the rows must not depend on other requests.
        """
        if drafted.law_ids is not None and drafted.law_probs is not None and self._with_laws is not None:
            draft = _SampledDraft(
                ids_in_draft_vocab=drafted.ids_in_draft_vocab,
                law_ids=drafted.law_ids,
                law_probs=drafted.law_probs,
                planned_steps=planned_steps,
                max_tokens=max_tokens,
                alone=alone,
            )
            return self._with_laws(draft)
        if self.restricts_draft:
            return self._shared_prefix(drafted, max_tokens=max_tokens)
        proxy = self._pair.proxy_tokenizer.proxy(drafted.ids_in_draft_vocab)[:max_tokens]
        return Proposal(ids_in_target_vocab=proxy) if proxy else NOTHING

    def _exact_proposal(self, draft: _SampledDraft) -> Proposal:
        assert self._exact is not None
        return _by_chunks(self._exact.transfer, draft, self._exact.extendable(alone=draft.alone))

    def _tli_proposal(self, draft: _SampledDraft) -> Proposal:
        return _by_chunks(self._tli, draft, self._nothing)

    def _paper_proposal(self, draft: _SampledDraft) -> Proposal:
        proxy = self._pair.proxy_tokenizer.proxy(draft.ids_in_draft_vocab)
        if not proxy:
            return NOTHING
        # Aligned whole and cut after: the last token kept is not the last one drafted.
        (last_draft_index,) = self._pair.last_draft_index([draft.ids_in_draft_vocab], [proxy])
        rows = paper_rows(
            ids_in_draft_vocab=draft.ids_in_draft_vocab,
            law_ids=draft.law_ids,
            law_probs=draft.law_probs,
            ids_in_target_vocab=proxy[: draft.max_tokens],
            last_draft_index=last_draft_index[: draft.max_tokens],
        )
        return Proposal(ids_in_target_vocab=proxy[: draft.max_tokens], rows=rows)

    def _shared_prefix(self, drafted: DraftedTokens, *, max_tokens: int) -> Proposal:
        proxy: list[int] = []
        for draft_id in drafted.ids_in_draft_vocab[:max_tokens]:
            target_id = int(self._target_of_draft[draft_id])
            if target_id < 0:
                break
            proxy.append(target_id)
            if draft_id in self._pair.draft.end_ids:
                break
        return Proposal(ids_in_target_vocab=proxy) if proxy else NOTHING


def _by_chunks(transfer: ChunkTransfer, draft: _SampledDraft, extendable: Extendable) -> Proposal:
    return transfer.transfer(
        draft.ids_in_draft_vocab,
        law_ids=draft.law_ids,
        law_probs=draft.law_probs,
        extendable=extendable,
        planned_steps=draft.planned_steps,
        max_tokens=draft.max_tokens,
    )


def _arms(options: TokenTimingConfig) -> tuple[Arm, ...]:
    if options.transfer == "slem" or options.draft_temperature == 0:
        return (GREEDY,)
    if options.draft_temperature is not None:
        return (_FIXED,)
    if options.transfer == "exact":
        return ARMS
    # A point mass is accepted with the target's probability of its token, so there the draft's likeliest token is the
    # best guess at any temperature. TLI and the paper draw from the draft's law at the request's own temperature.
    return (GREEDY,) if options.transfer == "point_mass" else (Arm(name="sampled", sharpening=1.0),)
