"""Do the int8 regions compute what the reference computes product by product?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch
from reference.int8_layers import Floats, Layer, Product, bfloat16, normalised, packed

from vllm_tokentiming.engine import int8_dot, openmp
from vllm_tokentiming.engine import int8_kernels as kernels

pytestmark = pytest.mark.skipif(
    int8_dot.INSTRUCTIONS is None or openmp.runtime() is None,
    reason="needs an x86 CPU with AVX2 or AVX-512 VNNI, and PyTorch's OpenMP runtime",
)

EPSILON = 1e-5
ROUNDING = 1e-6
"""Relative; of what stays float32."""
SIXTEEN_BITS = 2**-8


@dataclass(frozen=True, slots=True)
class Shape:
    width: int
    queries: int
    mlp: int
    qkv: int


SHAPES = {
    "as in SmolLM2-135M": Shape(width=576, queries=576, mlp=1536, qkv=960),
    "one block for each thread or less": Shape(width=32, queries=32, mlp=32, qkv=96),
    "queries wider than the rest": Shape(width=64, queries=128, mlp=96, qkv=192),
    "a depth of an odd number of quads of quads": Shape(width=96, queries=40, mlp=160, qkv=224),
}


class Bench:
    """A region on arrays of its own, and the reference's layer of the same weights."""

    def __init__(
        self, shape: Shape, *, rows: int, biased: bool = False, last: bool = False, wide: bool = False
    ) -> None:
        self.random = np.random.default_rng(0)
        self.rows, self.shape, self.wide = rows, shape, wide
        self.kept: list[Any] = []
        self.residual = self.floats(rows, shape.width)
        self.other = np.zeros_like(self.residual)
        self.summand = np.zeros_like(self.residual)
        attended = self.floats(rows, shape.queries)
        self.attended = attended if wide else bfloat16(attended)
        self.qkv = np.zeros((rows, shape.qkv), np.float32 if wide else np.uint16)
        self.normed = np.zeros((rows, shape.width), np.float32 if wide else np.uint16)
        self.activated = np.zeros((rows, shape.mlp), np.float32)
        norms = [self.random.uniform(0.5, 1.5, shape.width).astype(np.float32) for _ in range(2)]
        self.layer = Layer(
            output=self.product(shape.width, shape.queries, biased=biased),
            norm=norms[0],
            gate_up=self.product(2 * shape.mlp, shape.width, biased=biased),
            down=self.product(shape.width, shape.mlp, biased=biased),
            next_norm=norms[1],
            qkv=None if last else self.product(shape.qkv, shape.width, biased=biased),
            epsilon=EPSILON,
        )

    def floats(self, *shape: int) -> Floats:
        return self.random.normal(size=shape).astype(np.float32)

    def product(self, channels: int, depth: int, *, biased: bool) -> Product:
        weights = self.random.integers(-128, 128, (channels, depth), dtype=np.int8)
        scales = self.random.uniform(1e-4, 1e-3, channels).astype(np.float32)
        return Product(weights, scales, self.floats(channels) if biased else None)

    def address(self, array: npt.NDArray[Any]) -> int:
        self.kept.append(array)
        return array.ctypes.data

    def packed(self, product: Product, result: npt.NDArray[Any]) -> kernels.Product:
        weights = packed(product.weights)
        return kernels.Product(
            weights=self.address(weights),
            shape=weights.shape,
            scales=self.address(product.scales),
            biases=0 if product.biases is None else self.address(product.biases),
            result=self.address(result),
        )

    def describe(self) -> npt.NDArray[np.int64]:
        layer, products = self.layer, {}
        products[kernels.OUTPUT] = self.packed(layer.output, self.summand)
        products[kernels.GATE_UP] = self.packed(layer.gate_up, self.activated)
        products[kernels.DOWN] = self.packed(layer.down, self.summand)
        if layer.qkv is not None:
            products[kernels.QKV] = self.packed(layer.qkv, self.qkv)
        halves = (self.attended.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        attended: npt.NDArray[Any] = self.attended if self.wide else halves
        numbers = {
            kernels.ROWS: self.rows,
            kernels.WIDTH: self.shape.width,
            kernels.EPSILON: self.address(np.array([EPSILON], np.float32)),
            kernels.RESIDUAL: self.address(self.residual),
            kernels.OTHER_RESIDUAL: self.address(self.other),
            kernels.SUMMAND: self.address(self.summand),
            kernels.IS_FLOAT32: self.wide,
            kernels.INPUT: self.address(attended),
            kernels.NORM: self.address(layer.norm),
            kernels.NEXT_NORM: self.address(layer.next_norm),
            kernels.NORMED: self.address(self.normed) if layer.qkv is None else 0,
        }
        return kernels.describe(numbers, products)

    def run(self, region: int) -> None:
        """One of the compiled regions, by its place."""
        description = self.describe()
        openmp.ParallelRegion(kernels.compiled()[region].address)(description.ctypes.data)


def widened(halves: npt.NDArray[Any]) -> Floats:
    """Numbers of the model's dtype as float32."""
    if halves.dtype == np.float32:
        return halves
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def error(found: Floats, expected: Floats) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("instructions", int8_dot.available())
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("depth", [8, 24, 576])
def test_a_block_is_multiplied_exactly(depth: int, rows: int, instructions: str) -> None:
    """To the last bit, with the largest numbers that there are: nothing may overflow on the way."""
    dot = int8_dot.dot_of(rows, instructions=instructions)

    @numba.njit
    def multiply(weights: int, inputs: int, sums: int, quads: int) -> None:
        dot(weights, inputs, sums, quads)

    random = np.random.default_rng(depth)
    offset = 128 if instructions == int8_dot.VNNI else 0
    for weights, inputs in (
        (
            random.integers(-128, 128, (kernels.CHANNELS, depth), dtype=np.int8),
            random.integers(-127, 128, (rows, depth), dtype=np.int8),
        ),
        (np.full((kernels.CHANNELS, depth), -128, np.int8), np.full((rows, depth), 127, np.int8)),
        (np.full((kernels.CHANNELS, depth), -128, np.int8), np.full((rows, depth), -127, np.int8)),
        (np.full((kernels.CHANNELS, depth), 127, np.int8), np.full((rows, depth), -127, np.int8)),
    ):
        moved = (inputs.astype(np.int32) + offset).astype(np.uint8)
        block, sums = packed(weights), np.full((rows, kernels.CHANNELS), 7, np.int32)
        multiply(block.ctypes.data, moved.ctypes.data, sums.ctypes.data, depth // 4)
        expected = (inputs.astype(np.int64) + offset) @ weights.astype(np.int64).T
        assert np.array_equal(sums, expected)


@pytest.mark.parametrize("biased", [False, True], ids=["without biases", "with biases"])
@pytest.mark.parametrize("rows", [1, 2, 4, 7])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_from_one_attention_to_the_next(shape: Shape, rows: int, biased: bool, threads: int) -> None:
    bench = Bench(shape, rows=rows, biased=biased)
    before = bench.other[:] = bench.residual
    residual, _, qkv = bench.layer(bench.attended, before.copy())
    bench.run(1)
    assert qkv is not None
    # One input that is rounded to its neighbour is 1/127 of the largest one, times one weight of K.
    assert error(bench.other, residual) < 1e-3
    assert error(widened(bench.qkv), qkv) < 2 * SIXTEEN_BITS
    assert np.median(np.abs(widened(bench.qkv) - qkv)) < SIXTEEN_BITS * np.median(np.abs(qkv))


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_in_float32_from_one_attention_to_the_next(rows: int, threads: int) -> None:
    bench = Bench(SHAPES["queries wider than the rest"], rows=rows, wide=True)
    before = bench.other[:] = bench.residual
    residual, _, qkv = bench.layer(bench.attended, before.copy())
    bench.run(1)
    assert qkv is not None
    assert error(bench.other, residual) < 1e-3
    assert error(bench.qkv, qkv) < SIXTEEN_BITS
    assert np.median(np.abs(bench.qkv - qkv)) < 1e-5 * np.median(np.abs(qkv))


@pytest.mark.parametrize("wide", [False, True], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_head(rows: int, wide: bool, threads: int) -> None:
    bench = Bench(SHAPES["queries wider than the rest"], rows=rows, wide=wide)
    bench.run(2)
    assert error(bench.summand, bench.layer.output(bench.attended)) < ROUNDING
    assert not bench.qkv.any()
    assert not bench.other.any()


@pytest.mark.parametrize("wide", [False, True], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 3])
def test_after_the_last_layer_come_hidden_states(rows: int, wide: bool, threads: int) -> None:
    bench = Bench(SHAPES["as in SmolLM2-135M"], rows=rows, last=True, wide=wide)
    bench.other[:] = bench.residual
    _, normed, _ = bench.layer(bench.attended, bench.residual.copy())
    bench.run(1)
    assert error(widened(bench.normed), normed) < SIXTEEN_BITS + 1e-3
    assert not bench.qkv.any()


@pytest.mark.parametrize("rows", [1, 4])
def test_before_the_first_layer(rows: int, threads: int) -> None:
    bench = Bench(SHAPES["as in SmolLM2-135M"], rows=rows)
    embeddings = bench.residual.copy()
    bench.run(0)
    assert bench.layer.qkv is not None
    expected = bench.layer.qkv(normalised(embeddings, bench.layer.next_norm, epsilon=EPSILON))
    assert error(widened(bench.qkv), expected) < 2 * SIXTEEN_BITS
    assert np.array_equal(bench.other, embeddings)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    shape = SHAPES["as in SmolLM2-135M"]
    rows = 7
    together = Bench(shape, rows=rows)
    together.other[:] = together.residual
    together.run(1)
    for row in range(rows):
        alone = Bench(shape, rows=rows)  # the same weights
        alone.rows = 1
        for name in ("residual", "other", "summand", "attended", "qkv", "normed", "activated"):
            setattr(alone, name, np.ascontiguousarray(getattr(alone, name)[row : row + 1]))
        alone.other[:] = alone.residual
        alone.run(1)
        assert np.array_equal(alone.qkv[0], together.qkv[row])
        assert np.array_equal(alone.other[0], together.other[row])


def test_a_row_of_zeros_and_a_broken_one() -> None:
    """Nothing attended to changes nothing; what is no number stays in its row, where it is seen."""
    bench = Bench(SHAPES["queries wider than the rest"], rows=3)
    bench.attended[1] = 0.0
    bench.attended[2, 5] = np.nan
    bench.other[:] = bench.residual
    residual, _, qkv = bench.layer(bench.attended[:2], bench.residual[:2].copy())
    bench.run(1)
    assert qkv is not None
    assert error(bench.other[:2], residual) < 1e-3
    assert error(widened(bench.qkv[:2]), qkv) < 2 * SIXTEEN_BITS
    assert np.isnan(widened(bench.qkv[2])).all()


@pytest.mark.parametrize(
    ("shape", "is_pair", "fits"),
    [
        ((960, 580), False, True),
        ((3072, 580), True, True),
        ((96, 580), True, False),
        ((950, 580), False, False),
        ((960, 576 + 4 + 4), False, False),
    ],
)
def test_which_shapes_fit(shape: tuple[int, int], is_pair: bool, fits: bool) -> None:
    assert (kernels.Product.why_unfit(shape, is_pair=is_pair) is None) is fits


def test_packing_is_vllms() -> None:
    ops = pytest.importorskip("vllm._custom_ops")
    if not hasattr(torch.ops._C, "convert_weight_packed"):
        pytest.skip("this build of vLLM packs no weights")
    assert ops is not None
    weights = np.random.default_rng(0).integers(-128, 128, (96, 64), dtype=np.int8)
    found = torch.ops._C.convert_weight_packed(torch.from_numpy(weights))
    assert np.array_equal(found.numpy(), packed(weights))


def test_numbas_cache_sees_a_change_of_the_instructions() -> None:
    """They stand in another file than the regions."""
    one, other = (kernels._regions(digest) for digest in (1, 2))
    for region, changed in zip(one, other, strict=True):
        assert region.__code__ is changed.__code__
        assert [cell.cell_contents for cell in region.__closure__ or ()] == [1]
        assert [cell.cell_contents for cell in changed.__closure__ or ()] == [2]
