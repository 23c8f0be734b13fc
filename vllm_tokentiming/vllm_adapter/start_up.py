"""From vLLM's config to a running pipeline: which options were given, what they describe, and one log line that says so."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm_tokentiming.config import OPTIONS_KEY, TokenTimingConfig, check_num_speculative_tokens
from vllm_tokentiming.errors import ConfigError
from vllm_tokentiming.metrics import Metrics
from vllm_tokentiming.pair import Pair
from vllm_tokentiming.pipeline import Pipeline
from vllm_tokentiming.proposal_modes import ProposalMode
from vllm_tokentiming.vocabulary import SpecialTokenMap, Vocabulary, overlap

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_tokentiming.engine.interface import DraftEngine

logger = logging.getLogger(__name__)

def options_of(config: VllmConfig) -> tuple[TokenTimingConfig, int]:
    """The plugin's options and the number of speculative tokens of a vLLM config.

    Raises:
        ConfigError: they are missing or invalid.
    """
    speculative = config.speculative_config
    if speculative is None:
        raise ConfigError("TokenTimingProposer needs --speculative-config. See the README for the flag.")
    additional = config.additional_config if isinstance(config.additional_config, dict) else {}
    options = additional.get(OPTIONS_KEY)
    if not isinstance(options, dict):
        raise ConfigError(
            f'the draft model is not named: additional_config["{OPTIONS_KEY}"] is {options!r}. Required: a mapping such as '
            '--additional-config \'{"tokentiming": {"draft_model": "…"}}\', or --speculative-config with '
            '"method": "tokentiming" and "model": "…".'
        )
    return TokenTimingConfig.from_mapping(options), check_num_speculative_tokens(speculative.num_speculative_tokens)


def check_draft(target: ModelConfig, options: TokenTimingConfig) -> None:
    """Refuse, before anything is loaded, a draft that cannot work. Runs in the front-end process, so its error is the last line.

    Raises:
        ConfigError, UnsupportedModelError, VocabularyError
    """
    from vllm_tokentiming.engine.vllm_config import draft_model_config

    model_config = draft_model_config(target, options)
    load_vocabulary(model_config)
    if not target.skip_tokenizer_init:
        load_vocabulary(target)


def load_vocabulary(model_config: ModelConfig) -> Vocabulary:
    """The vocabulary of a model, through vLLM's own tokenizer loading.

    Raises:
        ConfigError: there is no tokenizer to load.
        VocabularyError: its tokens cannot be mapped to bytes.
    """
    from transformers import AutoTokenizer

    try:
        # Not vLLM's cached wrapper: it may be a subclass without the fast backend, which the byte table is read from.
        tokenizer = AutoTokenizer.from_pretrained(
            model_config.tokenizer,
            revision=model_config.tokenizer_revision,
            trust_remote_code=model_config.trust_remote_code,
        )
    except Exception as error:
        raise ConfigError(
            f"the tokenizer {model_config.tokenizer!r} cannot be loaded: {error} Required: a folder or Hub id with a "
            "tokenizer.json. Name it with draft_tokenizer (the draft's) or --tokenizer (the target's)."
        ) from error
    return Vocabulary.from_tokenizer(
        tokenizer, model_vocab_size=model_config.get_vocab_size(), name=str(model_config.tokenizer)
    )


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


def build_pipeline(
    config: VllmConfig, options: TokenTimingConfig, *, max_proposal: int, metrics: Metrics
) -> Pipeline:
    """Load the draft and both vocabularies, warm everything up, and log one line about the pair.

    Raises:
        ConfigError, VocabularyError: the pair cannot work.
    """
    from vllm_tokentiming.engine.vllm_config import draft_model_config

    target = load_vocabulary(config.model_config)
    draft = load_vocabulary(draft_model_config(config.model_config, options))
    special_tokens = SpecialTokenMap.build(target, draft, options.special_token_pairs)
    engine = build_engine(config, options)
    if options.transfer == "paper":
        logger.warning(
            "transfer=paper is NOT lossless: it changes the target's output distribution at temperature > 0. It is kept to "
            "reproduce the paper (arXiv 2510.15545); use transfer=point_mass to serve users."
        )
    mode = ProposalMode(Pair(target, draft, special_tokens, window_radius=options.window_radius), options)
    if mode.restricts_draft:
        engine.restrict(mode.shared_tokens())
    pipeline = Pipeline(
        mode=mode, engine=engine, num_draft_tokens=options.num_draft_tokens or max_proposal, metrics=metrics
    )
    shared = overlap(target, draft)
    logger.info(
        "TokenTiming is on: %s drafts for %s; vocabularies draft %d (%s), target %d (%s), %d tokens in common (%.0f %% of the "
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
