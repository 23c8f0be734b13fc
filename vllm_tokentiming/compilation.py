"""How are the kernels compiled? Natively, and once per machine where their code can be kept."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.ccallback import CFunc
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

    Where neither can be written (a read-only container without a home), each process compiles for itself. Numba's cache
    notices changes of the function's own file alone: see :func:`source_digest`.
    """
    kernel: Kernel = _cached_if_possible(numba.njit, function)
    return kernel


def callback(function: Callable[..., object], signature: Any) -> CFunc:
    """A function of this signature for C code, which is called by its ``address``; kept on disk likewise."""
    made: CFunc = _cached_if_possible(partial(numba.cfunc, signature), function)
    return made


def _cached_if_possible(decorator: Callable[..., Any], function: Callable[..., object]) -> Any:
    try:
        return decorator(cache=True)(function)
    except RuntimeError as error:
        logger.warning(
            "The kernel %s is compiled at every start, which takes some seconds: %s. "
            "Set NUMBA_CACHE_DIR to a folder that can be written.",
            function.__name__,
            error,
        )
        return decorator()(function)


def compile_now(kernel: Callable[..., object], signature: str) -> None:
    """Compile a kernel for one signature, or load it from the cache, and refuse any other from then on.

    Without the refusal an argument of another dtype would compile a second kernel in the middle of serving.
    """
    if isinstance(kernel, Dispatcher) and not kernel.signatures:
        kernel.compile(signature)
        kernel.disable_compile()


def source_digest(*files: str) -> int:
    """A number that changes with the text of these files: for a kernel's closure, which numba's cache looks at.

    Of files it looks at the kernel's own alone, not at those of functions that the kernel calls.
    """
    return zlib.crc32(b"".join(Path(file).read_bytes() for file in files))
