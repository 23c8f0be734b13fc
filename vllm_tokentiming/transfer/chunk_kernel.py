"""The compiled heart of the exact transfer: laws of draft tokens pushed forward to rows over the target vocabulary.

One call serves one request's cycle. No ``fastmath``: sums are taken in order, so that every rank gets the same bits.
Owns nothing; scratch arrays are the caller's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import numba
import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)
Kernel = TypeVar("Kernel", bound=Callable[..., object])

IN_E, PENDING_SHIFT, CONTINUATION_SHIFT = 1, 1, 3
"""Bits of a draft token's traits: it belongs to E; the continuation bytes that its last character lacks (0 to 3); how
many there are if it holds nothing else (3 at most)."""

DONE, MISSING, NOT_IN_LAW, BAD_ID, NOT_FINITE = 0, 1, 2, 3, 4
"""Outcomes of :func:`chunk_rows`."""

END, LAST, RUN_NUMBER, PENDING, MAY_EXTEND, IN_BOUND, REVEALED = range(7)
"""Columns of a chunk's description, int64: the index of its last token, that token, the number of its run, the
continuation bytes that the run lacks, whether the chunk could have gone on, whether E had a say in that, whether its
last token counts as known."""

NUM_COLUMNS = 7
EMPTY = -1


def _compiled(function: Kernel) -> Kernel:
    """Compile on first use and keep the machine code on disk, where some folder can be written.

    Everything that a kernel calls stands in this file: numba's cache notices changes of this file only. The GIL is
    kept: it guards the caller's scratch, and a call takes microseconds.
    """
    try:
        kernel: Kernel = numba.njit(cache=True)(function)
    except RuntimeError as error:
        logger.warning(
            "The transfer kernel is compiled at every start, which takes some seconds: %s. "
            "Set NUMBA_CACHE_DIR to a folder that can be written.",
            error,
        )
        kernel = numba.njit(function)
    return kernel


def pending_after(pending: int, traits: int) -> int:
    """Continuation bytes that are lacking after a text that lacked ``pending`` and then a token of these traits."""
    continuation = traits >> CONTINUATION_SHIFT
    return max(pending - continuation, 0) if continuation else (traits >> PENDING_SHIFT) & 3


_pending_after = _compiled(pending_after)


@_compiled
def count_boundaries(  # noqa: PLR0917 - a compiled function takes no keywords cheaply
    ids: npt.NDArray[np.int32],
    is_boundary: npt.NDArray[np.bool_],
    traits: npt.NDArray[np.uint8],
    has_bytes: npt.NDArray[np.bool_],
    seen: npt.NDArray[np.float64],
    cut: npt.NDArray[np.float64],
    threshold: float,
    counted: npt.NDArray[np.int32],
    new_traits: npt.NDArray[np.uint8],
) -> tuple[int, bool]:
    """Count a stretch of text into ``seen`` and ``cut`` (``ExtendableSet.observe``).

    Writes the tokens that counted and their traits from now on, in order.

    Returns:
        How many counted, and whether any of these traits is new.
    """
    number, changed = 0, False
    pending = 0
    for place in range(len(ids)):
        draft_id = ids[place]
        trait = int(traits[draft_id])
        pending = _pending_after(pending, trait) if trait > IN_E else 0
        # An end inside a character says nothing about the token: such an end is extended whatever E says.
        if pending > 0 or not has_bytes[draft_id]:
            continue
        seen[draft_id] += 1.0
        if not is_boundary[place]:
            cut[draft_id] += 1.0
        flag = IN_E if cut[draft_id] > threshold * seen[draft_id] else 0
        counted[number] = draft_id
        new_traits[number] = (trait & ~IN_E) | flag
        changed = changed or new_traits[number] != trait
        number += 1
    return number, changed


def key_slots(num_keys: int) -> int:
    """Slots of a hash table that is at most half full with ``num_keys`` keys: a power of two."""
    return 1 << max(int(2 * num_keys - 1).bit_length(), 4)


@_compiled
def _first_slot(key: int, mask: int) -> int:
    # Fibonacci hashing on 30 bits: keys are run · vocabulary size + token, whose low bits repeat, and the product stays
    # within int64 (uncompiled, numpy would warn of an overflow).
    return (((key ^ (key >> 30)) & 0x3FFFFFFF) * 0x9E3779B1 >> 24) & mask


@_compiled
def insert(keys: npt.NDArray[np.int64], values: npt.NDArray[np.int32], key: int, value: int) -> None:
    """Put a key into an open-addressing table of a power of two slots that has room."""
    mask = len(keys) - 1
    slot = _first_slot(key, mask)
    while keys[slot] != EMPTY and keys[slot] != key:
        slot = (slot + 1) & mask
    keys[slot] = key
    values[slot] = value


@_compiled
def insert_many(
    keys: npt.NDArray[np.int64],
    values: npt.NDArray[np.int32],
    new_keys: npt.NDArray[np.int64],
    new_values: npt.NDArray[np.int32],
) -> None:
    """:func:`insert` for each of several keys."""
    for place in range(len(new_keys)):
        insert(keys, values, new_keys[place], new_values[place])


@_compiled
def find(keys: npt.NDArray[np.int64], values: npt.NDArray[np.int32], key: int) -> int:
    """The value of a key, or -1."""
    mask = len(keys) - 1
    slot = _first_slot(key, mask)
    while keys[slot] != EMPTY:
        if keys[slot] == key:
            return int(values[slot])
        slot = (slot + 1) & mask
    return -1


@_compiled
def chunk_rows(  # noqa: C901, PLR0912, PLR0915, PLR0917 - one pass; helpers would carry a dozen arrays each
    chunks: npt.NDArray[np.int64],
    law_ids: npt.NDArray[np.int32],
    law_probs: npt.NDArray[np.float64],
    traits: npt.NDArray[np.uint8],
    entry_of_single: npt.NDArray[np.int32],
    keys: npt.NDArray[np.int64],
    entries: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int32],
    proxies: npt.NDArray[np.int32],
    linked: npt.NDArray[np.bool_],
    slot_of: npt.NDArray[np.int32],
    alive: npt.NDArray[np.int32],
    alive_probs: npt.NDArray[np.float64],
    out_tokens: npt.NDArray[np.int32],
    out_offsets: npt.NDArray[np.int32],
    out_ids: npt.NDArray[np.int32],
    out_probs: npt.NDArray[np.float64],
) -> tuple[int, int, int]:
    """Rows of one request's proposal (docs/losslessness.md, "The chunk rule").

    Args:
        chunks: [number of chunks, NUM_COLUMNS], columns as named above.
        law_ids: [drafted, top_k].
        law_probs: [drafted, top_k].
        traits: E, as in :class:`~vllm_tokentiming.transfer.extendable.Extendable`.
        entry_of_single: as in :class:`~vllm_tokentiming.transfer.chunks.ChunkTable`.
        keys: likewise.
        entries: likewise.
        starts: likewise.
        proxies: likewise.
        linked: likewise.
        slot_of: scratch over the target vocabulary, -1 everywhere on entry and on return.
        alive: scratch [top_k]; holds the draft tokens without an entry when the answer is MISSING.
        alive_probs: scratch [top_k].
        out_tokens: the proxy tokens; its length is the most that are wanted.
        out_offsets: [len(out_tokens) + 1].
        out_ids: [len(out_tokens) · top_k].
        out_probs: likewise.

    Returns:
        The outcome; the number of proxy tokens (DONE) or of draft tokens in ``alive`` (MISSING); the chunk at fault.
    """
    draft_size, top_k = len(traits), law_ids.shape[1]
    num_tokens, stored = 0, 0
    out_offsets[0] = 0
    for chunk in range(len(chunks)):
        if num_tokens == len(out_tokens):
            break
        position, last = chunks[chunk, END], chunks[chunk, LAST]
        run_number, pending = chunks[chunk, RUN_NUMBER], chunks[chunk, PENDING]
        may_extend, in_bound = chunks[chunk, MAY_EXTEND] != 0, chunks[chunk, IN_BOUND] != 0
        revealed = chunks[chunk, REVEALED] != 0

        # The law of the chunk's last token, given its run: the tokens that end the chunk here.
        count, drawn, num_missing = 0, -1, 0
        for candidate in range(top_k):
            draft_id, probability = law_ids[position, candidate], law_probs[position, candidate]
            if not probability > 0.0 and draft_id != last:  # also NaN
                continue
            if draft_id < 0 or draft_id >= draft_size:
                return BAD_ID, 0, chunk
            if revealed:
                if draft_id != last:
                    continue
            elif may_extend:
                trait = int(traits[draft_id])
                if (in_bound and trait & IN_E) or (trait > IN_E and _pending_after(int(pending), trait) > 0):
                    continue
            if run_number == 0:
                entry = entry_of_single[draft_id]
            else:
                entry = find(keys, entries, run_number * draft_size + draft_id)
            if entry < 0:
                # A draft token that stands twice in a law is asked for once.
                repeated = False
                for other in range(num_missing):
                    repeated = repeated or alive[other] == draft_id
                if not repeated:
                    alive[num_missing] = draft_id
                    num_missing += 1
            elif num_missing == 0:
                alive[count] = entry
                alive_probs[count] = probability
                count += 1
            if draft_id == last:
                drawn = entry
        if num_missing > 0:
            return MISSING, num_missing, chunk
        if drawn < 0:
            return NOT_IN_LAW, 0, chunk

        first = starts[drawn]
        length = starts[drawn + 1] - first
        if length == 0:
            break
        for step in range(length):
            token, link = proxies[first + step], linked[first + step]
            # Revealed before the row: the chunk goes on, and whether this link may carry a law.
            kept, total = 0, 0.0
            for other in range(count):
                entry = alive[other]
                start = starts[entry]
                if starts[entry + 1] - start > step and linked[start + step] == link:
                    alive[kept] = entry
                    alive_probs[kept] = alive_probs[other]
                    total += alive_probs[other]
                    kept += 1
            row_start = stored
            if not total < np.inf:
                return NOT_FINITE, 0, chunk
            if link and total > 0.0:
                for other in range(kept):
                    proxy = proxies[starts[alive[other]] + step]
                    slot = slot_of[proxy]
                    if slot < 0:
                        slot = stored
                        slot_of[proxy] = slot
                        out_ids[slot] = proxy
                        out_probs[slot] = 0.0
                        stored += 1
                    out_probs[slot] += alive_probs[other]
                for slot in range(row_start, stored):
                    out_probs[slot] /= total
                    slot_of[out_ids[slot]] = -1
            else:
                out_ids[stored] = token
                out_probs[stored] = 1.0
                stored += 1
            # Revealed after it: the proxy token.
            count = 0
            for other in range(kept):
                if proxies[starts[alive[other]] + step] == token:
                    alive[count] = alive[other]
                    alive_probs[count] = alive_probs[other]
                    count += 1
            out_tokens[num_tokens] = token
            num_tokens += 1
            out_offsets[num_tokens] = stored
            if num_tokens == len(out_tokens):
                return DONE, num_tokens, chunk
    return DONE, num_tokens, len(chunks)
