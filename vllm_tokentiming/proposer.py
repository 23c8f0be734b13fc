"""``TokenTimingProposer``: the class that vLLM loads as its ``custom_class`` speculative proposer.

Thin: it reads the options, builds the rooms when vLLM loads models, and in each step hands the batch to the pipeline.
All state lives in the pipeline and the engine, keyed by request id.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_tokentiming.metrics import Metrics
from vllm_tokentiming.vllm_adapter.batch import BatchReader
from vllm_tokentiming.vllm_adapter.compat import require_supported_vllm
from vllm_tokentiming.vllm_adapter.draft_check import options_of
from vllm_tokentiming.vllm_adapter.draft_rows import DraftRows, RaggedRows
from vllm_tokentiming.vllm_adapter.patches import apply_patches
from vllm_tokentiming.vllm_adapter.seam import install_seam
from vllm_tokentiming.vllm_adapter.start_up import build_pipeline

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from vllm.config import VllmConfig

    from vllm_tokentiming.pipeline import Pipeline
    from vllm_tokentiming.transfer.interface import Proposals

logger = logging.getLogger(__name__)


class TokenTimingProposer:
    """Proposes tokens for vLLM's V1 model runner.

    Args:
        vllm_config: the target's; options are in ``additional_config["tokentiming"]``.

    Raises:
        ConfigError: an option, the draft or the environment cannot work.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        require_supported_vllm()
        self._vllm_config = vllm_config
        self._options, self._max_proposal = options_of(vllm_config)
        self._device = torch.device(vllm_config.device_config.device)
        self._metrics = Metrics()
        self._pipeline: Pipeline | None = None
        self._runner: Any = None
        self._rows: RaggedRows | None = None
        model_config = vllm_config.model_config
        self._reader = BatchReader(max_model_len=model_config.max_model_len, max_proposal=self._max_proposal)
        self._draft_rows = DraftRows(
            vocab_size=model_config.get_vocab_size(),
            device=self._device,
            max_rows=vllm_config.scheduler_config.max_num_seqs * self._max_proposal,
        )
        apply_patches(self._device)
        install_seam(TokenTimingProposer)

    def load_model(self, target_model: object) -> None:
        """Load the draft; called by vLLM after the target is loaded, inside its memory accounting on GPU."""
        del target_model
        self._pipeline = build_pipeline(
            self._vllm_config, self._options, max_proposal=self._max_proposal, metrics=self._metrics
        )

    def begin_step(self, runner: Any) -> None:
        """The step of this runner begins (called by the seam)."""
        self._runner = runner
        self._rows = None

    def take_rows(self) -> RaggedRows | None:
        """The rows of the proposals just returned, once (called by the seam)."""
        rows, self._rows = self._rows, None
        return rows

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Propose 0 to ``num_speculative_tokens`` target tokens for each row; never raises.

        Args:
            sampled_token_ids: tokens just committed, by row; empty for an unfinished prefill.
            num_tokens_no_spec: int32 [rows], known tokens by row, those included.
            token_ids_cpu: int32 [rows, max_model_len].
            slot_mappings: the target's slots; the draft has its own.
        """
        del slot_mappings
        nothing: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._runner is None or self._pipeline is None:
            return nothing
        try:
            self._pipeline.retain(self._runner.requests)
            requests = self._reader.read(
                self._runner,
                sampled_token_ids=sampled_token_ids,
                num_tokens_no_spec=num_tokens_no_spec,
                token_ids=token_ids_cpu,
            )
            most_rows = sum(request.max_proposal for request in requests if request is not None)
            allow_rows = most_rows <= self._draft_rows.capacity
            if not allow_rows:
                self._metrics.rows_dropped()
            proposals = self._pipeline.propose(requests, allow_rows=allow_rows)
            self._rows = self._fill_rows(proposals)
        except Exception:  # noqa: BLE001 - the server must not die of speculation
            self._rows = None
            for _ in sampled_token_ids:
                self._metrics.silent("proposer_failed")
            self._metrics.warn_once(
                "proposer_failed", "a step goes on without proposals: the proposer failed", exc_info=True
            )
            return nothing
        finally:
            self._metrics.end_cycle()
        return proposals.ids_in_target_vocab

    def _fill_rows(self, proposals: Proposals) -> RaggedRows | None:
        begun = time.perf_counter()
        rows = self._draft_rows.fill(proposals)
        self._metrics.spent("rows", time.perf_counter() - begun)
        return rows
