"""How does this CPU multiply a block of int8 weights with rows of int8 inputs? Its own instructions, through numba.

A block is 32 output channels as vLLM and SGLang pack them, int8 [K/4, 32, 4]: a quad of inputs meets the quads of all
channels at once. Two sets of instructions give the same integers:

- AVX-512 VNNI: ``vpdpbusd`` multiplies unsigned by signed bytes and adds up quads, so inputs are moved up by 128, and
  128 times the sum of a channel's weights has to be taken off (``OFFSET``).
- AVX2: ``vpmaddubsw`` multiplies unsigned by signed bytes too, but adds pairs in 16 bits, which moved inputs overflow.
  It gets the weights' magnitudes and inputs that took their signs: 2 · 128 · 127 fits, as inputs are never -128.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

CHANNELS: Final = 32
"""Output channels of a block of packed weights."""

VNNI: Final = "avx512vnni"
AVX2: Final = "avx2"

_AHEAD: Final = 2048
"""Bytes of weights that are asked for before they are needed."""

_BYTE, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def available() -> list[str]:
    """The sets of instructions that this CPU has, best first; none on other kinds of CPU than x86."""
    features = llvm.get_host_cpu_features()
    return [name for name in (VNNI, AVX2) if features.get(name, False)]


INSTRUCTIONS: Final = next(iter(available()), None)
"""Those that kernels use; compiled into them, which numba's cache knows by the features of the CPU."""

OFFSET: Final = 128 if INSTRUCTIONS == VNNI else 0
"""What is added to each rounded input."""


def dot_of(rows: int, *, instructions: str) -> Any:
    """An intrinsic that multiplies a block of weights with so many rows of bytes.

    Called with the addresses of the weights, of the rows and of the result, int32 [rows, 32], and with the rows' length
    in quads of bytes, even.
    """
    emit = _emit_vnni if instructions == VNNI else _emit_avx2

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit(builder, rows, arguments)
        return context.get_dummy_value()

    @typed_intrinsic
    def dot(_typing_context: Any, _weights: Any, _rows: Any, _sums: Any, _quads: Any) -> Any:
        return types.void(types.int64, types.int64, types.int64, types.int64), generate

    return dot


def typed_intrinsic(function: Callable[..., Any]) -> Any:
    """Numba's ``intrinsic``, which has no types."""
    return intrinsic(function)


def _emit_vnni(builder: Any, rows: int, arguments: Any) -> None:
    """The next instruction on the same lanes waits for the last one, so even and odd quads have lanes of their own."""
    weights, inputs, sums, quads = arguments
    lanes_type = ir.VectorType(_I32, 16)
    instruction = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(lanes_type, [lanes_type] * 3), "llvm.x86.avx512.vpdpbusd.512"
    )
    zero = ir.Constant(lanes_type, [0] * 16)
    lanes = {
        place: cgutils.alloca_once_value(builder, zero) for place in itertools.product(range(2), range(2), range(rows))
    }
    with cgutils.for_range(builder, builder.lshr(quads, _I64(1)), intp=_I64) as loop:
        for odd, part in itertools.product(range(2), range(2)):
            quad = builder.add(builder.mul(loop.index, _I64(2)), _I64(odd))
            block = _weights_at(builder, weights, quad, 64 * part, lanes_type)
            for row in range(rows):
                spread = _quad_of(builder, inputs, builder.add(builder.mul(quads, _I64(row)), quad), lanes_type)
                slot = lanes[odd, part, row]
                builder.store(builder.call(instruction, [builder.load(slot), spread, block]), slot)
    for row, part in itertools.product(range(rows), range(2)):
        total = builder.add(builder.load(lanes[0, part, row]), builder.load(lanes[1, part, row]))
        _store(builder, total, builder.add(sums, _I64(128 * row + 64 * part)))


def _emit_avx2(builder: Any, rows: int, arguments: Any) -> None:
    """There are sixteen registers: with more than two rows, half of the channels at a time."""
    weights, inputs, sums, quads = arguments
    bytes_type, words_type, lanes_type = (
        ir.VectorType(_BYTE, 32),
        ir.VectorType(ir.IntType(16), 16),
        ir.VectorType(_I32, 8),
    )

    def function(name: str, result: Any, *arguments: Any) -> Any:
        return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)

    magnitude = function("llvm.abs.v32i8", bytes_type, bytes_type, ir.IntType(1))
    with_sign = function("llvm.x86.avx2.psign.b", bytes_type, bytes_type, bytes_type)
    pairs = function("llvm.x86.avx2.pmadd.ub.sw", words_type, bytes_type, bytes_type)
    fours = function("llvm.x86.avx2.pmadd.wd", lanes_type, words_type, words_type)
    ones, zero = ir.Constant(words_type, [1] * 16), ir.Constant(lanes_type, [0] * 8)
    wrap = ir.Constant(ir.IntType(1), 0)
    for parts in (range(4),) if rows <= 2 else (range(2), range(2, 4)):
        lanes = {place: cgutils.alloca_once_value(builder, zero) for place in itertools.product(parts, range(rows))}
        with cgutils.for_range(builder, quads, intp=_I64) as loop:
            spreads = [
                builder.bitcast(
                    _quad_of(builder, inputs, builder.add(builder.mul(quads, _I64(row)), loop.index), lanes_type),
                    bytes_type,
                )
                for row in range(rows)
            ]
            for part in parts:
                block = _weights_at(builder, weights, loop.index, 32 * part, bytes_type)
                sizes = builder.call(magnitude, [block, wrap])
                for row, spread in enumerate(spreads):
                    products = builder.call(pairs, [sizes, builder.call(with_sign, [spread, block])])
                    slot = lanes[part, row]
                    builder.store(builder.add(builder.load(slot), builder.call(fours, [products, ones])), slot)
        for (part, row), slot in lanes.items():
            _store(builder, builder.load(slot), builder.add(sums, _I64(128 * row + 32 * part)))


def _weights_at(builder: Any, weights: Any, quad: Any, offset: int, kind: Any) -> Any:
    """The weights of some channels for a quad of inputs; those further on are asked for, once a line."""
    place = builder.add(weights, builder.add(builder.mul(quad, _I64(4 * CHANNELS)), _I64(offset)))
    if offset % 64 == 0:
        pointer = _BYTE.as_pointer()
        prefetch = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32]), "llvm.prefetch.p0"
        )
        ahead = builder.inttoptr(builder.add(place, _I64(_AHEAD)), pointer)
        builder.call(prefetch, [ahead, _I32(0), _I32(3), _I32(1)])
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)


def _quad_of(builder: Any, inputs: Any, quad: Any, lanes_type: Any) -> Any:
    """Four bytes of inputs in every lane."""
    nothing, every = ir.Constant(lanes_type, ir.Undefined), ir.Constant(lanes_type, [0] * lanes_type.count)
    address = builder.add(inputs, builder.mul(quad, _I64(4)))
    value = builder.load(builder.inttoptr(address, _I32.as_pointer()), align=1)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _I32(0)), nothing, every)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)
