"""Where do two tokenizations spell the same bytes? Compiled; no state.

:func:`certify_links`: which proxy tokens may carry the law of the last draft token, for many chunks in one call.
:func:`common_ends`: where tokens of the one end that tokens of the other end too.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.compilation import compile_now, compiled_and_cached

_SIGNATURE: Final = (
    "void(uint8[::1], int32[::1], uint8[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], "
    "boolean[::1])"
)

_ENDS_SIGNATURE: Final = "int64(uint8[::1], int32[::1], uint8[::1], int32[::1], int32[::1], int32[::1], boolean[::1])"


@compiled_and_cached
def certify_links(  # noqa: PLR0917 -- a compiled function takes no keywords cheaply
    draft_flat_bytes: npt.NDArray[np.uint8],
    draft_byte_offsets: npt.NDArray[np.int32],
    target_flat_bytes: npt.NDArray[np.uint8],
    target_byte_offsets: npt.NDArray[np.int32],
    draft_ids: npt.NDArray[np.int32],
    draft_offsets: npt.NDArray[np.int32],
    proxy_ids: npt.NDArray[np.int32],
    proxy_offsets: npt.NDArray[np.int32],
    last_draft_index: npt.NDArray[np.int32],
    links: npt.NDArray[np.bool_],
) -> None:
    """Write for each proxy token whether the path links it with its request's last draft token, and the bytes agree.

    The arguments before are those of ``Aligner.align``, which has checked them, and its answer.
    """
    for request in range(len(draft_offsets) - 1):
        proxy, proxy_stop = proxy_offsets[request], proxy_offsets[request + 1]
        at = stop = 0
        equal = True
        for draft_id in draft_ids[draft_offsets[request] : draft_offsets[request + 1]]:
            for place in range(draft_byte_offsets[draft_id], draft_byte_offsets[draft_id + 1]):
                while at == stop and proxy < proxy_stop:
                    at = target_byte_offsets[proxy_ids[proxy]]
                    stop = target_byte_offsets[proxy_ids[proxy] + 1]
                    proxy += 1
                if at == stop or target_flat_bytes[at] != draft_flat_bytes[place]:
                    equal = False
                    break
                at += 1
            if not equal:
                break
        while equal and proxy < proxy_stop:
            equal = target_byte_offsets[proxy_ids[proxy]] == target_byte_offsets[proxy_ids[proxy] + 1]
            proxy += 1
        equal = equal and at == stop
        last = draft_offsets[request + 1] - draft_offsets[request] - 1
        for place in range(proxy_offsets[request], proxy_offsets[request + 1]):
            links[place] = equal and last_draft_index[place] == last


@compiled_and_cached
def common_ends(  # noqa: PLR0917 -- a compiled function takes no keywords cheaply
    draft_flat_bytes: npt.NDArray[np.uint8],
    draft_byte_offsets: npt.NDArray[np.int32],
    target_flat_bytes: npt.NDArray[np.uint8],
    target_byte_offsets: npt.NDArray[np.int32],
    draft_ids: npt.NDArray[np.int32],
    target_ids: npt.NDArray[np.int32],
    ends: npt.NDArray[np.bool_],
) -> int:
    """Compare two texts that end at the same place, from there back to where they differ or one is used up.

    Tokens without bytes must stand at the same place on both sides.

    Args:
        draft_flat_bytes: the tables, as of ``Aligner``.
        draft_byte_offsets: likewise.
        target_flat_bytes: likewise.
        target_byte_offsets: likewise.
        draft_ids: below the draft's vocabulary size.
        target_ids: below the target's.
        ends: [len(draft_ids)], out: whether a target token ends where this draft token ends.

    Returns:
        The first draft token of those, up to the last, that the target tokens spell too; only for them is ``ends``
        written.
    """
    target = len(target_ids)
    at = begin = 0
    for draft in range(len(draft_ids) - 1, -1, -1):
        start, stop = draft_byte_offsets[draft_ids[draft]], draft_byte_offsets[draft_ids[draft] + 1]
        ends[draft] = at == begin
        if start == stop:
            if at > begin or target == 0:
                return draft + 1
            target -= 1
            if target_byte_offsets[target_ids[target]] != target_byte_offsets[target_ids[target] + 1]:
                return draft + 1
        for place in range(stop - 1, start - 1, -1):
            if at == begin:
                target -= 1
                if target < 0:
                    return draft + 1
                begin = target_byte_offsets[target_ids[target]]
                at = target_byte_offsets[target_ids[target] + 1]
            if at == begin or target_flat_bytes[at - 1] != draft_flat_bytes[place]:
                return draft + 1
            at -= 1
    return 0


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    compile_now(certify_links, _SIGNATURE)
    compile_now(common_ends, _ENDS_SIGNATURE)
