"""vLLM's scheduler, but no step of a new request is padded with proposals that nobody made.

Symptom with vLLM's own: a request whose first step needs one token only (a prompt of one token, or one that the prefix
cache holds up to its last) gets ``num_speculative_tokens`` proposals of id -1 if others are running. Its seed then
gives another output than alone, the step verifies for nothing, and for want of their rows the whole batch loses its
draft probabilities.
Cause: steps of one shape keep full CUDA graphs, which proposals of varying length do not have anyway.
Removal: when vLLM pads only where the proposer always fills its proposals.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class UnpaddedScheduler(Scheduler):  # type: ignore[misc]  # untyped in vLLM
    """A scheduler with a schedule of speculative tokens, which vLLM does not pad: the same number at every size."""

    dynamic_sd_lookup: list[int] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.dynamic_sd_lookup is None and self.num_spec_tokens:
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.scheduler_config.max_num_seqs + 1)
