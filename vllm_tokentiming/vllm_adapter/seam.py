"""The wrap of ``GPUModelRunner.propose_draft_token_ids``: whose step it is, and where rows go.

Symptom without it: a ``custom_class`` proposer gets token ids by row and nothing else, and its probabilities are never
read.
Cause: vLLM calls ``propose`` without request ids, and takes draft probabilities from its own proposers only.
Removal: when vLLM hands custom proposers the runner's batch and takes their ``take_last_draft_probs``.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from vllm_tokentiming.vllm_adapter.draft_rows import RaggedRows


class SeamProposer(Protocol):
    """What the wrap needs of a proposer."""

    def begin_step(self, runner: Any) -> None:
        """The step of this runner begins."""

    def take_rows(self) -> RaggedRows | None:
        """The rows of the proposals just returned, once."""


def install_seam(proposer_type: type) -> None:
    """Wrap the runner's method, once per process; runners with other proposers are not affected."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    stock = GPUModelRunner.propose_draft_token_ids
    if getattr(stock, "_tokentiming", False):
        return

    @functools.wraps(stock)
    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if not isinstance(drafter, proposer_type):
            return stock(self, *args, **kwargs)
        proposer: SeamProposer = drafter  # type: ignore[assignment]
        proposer.begin_step(self)
        proposals = stock(self, *args, **kwargs)
        # After the call: the runner resets both at its start.
        rows = proposer.take_rows()
        if rows is not None:
            self._draft_probs = rows
            self._draft_prob_req_ids = self.input_batch.req_ids.copy()
        return proposals

    propose_draft_token_ids._tokentiming = True  # type: ignore[attr-defined]
    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids
