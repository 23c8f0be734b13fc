"""How does the draft run whole on each rank of a target that is split over several?

A draft is small: split over ranks, two all-reduces a layer cost a step more than they save, and its heads often do not
divide (SmolLM2-135M has nine). So each rank holds all of it and computes the same proposals. vLLM's layers ask the
process's tensor- and pipeline-parallel groups how they are split; while the draft is built and run, those are groups of
this rank alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator

if TYPE_CHECKING:
    import torch
    from vllm.config import ParallelConfig


class SoloGroup(GroupCoordinator):  # type: ignore[misc]  # untyped in vLLM
    """A group of this rank alone, whose collectives do nothing.

    Not built as vLLM builds its groups, which every process of the world must take part in: under pipeline parallelism
    only the last stage has a draft.
    """

    def __init__(self, device: torch.device) -> None:
        world = parallel_state.get_world_group()
        self.unique_name = "tokentiming_draft"
        self.rank, self.local_rank, self.device_index = world.rank, world.local_rank, world.local_rank
        self.ranks, self.group_ranks = [world.rank], [[world.rank]]
        self.world_size, self.rank_in_group = 1, 0
        self.device = device
        self.use_device_communicator = self.use_custom_op_call = self.use_cpu_custom_send_recv = False
        self.device_communicator = self.mq_broadcaster = None


class WholeModel:
    """Makes the draft's build and passes those of a process that is split with no other.

    Args:
        parallel: the target's.
        device: where the draft runs.
    """

    def __init__(self, parallel: ParallelConfig, *, device: torch.device) -> None:
        is_split = parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1
        self._solo = SoloGroup(device) if is_split else None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The groups that vLLM's layers see are this rank's alone. Nothing changes for a target on one rank."""
        if self._solo is None:
            yield
            return
        groups = parallel_state._TP, parallel_state._PP
        parallel_state._TP = parallel_state._PP = self._solo
        try:
            yield
        finally:
            parallel_state._TP, parallel_state._PP = groups
