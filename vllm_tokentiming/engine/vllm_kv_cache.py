"""The draft's KV tensors and attention metadata builders: how large they are, and how they are bound to its layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, bind_kv_cache, prepare_kernel_block_sizes

from vllm_tokentiming.engine.vllm_graphs import resolve_graph_mode
from vllm_tokentiming.errors import ConfigError, UnsupportedModelError

try:
    from vllm.v1.core import kv_cache_planning  # since 0.33
except ImportError:
    from vllm.v1.core import kv_cache_utils as kv_cache_planning

logger = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftKVCache:
    """The allocated cache.

    Attributes:
        num_blocks: blocks of ``block_size`` tokens, the null block included.
        block_size: tokens in a kernel block; block tables and slots count in these.
        num_bytes: memory taken.
        attention_groups: layers with one attention metadata each; all share one block table.
        tensors: of each layer, [num_blocks, heads, block_size, content] as vLLM views every layout.
    """

    num_blocks: int
    block_size: int
    num_bytes: int
    attention_groups: tuple[AttentionGroup, ...]
    tensors: tuple[torch.Tensor, ...]

    def build_metadata(self, common: Any, *, for_capture: bool = False) -> dict[str, Any]:
        """Attention metadata by layer name, for ``set_forward_context``.

        Args:
            common: vLLM's ``CommonAttentionMetadata``.
            for_capture: of the whole model as a CUDA graph; some backends overwrite the lengths then.
        """
        by_layer: dict[str, Any] = {}
        for group in self.attention_groups:
            builder = group.get_metadata_builder()
            if for_capture:
                metadata = builder.build_for_cudagraph_capture(common)
            else:
                metadata = builder.build(common_prefix_len=0, common_attn_metadata=common)
            by_layer.update(dict.fromkeys(group.layer_names, metadata))
        return by_layer

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks. Attention weighs what lies behind a context with 0, and 0 × NaN is NaN."""
        for tensor in self.tensors:
            tensor[torch.tensor(block_ids, dtype=torch.int64, device=tensor.device)] = 0

    def layer_names(self) -> list[str]:
        """All layers with KV."""
        return [name for group in self.attention_groups for name in group.layer_names]


def allocate_draft_kv_cache(config: VllmConfig, *, device: torch.device, memory: float | None) -> DraftKVCache:
    """Allocate the draft's cache and bind it to its layers.

    Args:
        config: the draft's own config, its model already loaded under it.
        device: where the cache lives.
        memory: GiB, or None for room for max_num_seqs × max_model_len, at most 1 GiB on CPU and 4 GiB elsewhere.

    Raises:
        UnsupportedModelError: the draft keeps state that is not attention KV, such as Mamba's.
        ConfigError: the budget does not hold one block.
    """
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    # As vLLM's executors do once a model is loaded: only its layers know which block sizes their kernels take.
    current_platform.update_block_size_for_backend(config)
    specs: dict[str, KVCacheSpec] = {}
    for name, layer in layers.items():
        spec = layer.get_kv_cache_spec(config)
        if spec is not None:
            specs[name] = spec
    _require_attention_only(config, specs)
    layout = _resolve_layout(config, layers)
    # One block table for all layers: sliding windows still bound what is attended to, only their memory is not saved.
    kv_cache_planning.unify_hybrid_kv_cache_specs(specs)
    groups = kv_cache_planning.get_kv_cache_groups(config, specs)
    if len(groups) != 1:
        raise UnsupportedModelError(
            f"{config.model_config.model!r} needs {len(groups)} kinds of KV cache. Required of a draft: attention "
            "layers that can share one block table. Choose another draft, or engine='transformers'."
        )
    bytes_per_block = sum(spec.page_size_bytes for spec in specs.values())
    block_size = groups[0].kv_cache_spec.block_size
    num_blocks = _num_blocks(
        config, bytes_per_block=bytes_per_block, block_size=block_size, memory=memory, device=device
    )
    config.cache_config.num_gpu_blocks_override = num_blocks
    cache_config = kv_cache_planning.get_kv_cache_config_from_groups(config, groups, available_memory=0)
    attention_groups = _attention_groups(cache_config.kv_cache_groups[0], layers)
    kernel_block_size = prepare_kernel_block_sizes(cache_config, [attention_groups])[0]
    resolve_graph_mode(config, attention_groups)
    for group in attention_groups:
        group.create_metadata_builders(config, device, kernel_block_size=kernel_block_size)
    tensors = allocate_kv_cache(cache_config, device, layout, [kernel_block_size])
    bind_kv_cache(
        tensors,
        config.compilation_config.static_forward_context,
        [],
        kv_cache_groups=cache_config.kv_cache_groups,
    )
    return DraftKVCache(
        num_blocks=num_blocks * (block_size // kernel_block_size),
        block_size=kernel_block_size,
        num_bytes=num_blocks * bytes_per_block,
        attention_groups=tuple(attention_groups),
        tensors=tuple(tensors.values()),
    )


def _require_attention_only(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> None:
    odd = sorted({type(spec).__name__ for spec in specs.values() if not isinstance(spec, AttentionSpec)})
    if odd or not specs:
        found = ", ".join(odd) if odd else "no attention layer"
        raise UnsupportedModelError(
            f"{config.model_config.model!r} has {found}. Required of a draft: attention layers only, because a draft's "
            "state must roll back when proposals are rejected. Choose another draft."
        )


def _resolve_layout(config: VllmConfig, layers: dict[str, Any]) -> KVCacheLayout:
    # At load_model vLLM has not resolved the layout yet: it does so with the target's KV cache, later.
    supported: set[KVCacheLayout] | None = None
    for layer in layers.values():
        names = set(layer.get_attn_backend().supported_kv_cache_layouts())
        supported = names if supported is None else supported & names
    if not supported:
        raise UnsupportedModelError("the draft's attention layers share no KV cache layout. Choose another draft.")
    preferred = layers[next(iter(layers))].get_attn_backend().supported_kv_cache_layouts()
    layout = next(candidate for candidate in preferred if candidate in supported)
    config.cache_config.kv_cache_layout = layout.name
    return layout


def _num_blocks(
    config: VllmConfig, *, bytes_per_block: int, block_size: int, memory: float | None, device: torch.device
) -> int:
    if memory is None:
        blocks_per_request = -(-config.model_config.max_model_len // block_size)
        wanted = config.scheduler_config.max_num_seqs * blocks_per_request + 1
        cap = (1 if device.type == "cpu" else 4) * GIB
        # A budget of one full-length request at the least: less would silence every long context for good.
        return int(max(blocks_per_request + 1, min(wanted, cap // bytes_per_block)))
    num_blocks = int(memory * GIB) // bytes_per_block
    if num_blocks < 2:
        raise ConfigError(
            f"draft_kv_cache_memory is {memory} GiB, room for {num_blocks} blocks of {bytes_per_block} bytes "
            f"({block_size} tokens). Required: at least 2 blocks. Set it to {2 * bytes_per_block / GIB:.4f} or more, "
            "or leave it out."
        )
    return num_blocks


def _attention_groups(group: Any, layers: dict[str, Any]) -> list[AttentionGroup]:
    spec = group.kv_cache_spec
    by_kind: dict[Any, list[str]] = {}
    for name in group.layer_names:
        layer_spec = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        by_kind.setdefault((layers[name].get_attn_backend(), layer_spec), []).append(name)
    return [
        AttentionGroup(backend=backend, layer_names=names, kv_cache_spec=layer_spec, kv_cache_group_id=0)
        for (backend, layer_spec), names in by_kind.items()
    ]
