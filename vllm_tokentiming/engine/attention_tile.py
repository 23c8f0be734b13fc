"""How are some weights multiplied with rows of KV, so that a result does not depend on how many are taken together?

Scores are sums over a head's numbers of query times keys, outputs are sums over tokens of weight times values: both are
one product. A tile of it, some queries by ``WIDTH`` columns, stays in registers while it goes along the rows; each row
is read, and widened from bfloat16, once for all queries. Even and odd rows have sums of their own, since the next
addition to a register waits for the last one. Fused multiply-adds are asked for by name: left to the compiler, one
query might be rounded otherwise than four.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from vllm_tokentiming.engine.int8_dot import INSTRUCTIONS, VNNI, typed_intrinsic

_HAS_WIDE_REGISTERS: Final = INSTRUCTIONS == VNNI

WIDTH: Final = 32 if _HAS_WIDE_REGISTERS else 16
"""Columns of a tile."""

QUERIES: Final = 4 if _HAS_WIDE_REGISTERS else 2
"""Most queries of a tile: with both sums they take half of the registers."""

_FLOAT, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_LANES: Final = ir.VectorType(_FLOAT, WIDTH)


def tile_of(queries: int, *, is_float32: bool) -> Any:
    """An intrinsic that adds the products of so many queries' weights with rows of ``WIDTH`` numbers to their results.

    Called with addresses and numbers, int64: the weights of the first query, float32, and bytes to those of the next;
    the first row, float32 or bfloat16, and bytes to the next; how many rows; the first query's result, float32
    [WIDTH], and bytes to that of the next.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _emit(builder, queries, is_float32, arguments)
        return context.get_dummy_value()

    @typed_intrinsic
    def tile(
        _typing_context: Any,
        _weights: Any,
        _to_next_weights: Any,
        _rows: Any,
        _to_next_row: Any,
        _number: Any,
        _results: Any,
        _to_next_result: Any,
    ) -> Any:
        return types.void(*[types.int64] * 7), generate

    return tile


def _emit(builder: Any, queries: int, is_float32: bool, arguments: Any) -> None:
    weights, to_next_weights, rows, to_next_row, number, results, to_next_result = arguments
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_LANES, [_LANES] * 3), f"llvm.fma.v{WIDTH}f32"
    )
    zero = ir.Constant(_LANES, [0.0] * WIDTH)
    sums = {place: cgutils.alloca_once_value(builder, zero) for place in itertools.product(range(2), range(queries))}

    def take(row: Any, parity: int) -> None:
        numbers = _numbers_at(builder, builder.add(rows, builder.mul(row, to_next_row)), is_float32)
        for query in range(queries):
            of_query = builder.add(weights, builder.mul(to_next_weights, _I64(query)))
            weight = _spread(builder, builder.add(of_query, builder.mul(row, _I64(4))))
            slot = sums[parity, query]
            builder.store(builder.call(multiply_add, [weight, numbers, builder.load(slot)]), slot)

    with cgutils.for_range(builder, builder.lshr(number, _I64(1)), intp=_I64) as loop:
        for parity in range(2):
            take(builder.add(builder.mul(loop.index, _I64(2)), _I64(parity)), parity)
    with builder.if_then(builder.trunc(number, ir.IntType(1))):
        take(builder.sub(number, _I64(1)), 0)
    for query in range(queries):
        address = builder.add(results, builder.mul(to_next_result, _I64(query)))
        place = builder.inttoptr(address, _LANES.as_pointer())
        both = builder.fadd(builder.load(sums[0, query]), builder.load(sums[1, query]))
        builder.store(builder.fadd(builder.load(place, align=4), both), place, align=4)


def _numbers_at(builder: Any, address: Any, is_float32: bool) -> Any:
    if is_float32:
        return builder.load(builder.inttoptr(address, _LANES.as_pointer()), align=4)
    # bfloat16 is the upper half of a float32.
    halves = builder.load(builder.inttoptr(address, ir.VectorType(_I16, WIDTH).as_pointer()), align=2)
    words_type = ir.VectorType(_I32, WIDTH)
    words = builder.shl(builder.zext(halves, words_type), ir.Constant(words_type, [16] * WIDTH))
    return builder.bitcast(words, _LANES)


def _spread(builder: Any, address: Any) -> Any:
    """A number in every lane."""
    value = builder.load(builder.inttoptr(address, _FLOAT.as_pointer()), align=4)
    nothing = ir.Constant(_LANES, ir.Undefined)
    every = ir.Constant(ir.VectorType(_I32, WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _I32(0)), nothing, every)
