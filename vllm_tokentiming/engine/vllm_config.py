"""The draft's own ``VllmConfig``: how vLLM is told to load a second model beside the target."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch
from vllm.config import CacheConfig, CompilationMode, CUDAGraphMode, LoadConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.config.utils import replace
from vllm.platforms import current_platform

from vllm_tokentiming.config import TokenTimingConfig
from vllm_tokentiming.engine.int8_checkpoint import AUTO, INT8, int8_checkpoint, require_not_quantized
from vllm_tokentiming.errors import ConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)

_OF_THE_TARGET_ALONE = (
    "speculative_config",
    "lora_config",
    "kv_transfer_config",
    "kv_events_config",
    "ec_transfer_config",
    "weight_transfer_config",
    "watermark_config",
    # vLLM would look its tokens up in the draft's tokenizer, by a parser that the worker need not know.
    "reasoning_config",
)
_RUN_AS_INT8 = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM"})
"""Architectures of which int8 drafts have been run; others get int8 where it is asked for."""


def make_draft_vllm_config(target: VllmConfig, options: TokenTimingConfig) -> VllmConfig:
    """A config like the target's, with the draft as its model.

    The compilation config is rebuilt, so its ``static_forward_context`` is empty: the draft's layers stay out of the
    target's KV cache spec. Where the draft is to have int8 weights, they are made here, once.

    Raises:
        ConfigError: vLLM cannot build a model config for the draft (no such path, no architecture it knows, …), or its
            int8 weights cannot be made.
        UnsupportedModelError: it can, but the model does not generate text.
    """
    model_config = draft_model_config(target.model_config, options)
    if not _takes_int8_steps(model_config) and (folder := _int8_folder(target, model_config, options)) is not None:
        model_config = draft_model_config(target.model_config, options, int8_weights=folder)
    if options.draft_enforce_eager is None and _steps_by_hand(model_config):
        # Only long prompts go through vLLM's layers then, where compiling gains nothing and takes a minute.
        model_config.enforce_eager = True
    compilation_config = replace(target.compilation_config)
    if model_config.enforce_eager:
        compilation_config.mode = CompilationMode.NONE
        compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    return replace(
        target,
        model_config=model_config,
        quant_config=None,
        compilation_config=compilation_config,
        cache_config=_own_cache_config(target.cache_config),
        parallel_config=_whole_on_each_rank(target.parallel_config),
        additional_config={},
        **dict.fromkeys(_OF_THE_TARGET_ALONE),
    )


def _own_cache_config(target: CacheConfig) -> CacheConfig:
    own = replace(target)
    # A copy takes the default block size for the user's choice, and keeps one that the draft's kernels may not take.
    own.user_specified_block_size = target.user_specified_block_size
    return own


def _whole_on_each_rank(target: ParallelConfig) -> ParallelConfig:
    """See ``vllm_solo_group``. Nor does a draft keep step with those of other data-parallel engines."""
    if target.world_size_across_dp == 1:
        return target
    alone = ParallelConfig(max_parallel_loading_workers=target.max_parallel_loading_workers)
    alone.rank = target.rank  # part of where compiled code is kept
    return alone


def draft_model_config(
    target: ModelConfig, options: TokenTimingConfig, *, int8_weights: Path | None = None
) -> ModelConfig:
    """The draft's model config; cheap, so that a draft that cannot work is refused before anything is loaded.

    Args:
        target: the target's, which says what the options leave open.
        options: the plugin's.
        int8_weights: folder with the draft's weights, made int8; the tokenizer stays where it was.

    Raises:
        ConfigError, UnsupportedModelError: see :func:`make_draft_vllm_config`.
    """
    eager = target.enforce_eager if options.draft_enforce_eager is None else options.draft_enforce_eager
    try:
        model_config = ModelConfig(
            model=str(int8_weights or options.draft_model),
            tokenizer=options.draft_tokenizer or options.draft_model,
            revision=options.draft_revision if int8_weights is None else None,
            tokenizer_revision=options.draft_revision,
            dtype=target.dtype if options.draft_dtype == "auto" else options.draft_dtype,
            # Int8 weights are a checkpoint of their own, whose format vLLM detects.
            quantization=None if options.draft_quantization in (AUTO, INT8) else options.draft_quantization,
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
    if options.draft_quantization == INT8 and int8_weights is None:
        require_not_quantized(model_config.hf_config.to_dict(), options.draft_model)
        if model_config.dtype != torch.bfloat16 and not _takes_int8_steps(model_config):
            # vLLM's int8 kernel for CPUs refuses float32, and ends the process on float16.
            raise ConfigError(
                f"draft_quantization is 'int8', and the draft's activations are {model_config.dtype}. "
                "Required: bfloat16; or float32 for a Llama or Qwen2 draft on an x86 CPU with AVX2. Set draft_dtype to "
                "'bfloat16'."
            )
    return model_config


def int8_weights_of_steps(target: VllmConfig, draft: ModelConfig, options: TokenTimingConfig) -> Path | None:
    """Folder with int8 weights for the draft's passes beside its own ones; None where it takes them without.

    Made of the draft if they are not there. Where vLLM's kernels gain nothing by int8 weights, kernels of our own do.

    Raises:
        ConfigError: they are asked for and cannot be made.
    """
    return _int8_folder(target, draft, options) if _takes_int8_steps(draft) else None


def _takes_int8_steps(draft: ModelConfig) -> bool:
    if not _steps_by_hand(draft):
        return False
    # What it imports of vLLM is for CPUs.
    from vllm_tokentiming.engine.vllm_int8_layers import why_unfit_place

    # With AMX vLLM packs bfloat16 drafts' int8 weights such that our kernels can read them.
    dtypes = {torch.float32} if torch.cpu.get_capabilities().get("amx_tile") else {torch.float32, torch.bfloat16}
    return draft.dtype in dtypes and why_unfit_place() is None


def _int8_folder(target: VllmConfig, model_config: ModelConfig, options: TokenTimingConfig) -> Path | None:
    """Where the draft's int8 weights are; None where it runs with those that it has."""
    if options.draft_quantization == INT8:
        return int8_checkpoint(_local_folder(options, target.load_config))
    # Elsewhere vLLM's int8 kernels were not measured, or are slower than those for bfloat16.
    vllm_gains = model_config.dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("avx512_vnni")
    if (
        options.draft_quantization != AUTO
        or target.device_config.device_type != "cpu"
        or not (vllm_gains or _takes_int8_steps(model_config))
        or model_config.quantization is not None
        or not _RUN_AS_INT8.intersection(model_config.architectures)
    ):
        return None
    try:
        return int8_checkpoint(_local_folder(options, target.load_config))
    except ConfigError as error:
        logger.info("the draft keeps its weights as they are, since they cannot be made int8: %s", error)
        return None


