"""The one compiled call that aligns a whole batch: checks the input, then accumulates and traces request by request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from vllm_tokentiming import compilation
from vllm_tokentiming.alignment import band, dtw, levenshtein, path
from vllm_tokentiming.alignment.dtw import accumulate_costs
from vllm_tokentiming.alignment.path import trace_path
from vllm_tokentiming.compilation import compile_now, compiled, compiled_and_cached, source_digest

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

BAD_INPUT: Final = -1

_SIGNATURE: Final = (
    "int64(uint8[::1], int32[::1], uint8[::1], int32[::1], int64, int64[::1], int64[::1], int32[::1], "
    "int32[::1], int32[::1], int32[::1], int32[::1], int32[:, ::1], int32[::1], int32[::1], int64[::1])"
)


@compiled
def _most_cells(draft_offsets: Int32Array, num_draft: int, proxy_offsets: Int32Array, num_proxy: int) -> int:
    """Cells of the largest request's table, or BAD_INPUT where the offsets do not cut the ids into requests."""
    batch = len(draft_offsets) - 1
    if len(proxy_offsets) != batch + 1 or draft_offsets[0] != 0 or proxy_offsets[0] != 0:
        return BAD_INPUT
    if draft_offsets[batch] != num_draft or proxy_offsets[batch] != num_proxy:
        return BAD_INPUT
    most = 0
    for request in range(batch):
        rows = int(draft_offsets[request + 1]) - int(draft_offsets[request])
        columns = int(proxy_offsets[request + 1]) - int(proxy_offsets[request])
        if rows < 0 or columns < 0:
            return BAD_INPUT
        most = max(most, rows * columns)
    return most


@compiled
def _all_below(ids: Int32Array, vocab_size: int) -> bool:
    for token_id in ids:  # noqa: SIM110 -- numba does not compile generators inside all()
        if token_id < 0 or token_id >= vocab_size:
            return False
    return True


def _build(digest_of_callees: int) -> Callable[..., int]:
    @compiled_and_cached
    def align_batch(  # noqa: PLR0917 -- a compiled function takes no keywords cheaply
        draft_flat_bytes: ByteArray,
        draft_byte_offsets: Int32Array,
        target_flat_bytes: ByteArray,
        target_byte_offsets: Int32Array,
        window_radius: int,
        cells: Int64Array,
        positions_of_byte: Int64Array,
        scratch: Int32Array,
        draft_ids: Int32Array,
        draft_offsets: Int32Array,
        proxy_ids: Int32Array,
        proxy_offsets: Int32Array,
        path_out: Int32Array,
        path_offsets: Int32Array,
        last_draft_index: Int32Array,
        cost: Int64Array,
    ) -> int:
        # Numba's cache sees a change of this file and of what a closure holds, not of the modules called from here.
        _ = digest_of_callees
        most_cells = _most_cells(draft_offsets, len(draft_ids), proxy_offsets, len(proxy_ids))
        ids_fit = _all_below(draft_ids, len(draft_byte_offsets) - 1) and _all_below(
            proxy_ids, len(target_byte_offsets) - 1
        )
        if most_cells < 0 or not ids_fit:
            return BAD_INPUT
        if most_cells > len(cells):
            return -most_cells
        length = 0
        path_offsets[0] = 0
        for request in range(len(cost)):
            ids_in_draft_vocab = draft_ids[draft_offsets[request] : draft_offsets[request + 1]]
            ids_in_target_vocab = proxy_ids[proxy_offsets[request] : proxy_offsets[request + 1]]
            last = last_draft_index[proxy_offsets[request] : proxy_offsets[request + 1]]
            rows = len(ids_in_draft_vocab)
            columns = len(ids_in_target_vocab)
            if rows == 0 or columns == 0:
                last[:] = -1
                cost[request] = 0
            else:
                accumulate_costs(
                    draft_flat_bytes,
                    draft_byte_offsets,
                    target_flat_bytes,
                    target_byte_offsets,
                    ids_in_draft_vocab,
                    ids_in_target_vocab,
                    window_radius,
                    cells,
                    positions_of_byte,
                    scratch,
                )
                cost[request] = cells[rows * columns - 1]
                length += trace_path(cells, rows, columns, path_out[length:], last)
            path_offsets[request + 1] = length
        return length

    return align_batch


align_batch: Final = _build(
    source_digest(band.__file__, compilation.__file__, dtw.__file__, levenshtein.__file__, path.__file__)
)
"""Aligns every request; the arguments and what it writes are :meth:`Aligner.align`'s, after its tables and workspace.

Returns the total length of the paths; BAD_INPUT; or minus the cells that the workspace must have (at least 2).
"""


def warm_up() -> None:
    """Compile the kernel, or load it from the cache: seconds once per machine, else a fraction of one per process.

    Making an :class:`~vllm_tokentiming.alignment.aligner.Aligner` does it too.
    """
    compile_now(align_batch, _SIGNATURE)
