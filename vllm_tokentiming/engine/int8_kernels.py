"""What does a Llama-shaped draft with int8 weights compute between two attentions? One parallel region, for few rows.

A decode step on vLLM's kernels is made of many small ones: each forks and joins the threads, rounds its own input to
int8, and lets the stream of weights from memory stop, which is all that a step should wait for. Here a layer's output
projection, norms, MLP and the next layer's query, key and value projection are one region with three barriers.

Weights are packed as vLLM does it (``convert_weight_packed``, from SGLang): for 32 output channels at a time int8
[K/4, 32, 4], then int32 [32], 128 times the sum of each channel's weights, which is what inputs that are moved up add
(``int8_dot``). As in vLLM's kernel an input has one scale a row, its largest magnitude / 127; between products all is
float32 here, bfloat16 there. What passes between a region and the rest of the model is bfloat16 or float32.

Such regions stand between vLLM's attentions, or are parts of one that takes a whole pass (``attention_kernels``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core.ccallback import CFunc

from vllm_tokentiming.compilation import callback, source_digest
from vllm_tokentiming.engine import attention_kernels as attention
from vllm_tokentiming.engine import attention_tile, int8_dot, region_kernels
from vllm_tokentiming.engine.int8_dot import AVX2, CHANNELS, INSTRUCTIONS, OFFSET, dot_of
from vllm_tokentiming.engine.openmp import runtime
from vllm_tokentiming.engine.region_kernels import (
    barrier,
    described,
    exponential,
    floats,
    halves,
    integers,
    kernel,
    kernel_in_any_order,
    narrow,
    number_of_threads,
    pointer,
    share,
    thread_number,
    widen,
    words,
)

_CORRECTION: Final = 4
"""Bytes that packing adds to the weights of an output channel."""

# Fields of a region's description, int64: numbers and addresses. A product has six.
ROWS, WIDTH, EPSILON, IS_FLOAT32 = 0, 1, 2, 3
RESIDUAL, OTHER_RESIDUAL, SUMMAND = 4, 5, 6
INPUT, NORM, NEXT_NORM, NORMED = 7, 8, 9, 10
OUTPUT, GATE_UP, DOWN, QKV = 11, 17, 23, 29
_FIELDS: Final = 35
_WEIGHT, _SCALE, _BIAS, _RESULT, _CHANNELS_OUT, _CHANNELS_IN = range(6)


@dataclass(frozen=True, slots=True)
class Product:
    """Where a product's packed weights are, int8 [N, K + 4], and its result, [rows, N].

    Attributes:
        weights: address.
        shape: of the packed weights.
        scales: address of float32 [N].
        biases: address of float32 [N], or 0.
        result: address; queries, keys and values have the dtype of the region's input, others float32, gates and ups
            half as wide.
    """

    weights: int
    shape: tuple[int, int]
    scales: int
    biases: int
    result: int

    @staticmethod
    def why_unfit(shape: tuple[int, int], *, is_pair: bool = False) -> str | None:
        """What keeps packed weights of this shape, gates and ups of a pair, from the kernels."""
        channels, depth = shape[0], shape[1] - _CORRECTION
        # Gates and ups begin with a block each; two quads of bytes are taken in a turn.
        if channels % (2 * CHANNELS if is_pair else CHANNELS) or depth % 8:
            return f"{channels} output channels of {depth} inputs do not divide into blocks"
        return None

    def fields(self) -> tuple[int, ...]:
        """Its part of a description."""
        channels, depth = self.shape[0], self.shape[1] - _CORRECTION
        return self.weights, self.scales, self.biases, self.result, channels, depth


def describe(numbers: Mapping[int, int], products: Mapping[int, Product]) -> npt.NDArray[np.int64]:
    """What a region gets: int64, by the names of the fields above; those left out are 0, and no product."""
    description = described(numbers, fields=_FIELDS)
    for field, product in products.items():
        description[field : field + 6] = product.fields()
    return description


_dot_one, _dot_two, _dot_four = (dot_of(rows, instructions=INSTRUCTIONS or AVX2) for rows in (1, 2, 4))


@kernel
def _read(region: Any, address: int, first: int, row: Any) -> None:
    """Numbers of the model's dtype from this address, starting with number ``first``."""
    if region[IS_FLOAT32] != 0:
        row[:] = floats(address + 4 * first, len(row))
    else:
        widen(halves(address + 2 * first, len(row)), row.view(np.uint32))


