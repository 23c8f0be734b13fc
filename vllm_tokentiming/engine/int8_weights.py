"""Where do the weights of the int8 kernels come from? From the checkpoint that is made of the draft, packed here.

vLLM packs int8 weights so that the kernels can read them only where the CPU has matrix instructions (AMX). Elsewhere
the model is loaded with its float weights, which the start-up check and a fallback need, and passes read these, a
quarter or half of their size, beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch.nn.functional import pad

from vllm_tokentiming.engine.int8_dot import CHANNELS
from vllm_tokentiming.engine.int8_kernels import Product

_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int8Weights:
    """A linear layer's.

    Attributes:
        packed: int8 [N, K + 4], see ``int8_kernels``.
        scales: float32 [N].
        biases: float32 [N], or None.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor | None = None

    def __post_init__(self) -> None:
        channels = len(self.packed)
        if self.packed.dtype != torch.int8 or not self.packed.is_contiguous():
            raise ValueError(f"packed weights are {self.packed.dtype} {tuple(self.packed.shape)}, not contiguous int8")
        for name, numbers in (("scales", self.scales), ("biases", self.biases)):
            if numbers is not None and (numbers.dtype != torch.float32 or numbers.numel() != channels):
                raise ValueError(f"{name} are {numbers.dtype} {tuple(numbers.shape)}, not float32 [{channels}]")

    def writing_to(self, result: torch.Tensor) -> Product:
        """The kernels' description of this product, with its result in ``result``, [rows, …]."""
        return Product(
            weights=self.packed.data_ptr(),
            shape=(self.packed.shape[0], self.packed.shape[1]),
            scales=self.scales.data_ptr(),
            biases=0 if self.biases is None else self.biases.data_ptr(),
            result=result.data_ptr(),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """Those of one layer of a Llama-shaped model, and what they have to have in common with the others'."""

    qkv: Int8Weights
    output: Int8Weights
    gate_up: Int8Weights
    down: Int8Weights

    def why_unfit(self) -> str | None:
        """What keeps them from the kernels; None where nothing does."""
        for weights in (self.qkv, self.output, self.gate_up, self.down):
            channels, depth = weights.packed.shape
            if reason := Product.why_unfit((channels, depth), is_pair=weights is self.gate_up):
                return reason
        return None


def pack(weights: torch.Tensor) -> torch.Tensor:
    """As vLLM's ``convert_weight_packed`` lays out int8 weights.

    Args:
        weights: int8 [N, K].

    Returns:
        int8 [N, K + 4].

    Raises:
        ValueError: N does not divide into blocks, or K into quads.
    """
    channels, depth = weights.shape
    if channels % CHANNELS or depth % 4:
        raise ValueError(f"{channels} output channels of {depth} inputs do not divide into blocks")
    blocks = weights.view(-1, CHANNELS, depth // 4, 4).transpose(1, 2).reshape(-1, CHANNELS * depth)
    corrections = (128 * weights.sum(dim=1, dtype=torch.int32)).view(-1, CHANNELS).view(torch.int8)
    return torch.cat([blocks, corrections], dim=1).view(channels, depth + 4)


class Int8File:
    """The int8 weights of a Llama-shaped model in a folder that :func:`int8_checkpoint` made.

    Args:
        folder: with safetensors, whose names are those of Hugging Face's models.
    """

    def __init__(self, folder: Path) -> None:
        self._places: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._places.update(dict.fromkeys(file.keys(), path))

    def layer(self, number: int, biases: Mapping[str, torch.Tensor | None]) -> LayerWeights:
        """One layer's, with the biases of its fused linear layers, by their names here."""
        attention, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        return LayerWeights(
            qkv=self._fused([f"{attention}.{part}_proj" for part in "qkv"], biases["qkv"]),
            output=self._fused([f"{attention}.o_proj"], biases["output"]),
            gate_up=self._fused([f"{mlp}.gate_proj", f"{mlp}.up_proj"], biases["gate_up"]),
            down=self._fused([f"{mlp}.down_proj"], biases["down"]),
        )

    def head(self, vocab_size: int) -> Int8Weights | None:
        """The output embedding's, with zeros up to a whole block; None where it is of another size, or float."""
        if _HEAD not in self._places:
            return None
        weights, scales = self._tensor(_HEAD), self._tensor(f"{_HEAD}_scale").flatten()
        if len(weights) != vocab_size:
            return None
        missing = -vocab_size % CHANNELS
        return Int8Weights(packed=pack(pad(weights, (0, 0, 0, missing))), scales=pad(scales, (0, missing)))

    def _fused(self, names: Sequence[str], bias: torch.Tensor | None) -> Int8Weights:
        weights = torch.cat([self._tensor(f"{name}.weight") for name in names])
        scales = torch.cat([self._tensor(f"{name}.weight_scale") for name in names]).flatten()
        return Int8Weights(packed=pack(weights), scales=scales, biases=None if bias is None else bias.float())

    def _tensor(self, key: str) -> torch.Tensor:
        with safe_open(self._places[key], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(key)
        return tensor
