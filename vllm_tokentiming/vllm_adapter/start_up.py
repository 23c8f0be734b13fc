"""From vLLM's config to a running pipeline, and one log line that says what runs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm_tokentiming.adaptive_length import AdaptiveLength
from vllm_tokentiming.config import TokenTimingConfig
from vllm_tokentiming.draft_length import DraftLength, FixedLength
from vllm_tokentiming.metrics import Metrics
from vllm_tokentiming.pair import Pair
from vllm_tokentiming.pipeline import Pipeline
from vllm_tokentiming.proposal_modes import ProposalMode
from vllm_tokentiming.repeats import RepeatAcceptance
from vllm_tokentiming.vllm_adapter.compat import warn_of_costly_verification
from vllm_tokentiming.vllm_adapter.draft_check import load_vocabulary
from vllm_tokentiming.vocabulary import SpecialTokenMap, overlap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_tokentiming.engine.interface import DraftEngine

logger = logging.getLogger(__name__)


def build_engine(config: VllmConfig, options: TokenTimingConfig) -> DraftEngine:
    """Load the draft model."""
    if options.engine == "transformers":
        from vllm_tokentiming.engine.transformers_engine import TransformersDraftEngine

        return TransformersDraftEngine.from_options(
            options,
            device=str(config.device_config.device),
            dtype=config.model_config.dtype,
            max_num_seqs=config.scheduler_config.max_num_seqs,
        )
    from vllm_tokentiming.engine.vllm_engine import VllmDraftEngine

    return VllmDraftEngine(config, options)


def build_length(options: TokenTimingConfig, max_proposal: int, *, timed: bool = True) -> DraftLength:
    """How much is drafted; ``timed``: what a cycle takes may decide."""
    num_draft_tokens = options.num_draft_tokens or max_proposal
    if options.adaptive_length:
        return AdaptiveLength(num_draft_tokens=num_draft_tokens, timed=timed)
    return FixedLength(num_draft_tokens=num_draft_tokens)


def build_pipeline(config: VllmConfig, options: TokenTimingConfig, *, max_proposal: int, metrics: Metrics) -> Pipeline:
    """Load the draft and both vocabularies, warm everything up, and log one line about the pair.

    Raises:
        ConfigError, VocabularyError: the pair cannot work.
    """
    from vllm_tokentiming.engine.vllm_config import draft_model_config

    target = load_vocabulary(config.model_config)
    draft = load_vocabulary(draft_model_config(config.model_config, options))
    special_tokens = SpecialTokenMap.build(target, draft, options.special_token_pairs)
    warn_of_costly_verification(device_type=config.device_config.device_type, dtype=config.model_config.dtype)
    engine = build_engine(config, options)
    if options.transfer == "paper":
        logger.warning(
            "transfer=paper is NOT lossless: it changes the target's output distribution at temperature > 0. It is "
            "kept to "
            "reproduce the paper (arXiv 2510.15545); use transfer=exact to serve users."
        )
    mode = ProposalMode(Pair(target, draft, special_tokens, window_radius=options.window_radius), options)
    if mode.restricts_draft:
        engine.restrict(mode.shared_tokens())
    pipeline = Pipeline(
        mode=mode,
        engine=engine,
        # Ranks have a clock each, and must draft alike.
        length=build_length(options, max_proposal, timed=config.parallel_config.tensor_parallel_size == 1),
        metrics=metrics,
        repeats=RepeatAcceptance() if options.repeats else None,
    )
    shared = overlap(target, draft)
    logger.info(
        "TokenTiming is on: %s drafts for %s; vocabularies draft %d (%s), target %d (%s), %d tokens in common (%.0f "
        "%% of the "
        "target's); transfer %s; %d speculative tokens; engine %s",
        options.draft_model,
        config.model_config.model,
        draft.size,
        draft.kind.value,
        target.size,
        target.kind.value,
        shared,
        100 * shared / max(1, target.size),
        options.transfer,
        max_proposal,
        engine.describe(),
    )
    return pipeline
