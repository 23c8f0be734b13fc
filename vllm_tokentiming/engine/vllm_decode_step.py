"""How does a Llama-shaped draft take a short pass on CPU without the Python of vLLM's layers?

A short pass is a decode step, or the few tokens of each request that the draft has to catch up with before it decodes.

The same kernels, in the same order, on the same weights and KV; what is left out is module calls, custom-op dispatch
and a new tensor for every result. Where the weights are int8 and rows are few, all between two attentions is a kernel
of our own instead (``int8_kernels``). Owns the activation buffers. vLLM's kernels are private to it: only for the
version that they were read in, and only after ``vllm_decode_check`` has compared a step with vLLM's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_tokentiming.engine.vllm_cpu_gemm import Gemm, bind_gemm
from vllm_tokentiming.engine.vllm_int8_layers import MAX_ROWS, Int8Layers
from vllm_tokentiming.engine.vllm_kv_cache import DraftKVCache

_VERSION = "0.32."

_KNOWN = (LlamaForCausalLM, Qwen2ForCausalLM)
"""Exactly these: a subclass may do more."""


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Gemm
    cos_sin: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    key_scale: float
    value_scale: float
    output: Gemm
    mlp_norm: torch.Tensor
    gate_up: Gemm
    down: Gemm
    next_norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Activations for one number of rows; queries, keys and values are views of ``qkv``."""

    residual: torch.Tensor
    hidden: torch.Tensor
    qkv: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    queries_by_head: torch.Tensor
    keys_by_head: torch.Tensor
    values_by_head: torch.Tensor
    attended: torch.Tensor
    attended_by_head: torch.Tensor
    gate_up: torch.Tensor
    activated: torch.Tensor
    query_start: torch.Tensor


def is_expected(architectures: Collection[str]) -> bool:
    """Whether a draft of these architectures can take its steps by hand, as far as can be told before it is loaded."""
    known = {kind.__name__ for kind in _KNOWN}
    return known.issuperset(architectures) and next(_unfit_place(), None) is None


def why_unfit(model: Any, cache: DraftKVCache) -> str | None:
    """What keeps this draft from the hand-written step; None where nothing does."""
    return next(chain(_unfit_place(), _unfit_model(model, cache)), None)


def _unfit_place() -> Iterator[str]:
    if not current_platform.is_cpu():
        yield "the device is not a CPU"
    if not vllm.__version__.startswith(_VERSION):
        yield f"vLLM is {vllm.__version__}, the step was written for {_VERSION}x"


def _unfit_model(model: Any, cache: DraftKVCache) -> Iterator[str]:
    if type(model) not in _KNOWN:
        yield f"{type(model).__name__} is not one of {', '.join(kind.__name__ for kind in _KNOWN)}"
    if len(cache.attention_groups) != 1:
        yield "its layers attend in several ways"
    shapes = set()
    for layer in model.model.layers:
        attention, rotation = layer.self_attn, layer.self_attn.rotary_emb
        implementation = attention.attn.impl
        shapes.add((attention.q_size, attention.kv_size, implementation.sliding_window))
        norms = (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm)
        if any(type(norm) is not RMSNorm or norm.variance_size_override or not norm.has_weight for norm in norms):
            yield "its norms are not plain RMS norms"
        # Scaling variants change the cache of cosines alone; those with a forward of their own do more.
        if type(rotation).forward_cpu is not RotaryEmbedding.forward_cpu or getattr(attention, "qk_norm", False):
            yield f"queries and keys are not just rotated ({type(rotation).__name__})"
        if type(implementation) is not CPUAttentionBackendImpl or attention.attn.query_quant is not None:
            yield "its attention is not vLLM's plain one for CPUs"
        if attention.attn.kv_cache.dtype != model.model.embed_tokens.weight.dtype:
            yield "its KV is quantised"
    if len(shapes) != 1:
        yield "its layers differ in shape"