@kernel
def _write(region: Any, row: Any, address: int, first: int) -> None:
    if region[IS_FLOAT32] != 0:
        written = floats(address + 4 * first, len(row))
        written[:] = row
    else:
        narrow(row.view(np.uint32), halves(address + 2 * first, len(row)))


@kernel
def _largest(bits: Any) -> Any:
    """The largest magnitude's bits: those of floats order as integers do."""
    largest = np.uint32(0)
    for i in range(len(bits)):
        largest = max(largest, bits[i] & np.uint32(0x7FFFFFFF))
    return largest


@kernel
def _round(row: Any, bits: Any, rounded: Any, scales: Any, at: int) -> None:
    """Round a row of float32 to int8, moved up as the instructions need it, and keep its scale."""
    scales.view(np.uint32)[at] = _largest(bits)
    largest = scales[at]
    scales[at] = largest / np.float32(127.0)
    factor = np.float32(127.0) / largest if largest > 0 else np.float32(0.0)
    for i in range(len(row)):
        rounded[i] = np.uint8(np.int32(np.rint(row[i] * factor)) + np.int32(OFFSET))


@kernel_in_any_order
def _mean_square(row: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(row)):
        total += row[i] * row[i]
    return total / np.float32(len(row))


@kernel
def _sigmoid_product(gates: Any, ups: Any, result: Any) -> None:
    """SiLU(gate) · up."""
    for i in range(len(gates)):
        result[i] = gates[i] * ups[i] / (np.float32(1.0) + exponential(-gates[i]))


