"""How the alignment's kernels are compiled: natively, without fastmath, and once per machine."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numba
from numba.core.dispatcher import Dispatcher

Kernel = TypeVar("Kernel", bound=Callable[..., object])

logger = logging.getLogger(__name__)


def compiled(function: Kernel) -> Kernel:
    """Compile ``function`` into whatever kernel calls it; with ``NUMBA_DISABLE_JIT=1`` it stays Python.

    No fastmath: forbidden cells hold a sentinel. The GIL is kept: it guards the workspace that calls share, and a call
    takes microseconds.
    """
    kernel: Kernel = numba.njit(function)
    return kernel


def compiled_and_cached(function: Kernel) -> Kernel:
    """Like :func:`compiled`, and keep the machine code on disk, beside this package or in numba's user-wide folder.

    Where neither can be written (a read-only container without a home), each process compiles for itself.
    """
    try:
        kernel: Kernel = numba.njit(cache=True)(function)
    except RuntimeError as error:
        logger.warning(
            "The alignment kernel is compiled at every start, which takes some seconds: %s. "
            "Set NUMBA_CACHE_DIR to a folder that can be written.",
            error,
        )
        return compiled(function)
    return kernel


def compile_now(kernel: Callable[..., object], signature: str) -> None:
    """Compile a kernel for one signature, or load it from the cache, and refuse any other from then on.

    Without the refusal an argument of another dtype would compile a second kernel in the middle of serving.
    """
    if isinstance(kernel, Dispatcher) and not kernel.signatures:
        kernel.compile(signature)
        kernel.disable_compile()


def source_digest(*files: str) -> int:
    """A number that changes with the text of these files: numba's cache watches only the file of the kernel itself."""
    return zlib.crc32(b"".join(Path(file).read_bytes() for file in files))