class LlamaDecodeStep:
    """One token for each row of a batch, or a few.

    Args:
        model: the draft, loaded by vLLM, for which :func:`why_unfit` found nothing.
        cache: its KV, bound to its layers.
        int8_layers: what takes few rows from one attention to the next, where that is not left to vLLM's kernels.
    """

    def __init__(self, model: Any, *, cache: DraftKVCache, int8_layers: Int8Layers | None = None) -> None:
        body = model.model
        self._int8_layers = int8_layers
        self._model = model
        self._embedding = body.embed_tokens.weight.data
        attention = body.layers[0].self_attn
        self._first_norm = body.layers[0].input_layernorm.weight.data
        self._epsilon = float(body.norm.variance_epsilon)
        self._head_size = int(attention.head_dim)
        self._q_size, self._kv_size = int(attention.q_size), int(attention.kv_size)
        self._mlp_size = int(body.layers[0].mlp.down_proj.input_size)
        self._is_neox = bool(attention.rotary_emb.is_neox_style)
        self._block_size = cache.block_size
        self._attention = attention.attn.impl
        self._builder = cache.attention_groups[0].get_metadata_builder()
        self._layers = self._bind(body)
        self._no_regions = [0] * len(self._layers)
        self._buffers: dict[int, _Buffers] = {}

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self._embedding.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        dtype: torch.dtype = self._embedding.dtype
        return dtype

    @property
    def is_quantized(self) -> bool:
        """Whether the layers round their input to few bits."""
        return self._model.quant_config is not None or self._int8_layers is not None

    @property
    def has_int8_layers(self) -> bool:
        """Whether few rows are taken from one attention to the next by kernels of our own."""
        return self._int8_layers is not None

    @property
    def takes_every_pass(self) -> bool:
        """No: its weights are the model's, on whose layers longer passes are faster."""
        return False

    def _bind(self, body: Any) -> list[_Layer]:
        norms = [*(layer.input_layernorm.weight.data for layer in body.layers[1:]), body.norm.weight.data]
        bound = []
        for layer, next_norm in zip(body.layers, norms, strict=True):
            attention = layer.self_attn
            kv: torch.Tensor = attention.attn.kv_cache
            blocks, heads, block_size, _ = kv.shape
            # As CPUAttentionBackendImpl reads it: in a block of a head the keys come first, then the values.
            keys, values = kv.view(blocks, heads, block_size * 2, -1).chunk(2, dim=2)
            bound.append(
                _Layer(
                    qkv=bind_gemm(attention.qkv_proj),
                    cos_sin=attention.rotary_emb.cos_sin_cache.to(self._embedding.dtype),
                    keys=keys,
                    values=values,
                    key_scale=attention.attn._k_scale_float,
                    value_scale=attention.attn._v_scale_float,
                    output=bind_gemm(attention.o_proj),
                    mlp_norm=layer.post_attention_layernorm.weight.data,
                    gate_up=bind_gemm(layer.mlp.gate_up_proj),
                    down=bind_gemm(layer.mlp.down_proj),
                    next_norm=next_norm,
                )
            )
        return bound

    def __call__(
        self,
        ids: torch.Tensor,
        *,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slots: torch.Tensor,
        query_start: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``vllm_forward.HandStep``; ``slots`` is overwritten with where the KV goes."""
        b = self._buffers.get(len(ids)) or self._make_buffers(len(ids))
        # Positional, and names bound once: this is the loop that the module is for.
        ops = torch.ops._C
        add_norm, rotate, silu = (
            ops.fused_add_rms_norm.default,
            ops.rotary_embedding.default,
            ops.silu_and_mul.default,
        )
        store, attend = ops.cpu_attn_reshape_and_cache.default, ops.cpu_attention_with_kv_cache.default
        builder, impl, epsilon = self._builder, self._attention, self._epsilon
        isa, kv_dtype, window = builder.isa, impl.kv_cache_dtype, impl.sliding_window
        residual, hidden = b.residual, b.hidden
        starts = b.query_start if query_start is None else query_start
        fused = self._int8_layers if len(ids) <= MAX_ROWS else None
        regions: Sequence[int] = self._no_regions
        if fused is None:
            torch.index_select(self._embedding, 0, ids, out=residual)
            ops.rms_norm.default(hidden, residual, self._first_norm, epsilon)
        else:
            regions = fused.before_layers(ids)
        ops.compute_slot_mapping_kernel_impl.default(starts, positions, block_table, slots, self._block_size)
        plan = ops.get_scheduler_metadata.default(
            len(seq_lens), builder.num_heads, builder.num_kv_heads, builder.head_dim, seq_lens, builder.dtype, starts,
            True, builder.window_size, isa, envs.VLLM_CPU_ATTN_SPLIT_KV, None, kv_dtype,
        )  # fmt: skip
        for layer, region in zip(self._layers, regions, strict=True):
            if fused is None and (qkv := layer.qkv(hidden, b.qkv)) is not b.qkv:
                b.qkv.copy_(qkv)  # one copy is less than a view for each of its parts
            rotate(positions, b.queries, b.keys, self._head_size, layer.cos_sin, self._is_neox)
            store(
                b.keys_by_head, b.values_by_head, layer.keys, layer.values, slots, isa,
                layer.key_scale, layer.value_scale, kv_dtype,
            )  # fmt: skip
            attend(
                b.queries_by_head, layer.keys, layer.values, b.attended_by_head, starts, seq_lens,
                impl.scale, True, impl.alibi_slopes, window, block_table, impl.logits_soft_cap, plan, impl.sinks, None,
                layer.key_scale, layer.value_scale, kv_dtype,
            )  # fmt: skip
            if fused is not None:
                fused.after_attention(region)
                continue
            hidden = layer.output(b.attended, b.hidden)
            add_norm(hidden, residual, layer.mlp_norm, epsilon)
            silu(b.activated, layer.gate_up(hidden, b.gate_up))
            hidden = layer.down(b.activated, b.hidden)
            add_norm(hidden, residual, layer.next_norm, epsilon)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] of hidden states after a step, [rows, H]."""
        logits: torch.Tensor = self._model.compute_logits(hidden)
        return logits

    def _make_buffers(self, rows: int) -> _Buffers:
        dtype, hidden_size, head = self._embedding.dtype, self._embedding.shape[1], self._head_size

        def new(width: int) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=dtype)

        qkv, attended = new(self._q_size + 2 * self._kv_size), new(self._q_size)
        queries, keys, values = torch.split(qkv, [self._q_size, self._kv_size, self._kv_size], dim=1)

        def by_head(tensor: torch.Tensor) -> torch.Tensor:
            return torch.unflatten(tensor, 1, (-1, head))

        made = _Buffers(
            residual=new(hidden_size),
            hidden=new(hidden_size),
            qkv=qkv,
            queries=queries,
            keys=keys,
            queries_by_head=by_head(queries),
            keys_by_head=by_head(keys),
            values_by_head=by_head(values),
            attended=attended,
            attended_by_head=by_head(attended),
            gate_up=new(2 * self._mlp_size),
            activated=new(self._mlp_size),
            query_start=torch.arange(rows + 1, dtype=torch.int32),
        )
        if self._int8_layers is not None and rows <= MAX_ROWS:
            self._int8_layers.prepare(qkv=made.qkv, attended=made.attended, normed=made.hidden)
        self._buffers[rows] = made
        return made
