"""How does our own machine code run on the threads that PyTorch's kernels use?

PyTorch and vLLM are compiled against GNU's OpenMP interface, which the runtime that they found exports, be it GNU's or
Intel's in its place. A second runtime, or a second pool of threads, would fight the first one for the cores.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Final

import llvmlite.binding as llvm
import torch

_PREFIX: Final = "vllm_tokentiming_"
BARRIER: Final = _PREFIX + "GOMP_barrier"
THREAD: Final = _PREFIX + "omp_get_thread_num"
THREADS: Final = _PREFIX + "omp_get_num_threads"
"""What compiled code calls: names of our own, so that it gets this runtime's and no other's."""

_GNU = "libgomp.so.1"


@functools.cache
def runtime() -> ctypes.CDLL | None:
    """PyTorch's OpenMP runtime, with its functions made known to the compiler; None where there is none to be found."""
    for name, mode in ((None, ctypes.DEFAULT_MODE), (_GNU, getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_LAZY)):
        try:
            library = ctypes.CDLL(name, mode=mode)
            library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            library.GOMP_parallel.restype = None
            for symbol in (BARRIER, THREAD, THREADS):
                function = getattr(library, symbol.removeprefix(_PREFIX))
                llvm.add_symbol(symbol, ctypes.cast(function, ctypes.c_void_p).value)
        except (OSError, AttributeError):
            continue
        return library
    return None


class ParallelRegion:
    """Calls a compiled function of one pointer on all threads at once, and returns when all have.

    Args:
        address: of the function.
    """

    def __init__(self, address: int) -> None:
        library = runtime()
        assert library is not None
        self._start = library.GOMP_parallel
        self._address = address
        self._threads = torch.get_num_threads()

    def __call__(self, data: int) -> None:
        """Run; ``data`` is the address that each thread gets."""
        self._start(self._address, data, self._threads, 0)
