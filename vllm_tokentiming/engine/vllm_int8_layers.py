"""Which drafts can take what lies between two attentions as one region of int8 kernels, and on which arrays?

Binds the kernels to weights that vLLM has loaded and packed, or to those of a checkpoint beside a model that keeps its
own; owns descriptions and what the regions pass on in float32. The attentions are vLLM's (``vllm_decode_step``) or our
own (``vllm_int8_step``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
import torch

from vllm_tokentiming.engine import int8_kernels as kernels
from vllm_tokentiming.engine import openmp
from vllm_tokentiming.engine.int8_dot import INSTRUCTIONS
from vllm_tokentiming.engine.int8_weights import Int8File, Int8Weights, LayerWeights
from vllm_tokentiming.engine.vllm_cpu_gemm import is_packed_int8

MAX_ROWS: Final = 4
"""Of a pass beside vLLM's kernels on the same weights. Above, matrix instructions win, which those use."""


def why_unfit_place() -> str | None:
    """What keeps this machine from the int8 kernels; None where nothing does."""
    return next(_unfit_place(), None)


def _unfit_place() -> Iterator[str]:
    if INSTRUCTIONS is None:
        yield "the CPU has neither AVX2 nor AVX-512 VNNI"
    if numba.config.DISABLE_JIT or not numba.config.ENABLE_AVX or numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        yield "numba is told not to compile, or to compile for another CPU"
    if openmp.runtime() is None:
        yield "PyTorch's OpenMP runtime is not to be found"


def why_unfit(body: Any, *, is_packed: bool = True) -> str | None:
    """What keeps the layers of a Llama-shaped model from the int8 regions; None where nothing does.

    Args:
        body: the model without its head.
        is_packed: they are to read the weights that vLLM packed.
    """
    if (reason := why_unfit_place()) is not None:
        return reason
    dtype = body.embed_tokens.weight.dtype
    if dtype not in {torch.bfloat16, torch.float32}:
        return f"its activations are {dtype}, neither bfloat16 nor float32"
    return next(_unfit_packed(body), None) if is_packed else None


def _unfit_packed(body: Any) -> Iterator[str]:
    for layer in body.layers:
        for product in _products(layer):
            if not is_packed_int8(product):
                yield "its weights are not int8, as vLLM packs them for matrix instructions"
                return
            if product.weight_scale.dtype != torch.float32 or product.weight_scale.numel() != len(product.weight):
                yield "its weights have not one float32 scale for each output channel"
                return
        if reason := _packed_by_vllm(layer).why_unfit():
            yield reason


def of_packed_model(body: Any) -> Int8Layers:
    """On the weights that vLLM packed; :func:`why_unfit` found nothing."""
    return Int8Layers(body, [_packed_by_vllm(layer) for layer in body.layers])


def of_checkpoint(body: Any, file: Int8File) -> Int8Layers:
    """On int8 weights of the same model, which keeps its own; :func:`why_unfit` found nothing.

    Args:
        body: the model without its head.
        file: the draft's int8 checkpoint.

    Raises:
        ValueError: their shapes do not fit.
    """
    layers = []
    for number, layer in enumerate(body.layers):
        names = ("qkv", "output", "gate_up", "down")
        biases = {name: _bias(product) for name, product in zip(names, _products(layer), strict=True)}
        layers.append(file.layer(number, biases))
        if reason := layers[-1].why_unfit():
            raise ValueError(reason)
    return Int8Layers(body, layers)


