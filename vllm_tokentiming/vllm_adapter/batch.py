"""Rows of vLLM's batch as requests of the pipeline. Owns what does not change of the requests of the last batch.

vLLM hands a proposer token ids by row, and rows move between steps. Everything else (ids, sampling parameters, limits)
is read from the model runner, which the wrap of ``propose_draft_token_ids`` (see ``seam``) hands over for the duration
of a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.requests import TargetRequest


class BatchReader:
    """Reads one runner's batches.

    Args:
        max_model_len: of the target.
        max_proposal: ``num_speculative_tokens``.
    """

    def __init__(self, *, max_model_len: int, max_proposal: int) -> None:
        self._max_model_len = max_model_len
        self._max_proposal = max_proposal
        self._known: dict[str, _Constants] = {}

    def read(
        self,
        runner: Any,
        *,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
    ) -> list[TargetRequest | None]:
        """The requests of the rows that were sampled; None where a row cannot be speculated on at all.

        Args:
            runner: the ``GPUModelRunner`` whose step this is.
            sampled_token_ids: per valid row, the tokens just committed; empty for an unfinished prefill.
            num_tokens_no_spec: per row, tokens known so far, those included.
            token_ids: [rows, max_model_len], the tokens.
        """
        requests: list[TargetRequest | None] = []
        known: dict[str, _Constants] = {}
        request_ids, states = runner.input_batch.req_ids, runner.requests
        for row, sampled in enumerate(sampled_token_ids):
            request_id = request_ids[row]
            state = states.get(request_id)
            if state is None or state.sampling_params is None or state.prompt_embeds is not None or state.mm_features:
                # Embeddings and images have no text that a draft could read.
                requests.append(None)
                continue
            constants = self._known.get(request_id)
            if constants is None or constants.params is not state.sampling_params:
                constants = _constants(state.sampling_params)
            known[request_id] = constants
            num_tokens = int(num_tokens_no_spec[row])
            requests.append(
                TargetRequest(
                    request_id,
                    state,
                    token_ids[row, :num_tokens],
                    self._limit(state, constants, num_tokens) if sampled else 0,
                    constants.temperature,
                    constants.seed,
                    constants.checks_values,
                )
            )
        self._known = known
        return requests

    def _limit(self, state: Any, constants: _Constants, num_tokens: int) -> int:
        # The verifier adds one token of its own to what it accepts, so the last wanted token is never worth proposing.
        limit = min(self._max_proposal, self._max_model_len - num_tokens - 1)
        num_output = num_tokens - state.num_prompt_tokens
        if constants.max_tokens is not None:
            limit = min(limit, constants.max_tokens - num_output - 1)
        if num_output < constants.min_tokens:
            # vLLM 0.32 forbids that token to end the request by the output's length before the step, so it must not
            # stand where the request may end.
            limit = min(limit, constants.min_tokens - num_output - 1)
        return max(0, limit)


class _Constants(NamedTuple):
    """What stays the same of a request as long as its sampling parameters are the same object."""

    params: Any
    max_tokens: int | None
    min_tokens: int
    temperature: float
    seed: int | None
    checks_values: bool


def _constants(params: Any) -> _Constants:
    return _Constants(
        params=params,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens if params.all_stop_token_ids else 0,
        temperature=float(params.temperature),
        seed=_draft_seed(params.seed),
        checks_values=params.structured_outputs is not None,
    )


def _draft_seed(seed: int | None) -> int | None:
    """A seed for the draft's own stream: the verifier uses the request's, and the two must be independent."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"tokentiming draft {seed}".encode()).digest()[:7], "big")
