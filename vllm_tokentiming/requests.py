"""What the target's batch says of a request, and what is kept of it between cycles.

Owns nothing: the pipeline owns the states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.draft_length import DraftRow, RequestAcceptance
from vllm_tokentiming.pair import BoundaryObserver
from vllm_tokentiming.policy import Arm, RequestPolicy
from vllm_tokentiming.repeats import Repeat, RequestRepeats
from vllm_tokentiming.vocabulary import DraftContext


class TargetRequest(NamedTuple):
    """One request of the target's batch. A named tuple, as all that is made for each request in each cycle.

    Attributes:
        request_id: key of all state.
        owner: the object that stands for this life of the request; an id that comes back with another owner is a new
            request.
        ids_in_target_vocab: int32 [L], prompt and output so far. A view: valid during the call only.
        max_proposal: most tokens to propose; 0 where the target's prefill is unfinished, which may still warm the
            draft.
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
class RequestState:
    """What is kept of a request between cycles.

    Attributes:
        owner: as in :class:`TargetRequest`.
        context: its text as the draft sees it.
        policy: which way to draft pays for it.
        acceptance: how its drafts fare.
        observer: watches its text for E, where E learns.
        repeats: the index of its text.
        num_stable: leading ids of the context that the engine has seen and that have not changed since.
        given_up: why it goes on without speculation for good.
        proposal: the last one, of which the next cycle tells how much was accepted; None where there was none.
    """

    owner: object
    context: DraftContext
    policy: RequestPolicy
    acceptance: RequestAcceptance
    observer: BoundaryObserver | None
    repeats: RequestRepeats
    num_stable: int = 0
    given_up: str | None = None
    proposal: Proposed | None = None


class Candidate(NamedTuple):
    """A request that drafts, repeats its own text, or warms its cache, in this cycle.

    Attributes:
        place: in the batch.
        request: as the target has it.
        state: what is kept of it.
        arm: the way to draft.
        row: its part in the decisions about length.
        repeat: what is proposed instead of a draft.
    """

    place: int
    request: TargetRequest
    state: RequestState
    arm: Arm
    row: DraftRow
    repeat: Repeat | None = None


class Proposed(NamedTuple):
    """A proposal that the verifier has not answered yet.

    Attributes:
        num_tokens: of the target's vocabulary.
        known_tokens: of the request's text before it.
        candidate: whose it is.
        appended: its last tokens, where they repeat the text after a draft.
    """

    num_tokens: int
    known_tokens: int
    candidate: Candidate
    appended: Repeat | None
