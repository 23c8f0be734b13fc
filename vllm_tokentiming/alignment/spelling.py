"""Which proxy tokens may carry the law of the last draft token? Compiled, for many chunks in one call; no state."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.alignment.compilation import compile_now, compiled_and_cached

_SIGNATURE: Final = (
    "void(uint8[::1], int32[::1], uint8[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], "
    "boolean[::1])"
)


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


def warm_up() -> None:
    """Compile the kernel, or load it from the cache."""
    compile_now(certify_links, _SIGNATURE)
