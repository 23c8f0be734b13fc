"""What was asked for, and can it work? Checked before anything is loaded.

Runs in the front-end process too, so that a refusal is the last line a user sees. Imports no numba: vLLM's CPU build
fails to register its kernels in a process that has llvmlite loaded, which matters where the engine runs in the
front-end's process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tokentiming.config import OPTIONS_KEY, TokenTimingConfig, check_num_speculative_tokens
from vllm_tokentiming.errors import ConfigError
from vllm_tokentiming.vocabulary import SpecialTokenMap, Vocabulary

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


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
            f'the draft model is not named: additional_config["{OPTIONS_KEY}"] is {options!r}. Required: e.g. '
            '--additional-config \'{"tokentiming": {"draft_model": "…"}}\', or --speculative-config with '
            '"method": "tokentiming" and "model": "…".'
        )
    return TokenTimingConfig.from_mapping(options), check_num_speculative_tokens(speculative.num_speculative_tokens)


def check_draft(target: ModelConfig, options: TokenTimingConfig) -> None:
    """Refuse a draft that cannot work, before anything is loaded.

    Raises:
        ConfigError, UnsupportedModelError, VocabularyError
    """
    from vllm_tokentiming.engine.vllm_config import draft_model_config

    _require_path("draft model", options.draft_model)
    if options.draft_tokenizer is not None:
        _require_path("draft_tokenizer", options.draft_tokenizer)
    draft = load_vocabulary(draft_model_config(target, options))
    if not target.skip_tokenizer_init:
        SpecialTokenMap.build(load_vocabulary(target), draft, options.special_token_pairs)


def _require_path(what: str, name: str) -> None:
    """Say at once that a path leads nowhere; Hugging Face's libraries would take it for a Hub id and look for that.

    Raises:
        ConfigError
    """
    if name.startswith(("/", ".", "~")) and not Path(name).exists():
        raise ConfigError(
            f"the {what} {name!r} does not exist on this machine. Required: the path of a model's folder, or a Hub id "
            "such as HuggingFaceTB/SmolLM2-135M-Instruct. Correct the path."
        )


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
