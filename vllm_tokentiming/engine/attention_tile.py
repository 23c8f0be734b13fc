"""How are some weights multiplied with rows of KV, so that a result does not depend on how many are taken together?

Scores are sums over a head's numbers of query times keys, outputs are sums over tokens of weight times values: both are
one product. A tile of it, some queries by some columns, stays in registers while it goes along the rows; each row is
read, and widened from bfloat16, once for all queries. However a product is cut into tiles, a number is the sum over the
rows in their order. Fused multiply-adds are asked for by name: left to the compiler, one query might be rounded
otherwise than four.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from vllm_tokentiming.engine.int8_dot import INSTRUCTIONS, VNNI, typed_intrinsic

_LANES: Final = 16 if INSTRUCTIONS == VNNI else 8
"""Numbers in a register, of which there are 32 with AVX-512 and 16 without."""

QUERIES: Final = 4
"""Most queries of a tile."""

COLUMNS: Final = {1: 64, 2: 64, 3: 64, 4: 64} if INSTRUCTIONS == VNNI else {1: 64, 2: 32, 3: 32, 4: 16}
"""Of a tile, by its queries. An addition to a register waits for the last one, so a tile has enough of them; with AVX2
more would not stay in registers."""

REST: Final = 32
"""Columns of the tiles behind those: what is multiplied has a multiple of these."""

_FLOAT, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_REGISTER: Final = ir.VectorType(_FLOAT, _LANES)


def tile_of(queries: int, *, columns: int, is_float32: bool) -> Any:
    """An intrinsic that adds the products of so many queries' weights with rows of KV to their results.

    Called with addresses and numbers, int64: the weights of the first query, float32, and bytes to those of the next;
    the first row, ``columns`` numbers of float32 or bfloat16, and bytes to the next; how many rows; the first query's
    result, float32 [columns], and bytes to that of the next.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _emit(builder, (queries, columns // _LANES), is_float32, arguments)
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


def _emit(builder: Any, shape: tuple[int, int], is_float32: bool, arguments: Any) -> None:
    """``shape``: queries, and registers of columns."""
    weights, to_next_weights, rows, to_next_row, number, results, to_next_result = arguments
    queries, parts = shape
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_REGISTER, [_REGISTER] * 3), f"llvm.fma.v{_LANES}f32"
    )
    zero = ir.Constant(_REGISTER, [0.0] * _LANES)
    sums = {
        place: cgutils.alloca_once_value(builder, zero) for place in itertools.product(range(queries), range(parts))
    }
    with cgutils.for_range(builder, number, intp=_I64) as loop:
        row = builder.add(rows, builder.mul(loop.index, to_next_row))
        of_row = builder.add(weights, builder.mul(loop.index, _I64(4)))
        spread = [
            _spread(builder, builder.add(of_row, builder.mul(to_next_weights, _I64(query)))) for query in range(queries)
        ]
        for part in range(parts):
            size = _LANES * (4 if is_float32 else 2)
            numbers = _numbers_at(builder, builder.add(row, _I64(size * part)), is_float32)
            for query in range(queries):
                slot = sums[query, part]
                builder.store(builder.call(multiply_add, [spread[query], numbers, builder.load(slot)]), slot)
    for (query, part), slot in sums.items():
        of_query = builder.add(results, builder.mul(to_next_result, _I64(query)))
        place = builder.inttoptr(builder.add(of_query, _I64(4 * _LANES * part)), _REGISTER.as_pointer())
        builder.store(builder.fadd(builder.load(place, align=4), builder.load(slot)), place, align=4)


def _numbers_at(builder: Any, address: Any, is_float32: bool) -> Any:
    if is_float32:
        return builder.load(builder.inttoptr(address, _REGISTER.as_pointer()), align=4)
    # bfloat16 is the upper half of a float32.
    halves = builder.load(builder.inttoptr(address, ir.VectorType(_I16, _LANES).as_pointer()), align=2)
    words_type = ir.VectorType(_I32, _LANES)
    words = builder.shl(builder.zext(halves, words_type), ir.Constant(words_type, [16] * _LANES))
    return builder.bitcast(words, _REGISTER)


def _spread(builder: Any, address: Any) -> Any:
    """A number in every lane."""
    value = builder.load(builder.inttoptr(address, _FLOAT.as_pointer()), align=4)
    nothing = ir.Constant(_REGISTER, ir.Undefined)
    every = ir.Constant(ir.VectorType(_I32, _LANES), [0] * _LANES)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _I32(0)), nothing, every)
