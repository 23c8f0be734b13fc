"""Which drafts can take what lies between two attentions as one region of int8 kernels, and on which arrays?

Binds the kernels to weights that vLLM has loaded and packed; owns descriptions and what the regions pass on in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import torch

from vllm_tokentiming.engine import int8_kernels as kernels
from vllm_tokentiming.engine import openmp
from vllm_tokentiming.engine.vllm_cpu_gemm import is_packed_int8


def why_unfit(body: Any) -> str | None:
    """What keeps the layers of a Llama-shaped model from the int8 regions; None where nothing does."""
    return next(_unfit(body), None)


def _unfit(body: Any) -> Iterator[str]:
    if not llvm.get_host_cpu_features().get("avx512vnni", False):
        yield "the CPU has no AVX-512 VNNI"
    if numba.config.DISABLE_JIT or not numba.config.ENABLE_AVX or numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        yield "numba is told not to compile, or to compile for another CPU"
    if openmp.runtime() is None:
        yield "PyTorch's OpenMP runtime is not to be found"
    if body.embed_tokens.weight.dtype != torch.bfloat16:
        yield "its activations are not bfloat16"
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for product in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            if not is_packed_int8(product):
                yield "its weights are not int8, as vLLM packs them for matrix instructions"
                return
            if product.weight_scale.dtype != torch.float32 or product.weight_scale.numel() != len(product.weight):
                yield "its weights have not one float32 scale for each output channel"
            if reason := kernels.Product.why_unfit(product.weight.shape, is_pair=product is mlp.gate_up_proj):
                yield reason


@dataclass(frozen=True, slots=True)
class _Rows:
    """Regions for one number of rows: the address of each one's description, and what keeps the memory."""

    residual: torch.Tensor  # float32 [rows, hidden size]
    before_layers: int
    after_attention: list[int]
    owned: tuple[Any, ...]


class Int8Layers:
    """What a Llama-shaped model computes between its attentions, for a few rows.

    Args:
        body: a model for which :func:`why_unfit` found nothing.
    """

    def __init__(self, body: Any) -> None:
        self._layers = body.layers
        self._embedding = body.embed_tokens.weight.data
        self._epsilon = np.array([body.norm.variance_epsilon], dtype=np.float32)
        # The norms are few; the kernels read them as float32.
        self._first_norm = self._layers[0].input_layernorm.weight.data.float()
        self._norms = [layer.post_attention_layernorm.weight.data.float() for layer in self._layers]
        self._next_norms = [
            *(layer.input_layernorm.weight.data.float() for layer in self._layers[1:]),
            body.norm.weight.data.float(),
        ]
        before, after = kernels.compiled()
        self._before_layers = openmp.ParallelRegion(before.address)
        self._after_attention = openmp.ParallelRegion(after.address)
        self._rows: dict[int, _Rows] = {}

    def prepare(self, *, qkv: torch.Tensor, attended: torch.Tensor, normed: torch.Tensor) -> None:
        """Bind the regions to buffers of one number of rows.

        Args:
            qkv: bfloat16 [rows, queries + keys + values], written before each attention.
            attended: bfloat16 [rows, queries], read after it.
            normed: bfloat16 [rows, hidden size], the hidden states after the last layer.
        """
        rows, width = normed.shape
        residual, other, summand, nothing = (torch.zeros(rows, width) for _ in range(4))
        activated = torch.zeros(rows, self._layers[0].mlp.down_proj.input_size)
        common = {
            kernels.ROWS: rows,
            kernels.WIDTH: width,
            kernels.EPSILON: self._epsilon.ctypes.data,
            kernels.RESIDUAL: residual.data_ptr(),
            kernels.OTHER_RESIDUAL: other.data_ptr(),
            kernels.SUMMAND: summand.data_ptr(),
        }
        projections = [layer.self_attn.qkv_proj for layer in self._layers]
        before = kernels.describe(
            {**common, kernels.SUMMAND: nothing.data_ptr(), kernels.NEXT_NORM: self._first_norm.data_ptr()},
            {kernels.QKV: _product(projections[0], qkv)},
        )
        after = []
        for place, layer in enumerate(self._layers):
            is_last = place == len(self._layers) - 1
            products = {
                kernels.OUTPUT: _product(layer.self_attn.o_proj, summand),
                kernels.GATE_UP: _product(layer.mlp.gate_up_proj, activated),
                kernels.DOWN: _product(layer.mlp.down_proj, summand),
            }
            if not is_last:
                products[kernels.QKV] = _product(projections[place + 1], qkv)
            numbers = {
                kernels.INPUT: attended.data_ptr(),
                kernels.NORM: self._norms[place].data_ptr(),
                kernels.NEXT_NORM: self._next_norms[place].data_ptr(),
                kernels.NORMED: normed.data_ptr() if is_last else 0,
            }
            after.append(kernels.describe({**common, **numbers}, products))
        self._rows[rows] = _Rows(
            residual=residual,
            before_layers=before.ctypes.data,
            after_attention=[description.ctypes.data for description in after],
            owned=(before, after, other, summand, nothing, activated, qkv, attended, normed),
        )

    def before_layers(self, ids: torch.Tensor) -> Sequence[int]:
        """Write the first layer's queries, keys and values of these tokens, int [rows].

        Returns:
            for each layer, what :meth:`after_attention` is to be called with.
        """
        rows = self._rows[len(ids)]
        rows.residual.copy_(self._embedding[ids])
        self._before_layers(rows.before_layers)
        return rows.after_attention

    def after_attention(self, region: int) -> None:
        """Write the next layer's queries, keys and values; after the last layer, the normalised hidden states."""
        self._after_attention(region)


def _product(layer: Any, result: torch.Tensor) -> kernels.Product:
    has_bias = layer.bias is not None and not layer.skip_bias_add
    return kernels.Product(
        weights=layer.weight.data_ptr(),
        shape=tuple(layer.weight.shape),
        scales=layer.weight_scale.data_ptr(),
        biases=layer.bias_fp32.data_ptr() if has_bias else 0,
        result=result.data_ptr(),
    )