def _products(layer: Any) -> tuple[Any, Any, Any, Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


def _bias(product: Any) -> torch.Tensor | None:
    return None if product.bias is None or product.skip_bias_add else product.bias.data


def _packed_by_vllm(layer: Any) -> LayerWeights:
    qkv, output, gate_up, down = (
        Int8Weights(
            packed=product.weight.data,
            scales=product.weight_scale.data.flatten(),
            biases=None if _bias(product) is None else product.bias_fp32.data,
        )
        for product in _products(layer)
    )
    return LayerWeights(qkv=qkv, output=output, gate_up=gate_up, down=down)


@dataclass(frozen=True, slots=True)
class Regions:
    """Regions for one number of rows: the address of each one's description, and what keeps the memory."""

    residual: torch.Tensor  # float32 [rows, hidden size]
    before_layers: int
    after_attention: list[int]
    owned: tuple[Any, ...]


class Int8Layers:
    """What a Llama-shaped model computes between its attentions, for a few rows.

    Args:
        body: a model for which :func:`why_unfit` found nothing.
        weights: of its layers.
    """

    def __init__(self, body: Any, weights: Sequence[LayerWeights]) -> None:
        self._weights = weights
        self._embedding = body.embed_tokens.weight.data
        self._epsilon = np.array([body.norm.variance_epsilon], dtype=np.float32)
        # The norms are few; the kernels read them as float32.
        self._first_norm = body.layers[0].input_layernorm.weight.data.float()
        self._norms = [layer.post_attention_layernorm.weight.data.float() for layer in body.layers]
        self._next_norms = [
            *(layer.input_layernorm.weight.data.float() for layer in body.layers[1:]),
            body.norm.weight.data.float(),
        ]
        compiled = kernels.compiled()
        self._before_layers = openmp.ParallelRegion(compiled.before_layers.address)
        self._after_attention = openmp.ParallelRegion(compiled.after_attention.address)
        self._regions: dict[int, Regions] = {}

    def prepare(self, *, qkv: torch.Tensor, attended: torch.Tensor, normed: torch.Tensor) -> Regions:
        """Bind the regions to buffers of one number of rows.

        Args:
            qkv: [rows, queries + keys + values], written before each attention; all bfloat16 or all float32.
            attended: [rows, queries], read after it.
            normed: [rows, hidden size], the hidden states after the last layer.
        """
        rows, width = normed.shape
        residual, other, summand, nothing = (torch.zeros(rows, width) for _ in range(4))
        activated = torch.zeros(rows, len(self._weights[0].gate_up.packed) // 2)
        common = {
            kernels.ROWS: rows,
            kernels.WIDTH: width,
            kernels.EPSILON: self._epsilon.ctypes.data,
            kernels.IS_FLOAT32: normed.dtype == torch.float32,
            kernels.RESIDUAL: residual.data_ptr(),
            kernels.OTHER_RESIDUAL: other.data_ptr(),
            kernels.SUMMAND: summand.data_ptr(),
        }
        before = kernels.describe(
            {**common, kernels.SUMMAND: nothing.data_ptr(), kernels.NEXT_NORM: self._first_norm.data_ptr()},
            {kernels.QKV: self._weights[0].qkv.writing_to(qkv)},
        )
        after = []
        for place, layer in enumerate(self._weights):
            is_last = place == len(self._weights) - 1
            products = {
                kernels.OUTPUT: layer.output.writing_to(summand),
                kernels.GATE_UP: layer.gate_up.writing_to(activated),
                kernels.DOWN: layer.down.writing_to(summand),
            }
            if not is_last:
                products[kernels.QKV] = self._weights[place + 1].qkv.writing_to(qkv)
            numbers = {
                kernels.INPUT: attended.data_ptr(),
                kernels.NORM: self._norms[place].data_ptr(),
                kernels.NEXT_NORM: self._next_norms[place].data_ptr(),
                kernels.NORMED: normed.data_ptr() if is_last else 0,
            }
            after.append(kernels.describe({**common, **numbers}, products))
        self._regions[rows] = Regions(
            residual=residual,
            before_layers=before.ctypes.data,
            after_attention=[description.ctypes.data for description in after],
            owned=(before, after, other, summand, nothing, activated, qkv, attended, normed),
        )
        return self._regions[rows]

    def before_layers(self, ids: torch.Tensor) -> Sequence[int]:
        """Write the first layer's queries, keys and values of these tokens, int [rows].

        Returns:
            for each layer, what :meth:`after_attention` is to be called with.
        """
        regions = self._regions[len(ids)]
        regions.residual.copy_(self._embedding[ids])
        self._before_layers(regions.before_layers)
        return regions.after_attention

    def after_attention(self, region: int) -> None:
        """Write the next layer's queries, keys and values; after the last layer, the normalised hidden states."""
        self._after_attention(region)


class Int8Head:
    """A model's output embedding.

    Args:
        weights: with rows up to a whole block.
        vocab_size: the logits that come from them.
    """

    def __init__(self, weights: Int8Weights, *, vocab_size: int) -> None:
        self._weights, self._vocab_size = weights, vocab_size
        self._project = openmp.ParallelRegion(kernels.compiled().project.address)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary] of hidden states, float32 [rows, hidden size]."""
        hidden = hidden.contiguous()
        result = torch.empty(len(hidden), len(self._weights.packed), dtype=torch.float32)
        numbers = {kernels.ROWS: len(hidden), kernels.IS_FLOAT32: 1, kernels.INPUT: hidden.data_ptr()}
        description = kernels.describe(numbers, {kernels.OUTPUT: self._weights.writing_to(result)})
        self._project(description.ctypes.data)
        return result[:, : self._vocab_size]


def head_of_checkpoint(model: Any, file: Int8File) -> Int8Head | None:
    """None where logits are more than a product with the head, or where its weights are float."""
    processor = model.logits_processor
    is_plain = processor.scale == 1.0 and processor.soft_cap is None and getattr(model.lm_head, "bias", None) is None
    weights = file.head(processor.org_vocab_size) if is_plain else None
    return None if weights is None else Int8Head(weights, vocab_size=processor.org_vocab_size)
