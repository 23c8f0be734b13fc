"""What do kernels share that run on all threads of one parallel region? Memory by address, formats, and who does what.

Compiled into whatever region calls them; nothing here is a region.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils

from vllm_tokentiming.engine.int8_dot import typed_intrinsic
from vllm_tokentiming.engine.openmp import BARRIER, THREAD, THREADS

Function = TypeVar("Function", bound=Callable[..., Any])


barrier = types.ExternalFunction(BARRIER, types.void())
thread_number = types.ExternalFunction(THREAD, types.int32())
number_of_threads = types.ExternalFunction(THREADS, types.int32())


def kernel(function: Function) -> Function:
    """For what regions call. Dividing by zero gives infinity; loops that could raise for it do not vectorise."""
    made: Function = numba.njit(error_model="numpy")(function)
    return made


def kernel_in_any_order(function: Function) -> Function:
    """For sums and maxima: a processor takes several numbers at once only where it may choose the order.

    It chooses by the number of summands alone, so the same numbers give the same sum.
    """
    made: Function = numba.njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})(function)
    return made


def kernel_of_fused_products(function: Function) -> Function:
    """For sums of products in the order that is written, without rounding in between."""
    made: Function = numba.njit(error_model="numpy", fastmath={"contract"})(function)
    return made


@typed_intrinsic
def pointer(_typing_context: Any, address: Any) -> Any:
    """An address, int64, as a pointer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@kernel
def integers(address: int, number: int) -> Any:
    """int64."""
    return numba.carray(pointer(address), (number,), np.int64)


@kernel
def short_integers(address: int, number: int) -> Any:
    """int32."""
    return numba.carray(pointer(address), (number,), np.int32)


@kernel
def floats(address: int, number: int) -> Any:
    """float32."""
    return numba.carray(pointer(address), (number,), np.float32)


@kernel
def words(address: int, number: int) -> Any:
    """The bits of float32."""
    return numba.carray(pointer(address), (number,), np.uint32)


@kernel
def halves(address: int, number: int) -> Any:
    """The bits of bfloat16."""
    return numba.carray(pointer(address), (number,), np.uint16)


@kernel
def widen(of_halves: Any, of_words: Any) -> None:
    """Read bfloat16: the upper half of a float32."""
    for i in range(len(of_halves)):
        of_words[i] = np.uint32(of_halves[i]) << np.uint32(16)


@kernel
def narrow(of_words: Any, of_halves: Any) -> None:
    """Round float32 to bfloat16, ties to even."""
    for i in range(len(of_halves)):
        word = of_words[i]
        of_halves[i] = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@kernel
def exponential(x: Any) -> Any:
    """exp(x) for float32, by a polynomial (Cephes ``expf``), so that loops over it vectorise; exp(±87) beyond ±87."""
    x = min(max(x, np.float32(-87.0)), np.float32(87.0))
    power = np.rint(x * np.float32(1.44269504))
    rest = x - power * np.float32(0.693359375) + power * np.float32(2.12194440e-4)
    value = np.float32(1.9875691500e-4)
    value = value * rest + np.float32(1.3981999507e-3)
    value = value * rest + np.float32(8.3334519073e-3)
    value = value * rest + np.float32(4.1665795894e-2)
    value = value * rest + np.float32(1.6666665459e-1)
    value = value * rest + np.float32(5.0000001201e-1)
    value = value * rest * rest + rest + np.float32(1.0)
    return value * np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)


def described(numbers: Mapping[int, int], *, fields: int) -> npt.NDArray[np.int64]:
    """A description that kernels read: int64 [fields], 0 where nothing is said."""
    description = np.zeros(fields, dtype=np.int64)
    for field, number in numbers.items():
        description[field] = number
    return description


@kernel
def share(number: int, thread: int, threads: int) -> tuple[int, int]:
    """Which of so many equal pieces are a thread's: from the first to before the second."""
    return number * thread // threads, number * (thread + 1) // threads