@kernel
def _sum_up(weights: int, rows: int, depth: int, scratch: Any) -> None:
    """A block's weights times the rounded rows."""
    _, rounded, _, sums = scratch
    row = 0
    while row < rows:
        inputs, sums_of_row = rounded.ctypes.data + row * depth, sums.ctypes.data + 4 * CHANNELS * row
        if rows - row >= 4:
            _dot_four(weights, inputs, sums_of_row, depth // 4)
            row += 4
        elif rows - row >= 2:
            _dot_two(weights, inputs, sums_of_row, depth // 4)
            row += 2
        else:
            _dot_one(weights, inputs, sums_of_row, depth // 4)
            row += 1
    if OFFSET:
        corrections = numba.carray(pointer(weights + CHANNELS * depth), (CHANNELS,), np.int32)
        for r in range(rows):
            for i in range(CHANNELS):
                sums[CHANNELS * r + i] -= corrections[i]


@kernel
def _block(product: Any, block: int, rows: int, scratch: Any, result: Any) -> None:
    """32 output channels of a product: float32 [rows · 32]."""
    _, _, row_scales, sums = scratch
    depth = product[_CHANNELS_IN]
    weights = product[_WEIGHT] + block * CHANNELS * (depth + _CORRECTION)
    _sum_up(weights, rows, depth, scratch)
    scales = floats(product[_SCALE] + 4 * CHANNELS * block, CHANNELS)
    for r in range(rows):
        of_row = result[CHANNELS * r : CHANNELS * (r + 1)]
        for i in range(CHANNELS):
            of_row[i] = np.float32(sums[CHANNELS * r + i]) * (row_scales[r] * scales[i])
        if product[_BIAS] != 0:
            biases = floats(product[_BIAS] + 4 * CHANNELS * block, CHANNELS)
            for i in range(CHANNELS):
                of_row[i] += biases[i]


@kernel
def _normed(region: Any, source: int, target: int, norm: int, scratch: Any) -> None:
    """Add the summand to the residual, normalise (RMS) and round: every thread all rows, but writes its share."""
    row, rounded, scales, _ = scratch
    width, epsilon = region[WIDTH], floats(region[EPSILON], 1)[0]
    weights = floats(norm, width)
    first, last = share(width, thread_number(), number_of_threads())
    bits = row.view(np.uint32)[:width]
    for r in range(region[ROWS]):
        residual = floats(source + 4 * width * r, width)
        summand = floats(region[SUMMAND] + 4 * width * r, width)
        for i in range(width):
            row[i] = residual[i] + summand[i]
        kept = floats(target + 4 * width * r, width)
        for i in range(first, last):
            kept[i] = row[i]
        factor = np.float32(1.0) / np.float32(math.sqrt(_mean_square(row[:width]) + epsilon))
        for i in range(width):
            row[i] = row[i] * factor * weights[i]
        if region[NORMED] != 0:
            _write(region, row[first:last], region[NORMED], width * r + first)
        _round(row[:width], bits, rounded[width * r :], scales, r)


@kernel
def _into_qkv(region: Any, source: int, target: int, scratch: Any) -> None:
    """The next layer's queries, keys and values; after the last layer, the normalised hidden state."""
    _normed(region, source, target, region[NEXT_NORM], scratch)
    product, rows = region[QKV:], region[ROWS]
    channels = product[_CHANNELS_OUT]
    first, last = share(channels // CHANNELS, thread_number(), number_of_threads())
    result = np.empty(CHANNELS * rows, np.float32)
    for block in range(first, last):
        _block(product, block, rows, scratch, result)
        for r in range(rows):
            of_row = result[CHANNELS * r : CHANNELS * (r + 1)]
            _write(region, of_row, product[_RESULT], channels * r + CHANNELS * block)


@kernel
def _into_summand(region: Any, product: Any, scratch: Any) -> None:
    channels, rows = product[_CHANNELS_OUT], region[ROWS]
    first, last = share(channels // CHANNELS, thread_number(), number_of_threads())
    result = np.empty(CHANNELS * rows, np.float32)
    for block in range(first, last):
        _block(product, block, rows, scratch, result)
        for r in range(rows):
            of_row = floats(product[_RESULT] + 4 * (channels * r + CHANNELS * block), CHANNELS)
            of_row[:] = result[CHANNELS * r : CHANNELS * (r + 1)]


@kernel
def _into_activated(region: Any, scratch: Any) -> None:
    product, rows = region[GATE_UP:], region[ROWS]
    channels = product[_CHANNELS_OUT] // 2
    blocks = channels // CHANNELS
    first, last = share(blocks, thread_number(), number_of_threads())
    gates, ups = np.empty(CHANNELS * rows, np.float32), np.empty(CHANNELS * rows, np.float32)
    for block in range(first, last):
        _block(product, block, rows, scratch, gates)
        _block(product, blocks + block, rows, scratch, ups)
        for r in range(rows):
            begin, end = CHANNELS * r, CHANNELS * (r + 1)
            of_row = floats(product[_RESULT] + 4 * (channels * r + CHANNELS * block), CHANNELS)
            _sigmoid_product(gates[begin:end], ups[begin:end], of_row)


@kernel
def _round_input(region: Any, scratch: Any) -> None:
    row, rounded, scales, _ = scratch
    depth = region[OUTPUT + _CHANNELS_IN]
    bits = row.view(np.uint32)[:depth]
    for r in range(region[ROWS]):
        _read(region, region[INPUT], depth * r, row[:depth])
        _round(row[:depth], bits, rounded[depth * r :], scales, r)


@kernel
def _scratch(region: Any) -> Any:
    """A thread's own: a row, float32; all rows, rounded; their scales; what the instruction sums up."""
    widest = max(region[WIDTH], region[OUTPUT + _CHANNELS_IN], region[DOWN + _CHANNELS_IN])
    rows = region[ROWS]
    return (
        np.empty(widest, np.float32),
        np.empty(rows * widest, np.uint8),
        np.empty(rows, np.float32),
        np.empty(CHANNELS * rows, np.int32),
    )


@kernel
def _between_attentions(region: Any, scratch: Any) -> None:
    _, rounded, scales, _ = scratch
    _round_input(region, scratch)
    _into_summand(region, region[OUTPUT:], scratch)
    barrier()
    _normed(region, region[OTHER_RESIDUAL], region[RESIDUAL], region[NORM], scratch)
    _into_activated(region, scratch)
    barrier()
    depth = region[DOWN + _CHANNELS_IN]
    for r in range(region[ROWS]):
        address = region[GATE_UP + _RESULT] + 4 * depth * r
        _round(floats(address, depth), words(address, depth), rounded[depth * r :], scales, r)
    _into_summand(region, region[DOWN:], scratch)
    barrier()
    _into_qkv(region, region[RESIDUAL], region[OTHER_RESIDUAL], scratch)


def _regions(digest_of_callees: int) -> tuple[Callable[[Any], None], ...]:
    """The regions; with the digest in their closures numba's cache notices changes of what they call."""

    def before_layers(description: Any) -> None:
        """Normalise the embeddings, at ``RESIDUAL``, and project them to the first layer's queries, keys and values."""
        _ = digest_of_callees
        region = numba.carray(description, (_FIELDS,), np.int64)
        _into_qkv(region, region[RESIDUAL], region[OTHER_RESIDUAL], _scratch(region))

    def after_attention(description: Any) -> None:
        """From what a layer attended to, at ``INPUT``, to the next layer's queries, keys and values."""
        _ = digest_of_callees
        region = numba.carray(description, (_FIELDS,), np.int64)
        _between_attentions(region, _scratch(region))

    def project(description: Any) -> None:
        """The product ``OUTPUT`` of the hidden states at ``INPUT``, as float32: the model's head."""
        _ = digest_of_callees
        region = numba.carray(description, (_FIELDS,), np.int64)
        scratch = _scratch(region)
        _round_input(region, scratch)
        _into_summand(region, region[OUTPUT:], scratch)

    def all_layers(description: Any) -> None:
        """A whole pass, from the embeddings to the hidden states; described in ``attention_kernels``."""
        _ = digest_of_callees
        call = numba.carray(description, (attention.FIELDS,), np.int64)
        layers = integers(call[attention.LAYERS], 2 * call[attention.NUM_LAYERS])
        scratch = _scratch(integers(layers[1], _FIELDS))
        before = integers(call[attention.BEFORE_LAYERS], _FIELDS)
        _into_qkv(before, before[RESIDUAL], before[OTHER_RESIDUAL], scratch)
        for layer in range(call[attention.NUM_LAYERS]):
            barrier()
            attention.rotate_and_store(call, layers[2 * layer])
            barrier()
            attention.attend(call, layers[2 * layer])
            barrier()
            _between_attentions(integers(layers[2 * layer + 1], _FIELDS), scratch)

    return before_layers, after_attention, project, all_layers


class Compiled(NamedTuple):
    """Machine code of each region, called by its ``address``."""

    before_layers: CFunc
    after_attention: CFunc
    project: CFunc
    all_layers: CFunc


@functools.cache
def compiled() -> Compiled:
    """The regions, for this CPU."""
    runtime()  # makes its functions known to the compiler
    signature = types.void(types.voidptr)
    digest = source_digest(int8_dot.__file__, region_kernels.__file__, attention_tile.__file__, attention.__file__)
    return Compiled(*(callback(region, signature) for region in _regions(digest)))
