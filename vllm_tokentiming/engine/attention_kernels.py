"""How do a few rows of a draft attend to the KV before them, on the threads of a region that goes on all the while?

vLLM's kernels for it fork and join the threads three times a layer (rotation, storing, attention), which together with
their dispatch takes as long as a third of a decode step of a small draft. Here each is a part of a region, with a
barrier in between. All is float32 but the KV, which is bfloat16 or float32 and lies as vLLM's vector kernels lay it
out: in a block of a KV head first the keys, [head size, block size], then the values, [block size, head size].

A row is computed by itself, in the same order whatever else is in the pass, so that the same bits come out: int8
products after it amplify any difference, and a seed could not give the same output again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.engine.attention_tile import COLUMNS, QUERIES, REST, tile_of
from vllm_tokentiming.engine.region_kernels import (
    described,
    exponential,
    floats,
    halves,
    integers,
    kernel,
    kernel_in_any_order,
    kernel_of_fused_products,
    narrow,
    number_of_threads,
    share,
    short_integers,
    thread_number,
)

# Fields of a pass's description, int64: numbers and addresses.
ROWS, HEADS, KV_HEADS, HEAD_SIZE = 0, 1, 2, 3
BLOCK_SIZE, BLOCK_STRIDE, HEAD_STRIDE, IS_FLOAT32 = 4, 5, 6, 7
SCALE, COS_SIN, QKV, ATTENDED = 8, 9, 10, 11
POSITIONS, REQUESTS, BLOCK_TABLE, TABLE_WIDTH = 12, 13, 14, 15
NUM_LAYERS, LAYERS, BEFORE_LAYERS = 16, 17, 18
FIELDS: Final = 19
"""Strides count numbers of the KV, and ``IS_FLOAT32`` is of the KV. ``SCALE`` is a float32, ``COS_SIN`` float32
[positions, head size], cosines first. ``QKV`` is float32 [rows, queries + keys + values], ``ATTENDED`` float32 [rows,
queries]; ``POSITIONS`` and ``REQUESTS`` int64 [rows], the latter a row's of ``BLOCK_TABLE``, int32. ``LAYERS`` is int64
[layers, 2]: a layer's KV, and the description of the region after its attention."""


def why_unfit(*, head_size: int, block_size: int) -> str | None:
    """What keeps KV of this shape from the kernels; None where nothing does."""
    if head_size % REST or block_size % REST:
        return f"heads of {head_size} numbers in blocks of {block_size} tokens do not divide into {REST}"
    return None


def describe(numbers: Mapping[int, int]) -> npt.NDArray[np.int64]:
    """What a pass gets: int64, by the names of the fields above; those left out are 0."""
    return described(numbers, fields=FIELDS)


