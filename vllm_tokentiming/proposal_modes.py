"""How a request's draft is sampled and becomes a proposal: one mode for each value of ``transfer``.

A mode decides what is drawn before it is drawn, and what rows its tokens get after. Modes share one class: they differ
in the arms that a request may choose from, and in what makes rows out of a sampled draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.config import TokenTimingConfig
from vllm_tokentiming.engine.interface import DraftSampling
from vllm_tokentiming.pair import BoundaryObserver, ExactPair, Pair
from vllm_tokentiming.policy import ARMS, FORCED, GREEDY, Arm, Policy, RequestPolicy
from vllm_tokentiming.transfer.extendable import Extendable
from vllm_tokentiming.transfer.interface import Draft, Proposals, SparseRows
from vllm_tokentiming.transfer.paper import paper_scalars
from vllm_tokentiming.transfer.special_cases import tli_transfer
from vllm_tokentiming.vocabulary import DraftContext

_FIXED = Arm(name="fixed", sharpening=1.0)


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
        self._with_laws: Callable[[Sequence[Draft], list[list[int] | None]], Proposals] | None = None
        if options.transfer == "exact":
            self._exact = ExactPair(
                pair,
                longest_run=options.longest_run,
                learn=options.extendable == "online",
                extend=options.extendable != "off",
            )
            self._with_laws = self._exact_proposals
        elif options.transfer == "paper":
            self._with_laws = self._paper_proposals
        elif options.transfer == "tli":
            self._target_of_draft = pair.shared_tokens()
            self._tli = tli_transfer(
                self._target_of_draft,
                target_vocab_size=pair.target.model_vocab_size,
                end_ids_in_draft_vocab=pair.draft.end_ids,
            )
            self._nothing = Extendable.nothing(pair.draft.model_vocab_size)
            self._with_laws = self._tli_proposals

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

    def proposals(self, drafts: Sequence[Draft]) -> Proposals:
        """Proxy tokens and rows of a batch of drafts; a draft without tokens gets none.

        Raises:
            ValueError, VocabularyError: a draft cannot be made a proposal.
        """
        with_laws = self._with_laws
        given = [None if with_laws and draft.law_ids is not None else self._re_tokenised(draft) for draft in drafts]
        if with_laws is not None and None in given:
            return with_laws(drafts, given)
        return Proposals([proxy or [] for proxy in given])

    def _re_tokenised(self, draft: Draft) -> list[int]:
        if draft.proxy is not None:
            return draft.proxy
        if self.restricts_draft:
            return self._shared_prefix(draft)
        return self._pair.proxy_tokenizer.proxy(draft.ids_in_draft_vocab)[: draft.max_tokens]

    def _exact_proposals(self, drafts: Sequence[Draft], given: list[list[int] | None]) -> Proposals:
        assert self._exact is not None
        return self._exact.transfer.transfer(
            drafts,
            given,
            extendable=self._exact.extendable(alone=False),
            extendable_alone=self._exact.extendable(alone=True),
        )

    def _tli_proposals(self, drafts: Sequence[Draft], given: list[list[int] | None]) -> Proposals:
        return self._tli.transfer(drafts, given, extendable=self._nothing)

    def _paper_proposals(self, drafts: Sequence[Draft], given: list[list[int] | None]) -> Proposals:
        del given
        # Aligned whole and cut after: the last token kept is not the last one drafted.
        proxies = [draft.proxy or self._pair.proxy_tokenizer.proxy(draft.ids_in_draft_vocab) for draft in drafts]
        last_draft_index = self._pair.last_draft_index([draft.ids_in_draft_vocab for draft in drafts], proxies)
        kept = [proxy[: draft.max_tokens] for draft, proxy in zip(drafts, proxies, strict=True)]
        scalars = [
            paper_scalars(
                ids_in_draft_vocab=draft.ids_in_draft_vocab,
                law_ids=draft.law_ids,
                law_probs=draft.law_probs,
                ids_in_target_vocab=proxy,
                last_draft_index=last[: len(proxy)],
            )
            for draft, proxy, last in zip(drafts, kept, last_draft_index, strict=True)
        ]
        rows = SparseRows.at_tokens(
            list(chain.from_iterable(kept)), np.concatenate(scalars), self._pair.target.model_vocab_size
        )
        return Proposals(kept, rows)

    def _shared_prefix(self, draft: Draft) -> list[int]:
        proxy: list[int] = []
        for draft_id in draft.ids_in_draft_vocab[: draft.max_tokens]:
            target_id = int(self._target_of_draft[draft_id])
            if target_id < 0:
                break
            proxy.append(target_id)
            if draft_id in self._pair.draft.end_ids:
                break
        return proxy


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