def _local_folder(options: TokenTimingConfig, load: LoadConfig) -> Path:
    """The draft's files on this machine; those of a Hub id are fetched into the cache that vLLM uses."""
    if Path(options.draft_model).is_dir():
        return Path(options.draft_model)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                options.draft_model,
                revision=options.draft_revision,
                cache_dir=load.download_dir,
                allow_patterns=["*.safetensors", "*.json", "*.py"],
            )
        )
    except Exception as error:
        raise ConfigError(
            f"the weights of {options.draft_model!r} cannot be fetched for draft_quantization='int8': "
            f"{_first_line(error)} Required: a model's folder, or a Hub id that can be reached or is cached."
        ) from error


def _steps_by_hand(draft: ModelConfig) -> bool:
    if not current_platform.is_cpu():
        return False
    # What it imports of vLLM is for CPUs.
    from vllm_tokentiming.engine.vllm_decode_step import is_expected

    return is_expected(draft.architectures)


def _first_line(error: Exception) -> str:
    if dataclasses.is_dataclass(error):
        return type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A pydantic ValidationError says how many errors there are first, and what is wrong below.
    text = next((line for line in lines if "error" not in line.lower()[:24] or len(lines) == 1), type(error).__name__)
    if len(lines) > 1 and "validation error" in lines[0]:
        text = lines[1].removeprefix("Value error, ").partition(" [type=")[0]
    return text if text.endswith(".") else text + "."
