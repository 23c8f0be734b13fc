"""The draft's own ``VllmConfig``: how vLLM is told to load a second model beside the target."""

from __future__ import annotations

import dataclasses
import logging

from vllm.config import CompilationMode, CUDAGraphMode, ModelConfig, VllmConfig
from vllm.config.utils import replace

from vllm_tokentiming.config import TokenTimingConfig
from vllm_tokentiming.errors import ConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)


def make_draft_vllm_config(target: VllmConfig, options: TokenTimingConfig) -> VllmConfig:
    """A config like the target's, with the draft as its model.

    The compilation config is rebuilt, so its ``static_forward_context`` is empty: the draft's layers stay out of the
    target's KV cache spec.

    Raises:
        ConfigError: vLLM cannot build a model config for the draft (no such path, no architecture it knows, …).
        UnsupportedModelError: it can, but the model does not generate text.
    """
    model_config = draft_model_config(target.model_config, options)
    compilation_config = replace(target.compilation_config)
    if model_config.enforce_eager:
        compilation_config.mode = CompilationMode.NONE
        compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    return replace(
        target,
        model_config=model_config,
        quant_config=None,
        compilation_config=compilation_config,
        cache_config=replace(target.cache_config),
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        kv_events_config=None,
        additional_config={},
    )


def draft_model_config(target: ModelConfig, options: TokenTimingConfig) -> ModelConfig:
    """The draft's model config; cheap, so that a draft that cannot work is refused before anything is loaded.

    Raises:
        ConfigError, UnsupportedModelError: see :func:`make_draft_vllm_config`.
    """
    eager = target.enforce_eager if options.draft_enforce_eager is None else options.draft_enforce_eager
    try:
        model_config = ModelConfig(
            model=options.draft_model,
            tokenizer=options.draft_tokenizer or options.draft_model,
            revision=options.draft_revision,
            tokenizer_revision=options.draft_revision,
            dtype=target.dtype if options.draft_dtype == "auto" else options.draft_dtype,
            quantization=options.draft_quantization,
            trust_remote_code=options.draft_trust_remote_code,
            max_model_len=options.draft_max_model_len,
            seed=target.seed,
            enforce_eager=eager,
        )
    except Exception as error:
        raise ConfigError(
            f"vLLM cannot use {options.draft_model!r} as a draft model: {_first_line(error)} "
            "Required: a folder or Hub id with a config.json and weights of a decoder-only model that vLLM supports. "
            "Check the path, or HF_HUB_OFFLINE, or draft_trust_remote_code for models that bring code."
        ) from error
    if model_config.runner_type != "generate" or model_config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{options.draft_model!r} ({', '.join(model_config.architectures)}) does not generate text: vLLM runs it "
            f"as {model_config.runner_type!r}. Required: a decoder-only language model. Choose another draft."
        )
    return model_config


def _first_line(error: Exception) -> str:
    if dataclasses.is_dataclass(error):
        return type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A pydantic ValidationError says how many errors there are first, and what is wrong below.
    text = next((line for line in lines if "error" not in line.lower()[:24] or len(lines) == 1), type(error).__name__)
    if len(lines) > 1 and "validation error" in lines[0]:
        text = lines[1].removeprefix("Value error, ").partition(" [type=")[0]
    return text if text.endswith(".") else text + "."
