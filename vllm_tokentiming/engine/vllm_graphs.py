"""Which passes of the draft are replayed as CUDA graphs, and when are those captured?

On a GPU a small draft waits for its kernels to be launched, some hundreds a pass, and not for what they compute. vLLM's
wrappers record them and replay them at once: the whole model for a decode step, a token of each row; what lies between
two attentions, for other short passes of a compiled model. vLLM's dispatcher says to which size a pass is padded.

Owns the wrapper around the draft and the list of what has been captured. A size is captured in the cycle that first
needs it, right after that cycle's own pass, which is taken without a graph: between ``load_model`` and the first
request vLLM drops every graph of the process while it profiles memory. A graph reads and writes the addresses that it
was captured with, so the tensors of a pass must be views of buffers that stay, all of which begin at their first entry.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.compilation import monitor
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.utils import AttentionGroup

logger = logging.getLogger(__name__)

_MOST_TOKENS: Final = 128
"""Of a pass other than a decode step. Longer ones read prompts, once a request: not worth a capture for each length."""


@dataclass(frozen=True, slots=True)
class Graph:
    """One that can be captured or replayed.

    Attributes:
        mode: FULL for the whole model, PIECEWISE for what lies between two attentions.
        descriptor: vLLM's key of it.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor

    @property
    def num_tokens(self) -> int:
        """Tokens of a pass, padding included."""
        return int(self.descriptor.num_tokens)

    @property
    def is_full(self) -> bool:
        """Whether attention is part of it, and so what attention is told: rows of padding, too."""
        return bool(self.mode == CUDAGraphMode.FULL)


def resolve_graph_mode(config: VllmConfig, groups: list[AttentionGroup]) -> None:
    """Leave in the draft's config the graphs that its attention backends can be part of; before their builders exist.

    Args:
        config: the draft's own.
        groups: its attention layers, by backend.
    """
    support, name = AttentionCGSupport.ALWAYS, None
    for group in groups:
        own = group.backend.get_builder_cls().get_cudagraph_support(config, group.kv_cache_spec)
        if own.value < support.value:
            support, name = own, group.backend.get_name()
    try:
        config.compilation_config.resolve_cudagraph_mode_and_sizes(support, name)
    except ValueError as error:
        # It is the target that this mode was chosen for.
        logger.warning("the draft model runs without CUDA graphs: %s", error)
        config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE


class DraftGraphs:
    """The draft's graphs.

    Args:
        model: the draft.
        config: its own, after :func:`resolve_graph_mode`.
        max_tokens: most tokens of a pass, padding included.
        max_rows: most rows of a decode step, padding included.
    """

    def __init__(self, model: Any, *, config: VllmConfig, max_tokens: int, max_rows: int) -> None:
        mode = config.compilation_config.cudagraph_mode
        is_wrapped = mode.has_full_cudagraphs()
        self.model = CUDAGraphWrapper(model, config, runtime_mode=CUDAGraphMode.FULL) if is_wrapped else model
        self._dispatcher = CudagraphDispatcher(config)
        self._dispatcher.initialize_cudagraph_keys(mode)
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._captured: set[Graph] = set()
        self._failed = False

    def of_step(self, rows: int) -> Graph | None:
        """For a decode step; None where it is taken without."""
        graph = self._dispatched(rows, is_step=True)
        if graph is None or graph.num_tokens > (self._max_rows if graph.is_full else self._max_tokens):
            return None
        return graph

    def of_pass(self, tokens: int) -> Graph | None:
        """For a pass with any number of tokens of each row; None where it is taken without."""
        graph = self._dispatched(tokens, is_step=False) if tokens <= _MOST_TOKENS else None
        return None if graph is None or graph.num_tokens > self._max_tokens else graph

    def _dispatched(self, tokens: int, *, is_step: bool) -> Graph | None:
        if self._failed:
            return None
        modes = {CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE} | ({CUDAGraphMode.FULL} if is_step else set())
        mode, descriptor = self._dispatcher.dispatch(tokens, uniform_decode=is_step, valid_modes=modes)
        return None if mode == CUDAGraphMode.NONE else Graph(mode, descriptor)

    def run(
        self,
        graph: Graph,
        *,
        take: Callable[[CUDAGraphMode], torch.Tensor],
        capture: Callable[[], object],
    ) -> torch.Tensor:
        """A pass: replayed where its graph has been captured; else taken without, and captured for the next time.

        Args:
            graph: from :meth:`of_step` or :meth:`of_pass`.
            take: takes the pass under a mode, and returns its hidden states.
            capture: calls the model under the graph's mode, which records the kernels and runs none.

        Returns:
            hidden states, [tokens, H]; the next pass overwrites them.
        """
        if graph in self._captured:
            return take(graph.mode)
        hidden = take(CUDAGraphMode.NONE)
        begun = time.perf_counter()
        try:
            with _capturing_on_a_stream_of_its_own():
                capture()
        except Exception:
            self._failed = True
            logger.warning(
                "the draft model goes on without CUDA graphs, with slower steps: capturing one for %d tokens failed",
                graph.num_tokens,
                exc_info=True,
            )
        else:
            self._captured.add(graph)
            seconds = time.perf_counter() - begun
            logger.info("captured a %s CUDA graph of %d tokens in %.2f s", graph.mode.name, graph.num_tokens, seconds)
        return hidden


@contextlib.contextmanager
def _capturing_on_a_stream_of_its_own() -> Iterator[None]:
    """As vLLM's ``graph_capture``, but for the groups' communicators: a draft calls none, and they may wait for others.

    vLLM forbids capturing once its own graphs are captured.
    """
    was_enabled = monitor.cudagraph_capturing_enabled
    own, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    own.wait_stream(current)
    monitor.set_cudagraph_capturing_enabled(True)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        monitor.set_cudagraph_capturing_enabled(was_enabled)
        current.wait_stream(own)
