"""What a draft engine is: the one seam between the pipeline and whatever runs the draft model."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class Silence(enum.StrEnum):
    """Why a request has no proposal this cycle; also the label of the counter."""

    CONTEXT_TOO_LONG = "context_too_long"
    PREFILLING = "prefilling"
    CACHE_EXHAUSTED = "cache_exhausted"
    NOT_FINITE = "not_finite"
    WARMING = "warming"


class DraftSampling(NamedTuple):
    """How one request's draft tokens are drawn.

    Attributes:
        temperature: 0 drafts greedily; else the draft's laws are its softmax at this temperature.
        top_k: the laws are restricted to this many tokens and renormalised *before* sampling, so they are exactly the
            distributions that the tokens were drawn from.
        seed: of this request's draws in this cycle (equal seeds give equal draws), or None for the engine's stream.
        shared_only: the laws are restricted to the tokens of ``DraftEngine.restrict``, also before sampling.
    """

    temperature: float
    top_k: int
    seed: int | None = None
    shared_only: bool = False


class DraftRequest(NamedTuple):
    """One request's part in a cycle. A named tuple, which is quicker to make than a dataclass.

    Attributes:
        request_id: key of the request's KV and random state inside the engine.
        context_ids: the whole context in the draft's vocabulary, BOS included. The engine compares it with what its KV
            holds, rolls back to the first difference and computes the rest. It does not keep or change the list.
        num_steps: tokens to draft at most; 0 only warms the KV.
        num_stable: so many leading context ids are the same as in this request's previous call (a lower bound; it only
            saves the comparison).
        sampling: None drafts greedily and returns no laws.
    """

    request_id: str
    context_ids: Sequence[int]
    num_steps: int
    num_stable: int = 0
    sampling: DraftSampling | None = None


class DraftedTokens(NamedTuple):
    """What the draft proposed for one request.

    Attributes:
        ids_in_draft_vocab: the drafted tokens, at most ``num_steps``.
        reason: why there are none, for the counter; None when there are.
        law_ids: int32 [len(ids), top_k], the support of each token's law, or None for a greedy draft.
        law_probs: float64 [len(ids), top_k], its probabilities, each row summing to 1; positions without mass are 0.
    """

    ids_in_draft_vocab: list[int]
    reason: Silence | None = None
    law_ids: npt.NDArray[np.int32] | None = None
    law_probs: npt.NDArray[np.float64] | None = None


class StopRule(Protocol):
    """Decides, before each step's tokens are drawn, whether another step follows."""

    def more(self, indices: Sequence[int], confidence: Sequence[float], /) -> bool:
        """Take note of one step's laws.

        Args:
            indices: the requests that draft a token in this step, by their place in the batch.
            confidence: the largest probability that the draft gives any token, at temperature 1, for each of them.
        """


class DraftEngine(Protocol):
    """Runs one draft model for a batch of requests. Owns its weights, KV and random numbers, keyed by request id."""

    @property
    def vocab_size(self) -> int:
        """Rows of the draft's logits."""

    @property
    def max_model_len(self) -> int:
        """Longest context plus drafted tokens."""

    def draft(self, requests: Sequence[DraftRequest], stop_rule: StopRule | None = None) -> list[DraftedTokens]:
        """Draft for every request, in order.

        Args:
            requests: the batch.
            stop_rule: asked in each step; without it every request drafts its ``num_steps``. An engine may draft on
                after the rule said stop; what was drafted after that is for the caller to leave out.

        Raises:
            DraftEngineError: the step failed as a whole; the KV of the requests is then dropped.
        """

    def restrict(self, allowed: npt.NDArray[np.bool_]) -> None:
        """Name the tokens, bool [vocab_size], that requests with ``shared_only`` may draft."""

    def release(self, request_id: str) -> None:
        """Free what is kept for a request; unknown ids are ignored."""

    def describe(self) -> str:
        """One line for the start-up log: engine, dtype, KV budget."""
