"""Do the attention kernels store and find what the reference does, the same bits whoever else is in the pass?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import ir
from numba import types
from reference.attention import Numbers, attended, cosines_and_sines, rotated
from reference.int8_layers import Floats, bfloat16

from vllm_tokentiming.engine import attention_kernels as kernels
from vllm_tokentiming.engine import attention_tile, int8_dot, openmp
from vllm_tokentiming.engine.region_kernels import barrier

pytestmark = pytest.mark.skipif(
    int8_dot.INSTRUCTIONS is None or openmp.runtime() is None,
    reason="needs an x86 CPU with AVX2 or AVX-512 VNNI, and PyTorch's OpenMP runtime",
)

BLOCK, BLOCKS_OF_REQUEST, MAX_POSITIONS = 64, 4, 256
SHAPES = {"one KV head for three": (6, 2, 64), "a KV head each": (4, 4, 32), "seven, wide": (7, 1, 128)}


@pytest.fixture(scope="module")
def region() -> Any:
    """Store, then attend, on all threads."""
    assert openmp.runtime() is not None

    def both(description: Any) -> None:
        described = numba.carray(description, (kernels.FIELDS + 1,), np.int64)
        call, kv = described[: kernels.FIELDS], described[kernels.FIELDS]
        kernels.rotate_and_store(call, kv)
        barrier()
        kernels.attend(call, kv)

    return numba.cfunc(types.void(types.voidptr))(both)


class Cache:
    """One layer's KV for some requests, and the reference's list of each one's keys and values."""

    def __init__(self, shape: tuple[int, int, int], *, requests: int, wide: bool) -> None:
        self.heads, self.kv_heads, self.size = shape
        self.wide = wide
        self.scale = np.array([self.size**-0.5], np.float32)
        self.cos_sin = cosines_and_sines(MAX_POSITIONS, self.size).astype(np.float32)
        blocks = requests * BLOCKS_OF_REQUEST
        # No block is where its number says; what nobody stored is no number, and must not be looked at.
        self.table = np.random.default_rng(1).permutation(blocks).astype(np.int32).reshape(requests, -1)
        dtype, nothing = (np.float32, np.nan) if wide else (np.uint16, 0x7FC0)
        self.kv = np.full((blocks, self.kv_heads, 2 * BLOCK * self.size), nothing, dtype)
        self.known: list[list[tuple[Numbers, Numbers]]] = [[] for _ in range(requests)]

    def run(self, region: Any, qkv: Floats, *, requests: Sequence[int]) -> Floats:
        """The next token of each row's request, in order; returns [rows, queries]."""
        seen = [len(known) for known in self.known]
        positions = np.zeros(len(requests), np.int64)
        for row, request in enumerate(requests):
            positions[row] = seen[request]
            seen[request] += 1
        found = np.full((len(requests), self.heads * self.size), np.nan, np.float32)
        of_rows = np.array(requests, np.int64)
        kept = np.ascontiguousarray(qkv, np.float32).copy()
        description = np.zeros(kernels.FIELDS + 1, np.int64)
        description[: kernels.FIELDS] = kernels.describe(
            {
                kernels.ROWS: len(requests),
                kernels.HEADS: self.heads,
                kernels.KV_HEADS: self.kv_heads,
                kernels.HEAD_SIZE: self.size,
                kernels.BLOCK_SIZE: BLOCK,
                kernels.BLOCK_STRIDE: self.kv[0].size,
                kernels.HEAD_STRIDE: self.kv[0, 0].size,
                kernels.IS_FLOAT32: self.wide,
                kernels.SCALE: self.scale.ctypes.data,
                kernels.COS_SIN: self.cos_sin.ctypes.data,
                kernels.QKV: kept.ctypes.data,
                kernels.ATTENDED: found.ctypes.data,
                kernels.POSITIONS: positions.ctypes.data,
                kernels.REQUESTS: of_rows.ctypes.data,
                kernels.BLOCK_TABLE: self.table.ctypes.data,
                kernels.TABLE_WIDTH: self.table.shape[1],
            }
        )
        description[kernels.FIELDS] = self.kv.ctypes.data
        openmp.ParallelRegion(region.address)(description.ctypes.data)
        return found

    def expect(self, qkv: Floats, *, requests: Sequence[int]) -> Numbers:
        """The same by the reference, which remembers the tokens."""
        rows = []
        for of_row, request in zip(qkv.astype(np.float64), requests, strict=True):
            by_head = of_row.reshape(-1, self.size)
            known = self.known[request]
            cos_sin = self.cos_sin[len(known)].astype(np.float64)
            keys = np.stack([rotated(k, cos_sin) for k in by_head[self.heads : self.heads + self.kv_heads]])
            values = by_head[self.heads + self.kv_heads :]
            known.append((self.stored(keys), self.stored(values)))
            rows.append(
                [
                    attended(
                        rotated(by_head[head], cos_sin),
                        np.stack([k[head * self.kv_heads // self.heads] for k, _ in known]),
                        np.stack([v[head * self.kv_heads // self.heads] for _, v in known]),
                        scale=float(self.scale[0]),
                    )
                    for head in range(self.heads)
                ]
            )
        return np.array(rows).reshape(len(rows), -1)

    def stored(self, numbers: Numbers) -> Numbers:
        narrowed = numbers.astype(np.float32)
        return (narrowed if self.wide else bfloat16(narrowed)).astype(np.float64)

    def tokens(self, random: np.random.Generator, rows: int) -> Floats:
        return random.normal(size=(rows, (self.heads + 2 * self.kv_heads) * self.size)).astype(np.float32)


@pytest.mark.parametrize("wide", [False, True], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_as_the_reference(region: Any, shape: tuple[int, int, int], wide: bool, threads: int) -> None:
    """Prompts, single tokens and a few of several requests in one pass, across blocks."""
    cache, random = Cache(shape, requests=3, wide=wide), np.random.default_rng(0)
    for requests in ([0] * 61, [0], [1] * 7, [0, 1, 2], [0] * 5 + [2] * 3 + [1], [0], [2] * 70, [2, 0]):
        qkv = cache.tokens(random, len(requests))
        found = cache.run(region, qkv, requests=requests)
        expected = cache.expect(qkv, requests=requests)
        # A key on the edge between two bfloat16 may be rounded to the other one.
        assert np.abs(found - expected).max() < (1e-5 if wide else 2e-2)
        assert np.median(np.abs(found - expected)) < 1e-6


def test_the_same_bits_whoever_else_is_there(region: Any) -> None:
    """And however many tokens of its own a pass has."""
    random = np.random.default_rng(0)
    alone = Cache(SHAPES["one KV head for three"], requests=2, wide=False)
    qkv, others = alone.tokens(random, 150), alone.tokens(random, 150)
    expected = []
    for row in qkv:
        expected.append(alone.run(region, row[None], requests=[0])[0])
        alone.known[0].append((np.zeros(0), np.zeros(0)))
    for cuts in ([32] * 5, [1, 4, 5, 100, 40], [150]):
        beside = Cache(SHAPES["one KV head for three"], requests=2, wide=False)
        found: list[Floats] = []
        for cut in cuts:
            own = qkv[len(found) : len(found) + cut]
            requests = [1, 1, 1] + [0] * len(own) + [1]
            both = np.concatenate([others[:3], own, others[3:4]])
            found += list(beside.run(region, both, requests=requests)[3 : 3 + len(own)])
            for request in requests:
                beside.known[request].append((np.zeros(0), np.zeros(0)))
        assert np.array_equal(np.stack(found), np.stack(expected))


@pytest.mark.parametrize("is_float32", [False, True])
@pytest.mark.parametrize("columns", [16, 32, 64])
@pytest.mark.parametrize("queries", range(1, attention_tile.QUERIES + 1))
@pytest.mark.parametrize("lanes", [8, 16], ids=["AVX2", "AVX-512"])
def test_a_tile(lanes: int, queries: int, columns: int, is_float32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, on whole numbers: it adds to what is there, and writes nothing beside it. Those of other CPUs, too."""
    monkeypatch.setattr(attention_tile, "_LANES", lanes)
    monkeypatch.setattr(attention_tile, "_REGISTER", ir.VectorType(ir.FloatType(), lanes))
    tile = attention_tile.tile_of(queries, columns=columns, is_float32=is_float32)

    @numba.njit
    def multiply(weights: Any, rows: Any, results: Any) -> None:
        tile(
            weights.ctypes.data, weights.strides[0], rows.ctypes.data, rows.strides[0], len(rows),
            results.ctypes.data, results.strides[0],
        )  # fmt: skip

    for number in (1, 2, 7, 64):
        random = np.random.default_rng(number)
        weights = random.integers(-9, 10, (queries, number + 3)).astype(np.float32)
        rows = random.integers(-9, 10, (number, columns + 5)).astype(np.float32)
        results = random.integers(-9, 10, (queries + 1, columns + 2)).astype(np.float32)
        expected = results.copy()
        expected[:queries, :columns] += weights[:, :number] @ rows[:, :columns]
        multiply(weights, rows if is_float32 else (rows.view(np.uint32) >> 16).astype(np.uint16), results)
        assert np.array_equal(results, expected)


@pytest.mark.parametrize(
    ("head_size", "block_size", "fits"), [(64, 128, True), (96, 32, True), (80, 128, False), (64, 16, False)]
)
def test_which_shapes_fit(head_size: int, block_size: int, fits: bool) -> None:
    assert (kernels.why_unfit(head_size=head_size, block_size=block_size) is None) is fits
