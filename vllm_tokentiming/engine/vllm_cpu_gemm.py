"""Which kernel multiplies with this layer's weights on CPU? Found once, so that a step calls it and nothing else.

vLLM packs a layer's weights when they are loaded and leaves the packed form in the layer (int8) or in the closure that
``dispatch_cpu_unquantized_gemm`` made (float). A layer that is neither goes through its own quantisation method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

Gemm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [M, K], out [M, N]) → x·Wᵀ + bias [M, N]: ``out``, or a new tensor where the kernel makes its own."""


def is_packed_int8(layer: Any) -> bool:
    """Whether vLLM packed the layer's weights for the int8 kernel that rounds its input itself."""
    kernel = getattr(getattr(layer, "scheme", None), "kernel", None)
    return (
        isinstance(kernel, CPUInt8ScaledMMLinearKernel)
        and kernel.linear_method.__func__ is CPUInt8ScaledMMLinearKernel._apply_weights_sgl
    )


def bind_gemm(layer: Any) -> Gemm:
    """The layer's GEMM without vLLM's Python around it."""
    bias = None if getattr(layer, "skip_bias_add", False) else layer.bias
    if is_packed_int8(layer):
        return _int8(layer, bias)
    if (dispatched := getattr(layer, "cpu_linear", None)) is not None:
        held = inspect.getclosurevars(dispatched).nonlocals
        if "handler" in held:
            return _onednn(held["handler"], bias)
        if "packed_weight" in held:
            return _packed(held["packed_weight"], bias)
    return lambda x, _out: layer.quant_method.apply(layer, x, bias)


def _int8(layer: Any, bias: torch.Tensor | None) -> Gemm:
    run = torch.ops._C.int8_scaled_mm_with_quant.default
    weight, scale = layer.weight.data, layer.weight_scale.data
    bias_fp32 = None if bias is None else layer.bias_fp32.data
    return lambda x, out: run(x, weight, scale, bias_fp32, out.dtype, True)


def _onednn(handler: Any, bias: torch.Tensor | None) -> Gemm:
    run, pointer = torch.ops._C.onednn_mm.default, handler.handler_tensor

    def gemm(x: torch.Tensor, out: torch.Tensor, _owner: Any = handler) -> torch.Tensor:  # the handler frees weights
        run(out, x, bias, pointer)
        return out

    return gemm


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Gemm:
    run = torch.ops._C.weight_packed_linear.default

    def gemm(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        run(out, x, weight, bias, True)
        return out

    return gemm
