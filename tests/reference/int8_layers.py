"""What lies between two attentions of a Llama-shaped model with int8 weights, product by product, as the paper has it.

W8A8: weights with one scale for each output channel, activations with one for each token (Dettmers et al., LLM.int8(),
arXiv 2208.07339, section 2.1, without the decomposition).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Product:
    """int8 weights [N, K], their scales [N], and biases [N] or None."""

    weights: npt.NDArray[np.int8]
    scales: Floats
    biases: Floats | None = None

    def __call__(self, inputs: Floats) -> Floats:
        """Inputs [rows, K] → [rows, N]."""
        largest = np.abs(inputs).max(axis=1, keepdims=True)
        factor = np.divide(np.float32(127.0), largest, out=np.zeros_like(largest), where=largest > 0)
        rounded = np.rint(inputs * factor).astype(np.int64)
        summed = rounded @ self.weights.T.astype(np.int64)
        result = summed.astype(np.float32) * (largest / np.float32(127.0)) * self.scales
        return result if self.biases is None else result + self.biases


def packed(weights: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """As vLLM's ``convert_weight_packed`` lays out int8 weights [N, K]: int8 [N, K + 4]."""
    channels, depth = weights.shape
    blocks = []
    for first in range(0, channels, 32):
        block = weights[first : first + 32]
        quads = block.reshape(32, depth // 4, 4).transpose(1, 0, 2)
        corrections = (128 * block.astype(np.int64).sum(axis=1)).astype(np.int32)
        blocks += [quads.reshape(-1), corrections.view(np.int8)]
    return np.concatenate(blocks).reshape(channels, depth + 4)


def bfloat16(numbers: Floats) -> Floats:
    """Rounded to bfloat16, ties to even, as float32."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    kept = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return kept.view(np.float32)


def normalised(rows: Floats, weights: Floats, *, epsilon: float) -> Floats:
    """Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""
    mean_square = (rows.astype(np.float64) ** 2).mean(axis=1, keepdims=True)
    return (rows / np.sqrt(mean_square + epsilon) * weights).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Layer:
    """What follows a layer's attention, up to the next one's."""

    output: Product
    norm: Floats
    gate_up: Product
    down: Product
    next_norm: Floats
    qkv: Product | None  # none after the last layer
    epsilon: float

    def __call__(self, attended: Floats, residual: Floats) -> tuple[Floats, Floats, Floats | None]:
        """Attended [rows, queries] and the residual [rows, width] → residual, normalised hidden states, projections."""
        residual = residual + self.output(attended)
        both = self.gate_up(normalised(residual, self.norm, epsilon=self.epsilon))
        gates, ups = np.split(both, 2, axis=1)
        residual = residual + self.down(gates / (1 + np.exp(-gates)) * ups)
        normed = normalised(residual, self.next_norm, epsilon=self.epsilon)
        return residual, normed, None if self.qkv is None else self.qkv(normed)