@kernel
def _slot(call: Any, row: int, kv_head: int) -> tuple[int, int]:
    """Where a row's block of a KV head begins, in numbers of the KV, and the row's place in it."""
    position = integers(call[POSITIONS], call[ROWS])[row]
    table = _table(call, row)
    block = table[position // call[BLOCK_SIZE]]
    return block * call[BLOCK_STRIDE] + kv_head * call[HEAD_STRIDE], position % call[BLOCK_SIZE]


@kernel
def _table(call: Any, row: int) -> Any:
    request = integers(call[REQUESTS], call[ROWS])[row]
    return short_integers(call[BLOCK_TABLE] + 4 * request * call[TABLE_WIDTH], call[TABLE_WIDTH])


@kernel_of_fused_products
def _rotate(head: Any, cos_sin: Any, factor: Any) -> None:
    """Rotary embedding (Su et al., arXiv 2104.09864) of one head, its halves paired as in GPT-NeoX, times a factor."""
    half = len(head) // 2
    for i in range(half):
        one, other = head[i], head[half + i]
        head[i] = (one * cos_sin[i] - other * cos_sin[half + i]) * factor
        head[half + i] = (other * cos_sin[i] + one * cos_sin[half + i]) * factor


@kernel
def _store_key(key: Any, into: Any, stride: int) -> None:
    for i in range(len(key)):
        into[i * stride] = key[i]


@kernel
def rotate_and_store(call: Any, kv: int) -> None:
    """Rotate queries, times the scale, and keys; write keys and values to this layer's KV. Each thread its share."""
    heads, kv_heads, size, block_size = call[HEADS], call[KV_HEADS], call[HEAD_SIZE], call[BLOCK_SIZE]
    units = heads + kv_heads
    first, last = share(call[ROWS] * units, thread_number(), number_of_threads())
    scale = floats(call[SCALE], 1)[0]
    rounded = np.empty(size, np.uint16)
    for unit in range(first, last):
        row, head = unit // units, unit % units
        position = integers(call[POSITIONS], call[ROWS])[row]
        cos_sin = floats(call[COS_SIN] + 4 * size * position, size)
        qkv = call[QKV] + 4 * size * row * (heads + 2 * kv_heads)
        part = floats(qkv + 4 * size * head, size)
        if head < heads:
            _rotate(part, cos_sin, scale)
            continue
        _rotate(part, cos_sin, np.float32(1.0))
        value = floats(qkv + 4 * size * (head + kv_heads), size)
        begin, place = _slot(call, row, head - heads)
        of_values = begin + size * (block_size + place)
        if call[IS_FLOAT32] != 0:
            _store_key(part, floats(kv + 4 * (begin + place), size * block_size - place), block_size)
            kept = floats(kv + 4 * of_values, size)
            kept[:] = value
        else:
            narrow(part.view(np.uint32), rounded)
            _store_key(rounded, halves(kv + 2 * (begin + place), size * block_size - place), block_size)
            narrow(value.view(np.uint32), halves(kv + 2 * of_values, size))


def _products_of(queries: int) -> Any:
    """A kernel that adds so many queries' weights times rows of KV to their results.

    Its arguments: whether the KV is float32; the address of the first query's weights, and bytes to the next's; the
    address of the first row, how many, and numbers from one to the next; the address of the first query's result,
    bytes to the next's, and columns, a multiple of ``REST``.
    """
    step = COLUMNS[queries]
    tile, tile_of_halves = (tile_of(queries, columns=step, is_float32=kind) for kind in (True, False))
    rest, rest_of_halves = (tile_of(queries, columns=REST, is_float32=kind) for kind in (True, False))

    @kernel
    def add_products(is_float32: bool, weights: Any, rows: Any, results: Any) -> None:
        first, to_next = weights
        kv, number, length = rows
        result, to_next_result, columns = results
        column = 0
        while column < columns:
            into = result + 4 * column
            if columns - column >= step:
                if is_float32:
                    tile(first, to_next, kv + 4 * column, 4 * length, number, into, to_next_result)
                else:
                    tile_of_halves(first, to_next, kv + 2 * column, 2 * length, number, into, to_next_result)
                column += step
            else:
                if is_float32:
                    rest(first, to_next, kv + 4 * column, 4 * length, number, into, to_next_result)
                else:
                    rest_of_halves(first, to_next, kv + 2 * column, 2 * length, number, into, to_next_result)
                column += REST

    return add_products


_products_of_one, _products_of_two, _products_of_three, _products_of_four = (
    _products_of(queries) for queries in range(1, QUERIES + 1)
)


@kernel
def _add_products(of: Any, weights: Any, rows: Any, results: Any) -> None:
    """``of``: how many queries, and whether the KV is float32; the rest as for ``_products_of``."""
    queries, is_float32 = of
    if queries == 1:
        _products_of_one(is_float32, weights, rows, results)
    elif queries == 2:
        _products_of_two(is_float32, weights, rows, results)
    elif queries == 3:
        _products_of_three(is_float32, weights, rows, results)
    else:
        _products_of_four(is_float32, weights, rows, results)


@kernel_in_any_order
def _largest(scores: Any) -> Any:
    largest = scores[0]
    for i in range(len(scores)):
        largest = max(largest, scores[i])
    return largest


@kernel
def _weigh(scores: Any, largest: Any) -> None:
    for i in range(len(scores)):
        scores[i] = exponential(scores[i] - largest)


@kernel_in_any_order
def _total(weights: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(weights)):
        total += weights[i]
    return total


@kernel
def _longest(call: Any) -> int:
    longest = 0
    positions = integers(call[POSITIONS], call[ROWS])
    for row in range(call[ROWS]):
        longest = max(longest, positions[row] + 1)
    return longest


@kernel
def _has_long_runs(call: Any) -> bool:
    """Whether the pass has, on the average, as many rows of a request as can be taken at once."""
    requests = integers(call[REQUESTS], call[ROWS])
    runs = 1
    for row in range(1, call[ROWS]):
        runs += requests[row] != requests[row - 1]
    return bool(call[ROWS] >= QUERIES * runs)


@kernel
def _rows_together(call: Any, row: int, most: int) -> int:
    """How many rows can be taken at once from this one on: those of one request, in order."""
    requests, positions = integers(call[REQUESTS], call[ROWS]), integers(call[POSITIONS], call[ROWS])
    rows = 1
    while (
        rows < min(most, QUERIES)
        and requests[row + rows] == requests[row]
        and positions[row + rows] == positions[row] + rows
    ):
        rows += 1
    return rows


@kernel
def _attend_together(call: Any, kv: int, first: Any, queries: Any, scores: Any) -> None:
    """What some queries find that look at the same KV.

    Args:
        call: the pass.
        kv: this layer's.
        first: row and head of the first query.
        queries: how many, and 1 where each is of the next row, 0 where it is the next head of the same row.
        scores: float32 [QUERIES, tokens], overwritten.
    """
    row, head = first
    number, is_next_row = queries
    heads, kv_heads, size, block_size = call[HEADS], call[KV_HEADS], call[HEAD_SIZE], call[BLOCK_SIZE]
    is_float32 = call[IS_FLOAT32] != 0
    number_size = 4 if is_float32 else 2
    context = integers(call[POSITIONS], call[ROWS])[row] + 1
    longest = context + (number - 1) * is_next_row
    table = _table(call, row)
    of_head = head // (heads // kv_heads) * call[HEAD_STRIDE]
    width = heads + 2 * kv_heads
    of_queries = (call[QKV] + 4 * size * (row * width + head), 4 * size * (width if is_next_row else 1))
    results = call[ATTENDED] + 4 * size * (row * heads + head)
    to_next_result = 4 * size * (heads if is_next_row else 1)
    scores[:number] = np.float32(0.0)
    to_next = 4 * scores.shape[1]
    for begin in range(0, longest, block_size):
        tokens = min(block_size, (longest - begin + REST - 1) // REST * REST)
        keys = kv + number_size * (table[begin // block_size] * call[BLOCK_STRIDE] + of_head)
        into = (scores.ctypes.data + 4 * begin, to_next, tokens)
        _add_products((number, is_float32), of_queries, (keys, size, block_size), into)
    for query in range(number):
        end = context + query * is_next_row
        of_query = scores[query, :end]
        _weigh(of_query, _largest(of_query))
        share_of_one = np.float32(1.0) / _total(of_query)
        for i in range(len(of_query)):
            of_query[i] *= share_of_one
        scores[query, end:longest] = np.float32(0.0)
        result = floats(results + to_next_result * query, size)
        result[:] = np.float32(0.0)
    for begin in range(0, longest, block_size):
        tokens = min(block_size, longest - begin)
        values = kv + number_size * (table[begin // block_size] * call[BLOCK_STRIDE] + of_head + size * block_size)
        weights = (scores.ctypes.data + 4 * begin, to_next)
        _add_products((number, is_float32), weights, (values, tokens, size), (results, to_next_result, size))


@kernel
def attend(call: Any, kv: int) -> None:
    """What each row's heads find at this layer's KV, from the row's own token back. Each thread its share.

    KV is read once for several rows of a request, in a prompt, or for several heads that share it.
    """
    rows, heads = call[ROWS], call[HEADS]
    group = heads // call[KV_HEADS]
    unit, end = share(rows * heads, thread_number(), number_of_threads())
    scores = np.empty((QUERIES, (_longest(call) + REST - 1) // REST * REST), np.float32)
    by_rows = _has_long_runs(call)
    while unit < end:
        if by_rows:
            head, row = unit // rows, unit % rows
            queries = _rows_together(call, row, min(end - unit, rows - row))
            _attend_together(call, kv, (row, head), (queries, 1), scores)
        else:
            row, head = unit // heads, unit % heads
            queries = min(end - unit, group - head % group, QUERIES)
            _attend_together(call, kv, (row, head), (queries, 0), scores)
        unit += queries
