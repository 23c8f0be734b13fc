"""The compiled heart of the exact transfer: laws of draft tokens pushed forward to rows over the target vocabulary.

One call serves a batch's cycle. No ``fastmath``: sums are taken in order, so that every rank gets the same bits. All
that kernels call stands in this file, whose changes numba's cache notices. The GIL is kept: it guards the caller's
scratch arrays, and a call takes microseconds. Owns nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.compilation import compiled_and_cached

IN_E, PENDING_SHIFT, CONTINUATION_SHIFT = 1, 1, 3
"""Bits of a draft token's traits: it belongs to E; the continuation bytes that its last character lacks (0 to 3); how
many there are if it holds nothing else (3 at most)."""

DONE, MISSING, NOT_IN_LAW, BAD_ID, NOT_FINITE, BAD_TOKEN = range(6)
"""Outcomes of :func:`chunk_rows`."""

COUNT, WIDTH, PLANNED, WANTED, ALONE = range(5)
"""Columns of a request's plan, int64: drafted tokens, width of their laws, tokens that were to be drafted, proxy tokens
wanted at most, whether its E is that of no other request. Width 0: the ids are proxy tokens already, point masses."""

NUM_COLUMNS = 5

LINK, MORE, TOKEN_SHIFT = 1, 2, 2
"""Bits of an *element*, int32, one proxy token of a chunk: its link may carry a law; another one follows; the token."""

REST_SHIFT, ELEMENT = 32, 0xFFFFFFFF
"""A *word*, int64, is a chunk's encoding: its first element, and above it where the next ones begin. Most chunks are
one proxy token, so that one look into memory tells all."""

UNKNOWN, NO_TOKENS = -1, -2
"""Words of a chunk that is not in the table, and of one without proxy tokens."""

EMPTY = -1
"""The key of a free slot."""


def pending_after(pending: int, traits: int) -> int:
    """Continuation bytes that are lacking after a text that lacked ``pending`` and then a token of these traits."""
    continuation = traits >> CONTINUATION_SHIFT
    return max(pending - continuation, 0) if continuation else (traits >> PENDING_SHIFT) & 3


_pending_after = compiled_and_cached(pending_after)


@compiled_and_cached
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


@compiled_and_cached
def _first_slot(key: int, mask: int) -> int:
    # Fibonacci hashing on 30 bits: keys are run · vocabulary size + token, whose low bits repeat, and the product stays
    # within int64 (uncompiled, numpy would warn of an overflow).
    return (((key ^ (key >> 30)) & 0x3FFFFFFF) * 0x9E3779B1 >> 24) & mask


@compiled_and_cached
def insert(slots: npt.NDArray[np.int64], key: int, word: int) -> None:
    """Put a key into an open-addressing table, [a power of two, (key, word)], that has room."""
    mask = len(slots) - 1
    slot = _first_slot(key, mask)
    while slots[slot, 0] != EMPTY and slots[slot, 0] != key:
        slot = (slot + 1) & mask
    slots[slot, 0] = key
    slots[slot, 1] = word


@compiled_and_cached
def insert_many(
    slots: npt.NDArray[np.int64],
    singles: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
    words: npt.NDArray[np.int64],
) -> None:
    """:func:`insert` for each of several keys; those below the draft's vocabulary size go into ``singles``."""
    for place in range(len(keys)):
        if 0 <= keys[place] < len(singles):
            singles[keys[place]] = words[place]
        else:
            insert(slots, keys[place], words[place])


@compiled_and_cached
def find(slots: npt.NDArray[np.int64], key: int) -> int:
    """The word of a key, or UNKNOWN."""
    mask = len(slots) - 1
    slot = _first_slot(key, mask)
    while slots[slot, 0] != EMPTY:
        if slots[slot, 0] == key:
            return int(slots[slot, 1])
        slot = (slot + 1) & mask
    return UNKNOWN


@compiled_and_cached
def pack_entries(  # noqa: PLR0917 - a compiled function takes no keywords cheaply
    tokens: npt.NDArray[np.int64],
    links: npt.NDArray[np.bool_],
    lengths: npt.NDArray[np.int64],
    target_size: int,
    proxies: npt.NDArray[np.int32],
    at: int,
    words: npt.NDArray[np.int64],
) -> bool:
    """Write encodings, end to end in ``tokens``, into ``proxies`` from ``at`` on, and their words.

    Returns:
        Whether every token is in the target's vocabulary; if not, what was written is void.
    """
    done = 0
    for entry in range(len(lengths)):
        length = lengths[entry]
        words[entry] = NO_TOKENS
        for step in range(length):
            token = tokens[done + step]
            if token < 0 or token >= target_size:
                return False
            element = token << TOKEN_SHIFT
            if links[done + step]:
                element |= LINK
            if step + 1 < length:
                element |= MORE
            proxies[at + done + step] = element
            if step == 0:
                words[entry] = (at + done + 1) << REST_SHIFT | element
        done += length
    return True


@compiled_and_cached
def _next_word(word: int, proxies: npt.NDArray[np.int32]) -> int:
    at = word >> REST_SHIFT
    return int((at + 1) << REST_SHIFT | int(proxies[at]))


@compiled_and_cached
def _contains(values: npt.NDArray[np.int64], wanted: int) -> bool:
    for value in values:  # noqa: SIM110 - numba does not compile generators inside any()
        if value == wanted:
            return True
    return False


@compiled_and_cached
def _push_forward(  # noqa: C901, PLR0912, PLR0917 - one pass; a compiled function takes no keywords cheaply
    drawn: int,
    alive: npt.NDArray[np.int64],
    alive_probs: npt.NDArray[np.float64],
    proxies: npt.NDArray[np.int32],
    target_size: int,
    slot_of: npt.NDArray[np.int32],
    num_tokens: int,
    most_tokens: int,
    stored: int,
    tokens: npt.NDArray[np.int32],
    places: npt.NDArray[np.int64],
    probs: npt.NDArray[np.float64],
) -> tuple[int, int]:
    """Proxy tokens and rows of one chunk: its drawn word, and the words and probabilities of all its last tokens.

    Returns:
        The new numbers of proxy tokens and of entries; of these -1 where the law is not finite.
    """
    count, slot_mask = len(alive), len(slot_of) - 1
    while num_tokens < most_tokens:
        token, link, more = (drawn & ELEMENT) >> TOKEN_SHIFT, drawn & LINK, drawn & MORE
        row, row_start = num_tokens * target_size, stored
        kept, total = 0, 0.0
        slot_of[:] = EMPTY
        for other in range(count):
            word, probability = alive[other], alive_probs[other]
            # Revealed before the row: the chunk goes on (else it is not alive), and whether this link may carry a law.
            if word & LINK != link:
                continue
            total += probability
            place = row + ((word & ELEMENT) >> TOKEN_SHIFT)
            if link:
                slot = _first_slot(place, slot_mask)
                while slot_of[slot] != EMPTY and places[slot_of[slot]] != place:
                    slot = (slot + 1) & slot_mask
                if slot_of[slot] == EMPTY:
                    slot_of[slot] = stored
                    places[stored] = place
                    probs[stored] = probability
                    stored += 1
                else:
                    probs[slot_of[slot]] += probability
            # Revealed after it: the proxy token. For the next row.
            if more and word & MORE and place == row + token:
                alive[kept] = _next_word(word, proxies)
                alive_probs[kept] = probability
                kept += 1
        if not total < np.inf:
            return num_tokens, -1
        if link and total > 0.0:
            for entry in range(row_start, stored):
                probs[entry] /= total
        else:
            places[row_start] = row + token
            probs[row_start] = 1.0
            stored = row_start + 1
        tokens[num_tokens] = token
        num_tokens += 1
        if not more:
            break
        count = kept
        drawn = _next_word(drawn, proxies)
    return num_tokens, stored


@compiled_and_cached
def chunk_rows(  # noqa: C901, PLR0912, PLR0915, PLR0917 - one pass; helpers would carry a dozen arrays each
    ids: npt.NDArray[np.int64],
    plans: npt.NDArray[np.int64],
    law_ids: npt.NDArray[np.int32],
    law_probs: npt.NDArray[np.float64],
    shared_traits: npt.NDArray[np.uint8],
    own_traits: npt.NDArray[np.uint8],
    ends: npt.NDArray[np.int64],
    longest_run: int,
    singles: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    proxies: npt.NDArray[np.int32],
    target_size: int,
    slot_of: npt.NDArray[np.int32],
    alive: npt.NDArray[np.int64],
    alive_probs: npt.NDArray[np.float64],
    missing: npt.NDArray[np.int64],
    missing_ids: npt.NDArray[np.int32],
    first: int,
    totals: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int32],
    places: npt.NDArray[np.int64],
    probs: npt.NDArray[np.float64],
) -> tuple[int, int, int]:
    """Rows of a batch of drafts, from the request ``first`` on (docs/losslessness.md, "The chunk rule").

    Whether a token is extended depends on it, on the tokens before it and on the plan, never on later tokens. When
    chunks are missing, those of all requests are looked for, and after they were added the call is to be repeated from
    the first request that lacked one.

    Args:
        ids: [drafted], the drafted tokens of all requests; proxy tokens where the law's width is 0.
        plans: [requests, NUM_COLUMNS], columns as named above.
        law_ids: [Σ drafted · law width], the supports of the laws, token by token.
        law_probs: likewise.
        shared_traits: E, as in :class:`~vllm_tokentiming.transfer.extendable.Extendable`.
        own_traits: E of requests that are alone.
        ends: draft tokens after which the text is over.
        longest_run: extendable tokens before a chunk's last one, at most.
        singles: as in :class:`~vllm_tokentiming.transfer.chunks.ChunkTable`.
        slots: likewise.
        proxies: likewise.
        target_size: of the target's vocabulary.
        slot_of: scratch, a power of two of slots, more than the widest law.
        alive: scratch [widest law].
        alive_probs: likewise.
        missing: [drafted, 3], out: where in ``ids`` a chunk's run begins, its last token stands, and how many of
            ``missing_ids`` are of chunks up to this one.
        missing_ids: [Σ drafted · law width], out: the last tokens that are not in the table for these runs.
        first: the request to begin with.
        totals: [requests + 1, 2], in and out: proxy tokens and entries of rows before each request.
        tokens: [Σ most wanted], out: the proxy tokens.
        places: [Σ most wanted · law width], out: entries of rows, row · target's vocabulary size + token.
        probs: likewise, out: their probabilities.

    Returns:
        DONE; MISSING, the first request with a missing chunk, and the number of missing ones; or what is wrong, the
        request, and where in ``ids``.
    """
    draft_size = len(shared_traits)
    num_missing, num_missing_ids, first_missing = 0, 0, -1
    stop, law_stop = 0, 0
    for request in range(first):
        stop += plans[request, COUNT]
        law_stop += plans[request, COUNT] * plans[request, WIDTH]
    for request in range(first, len(plans)):
        width, planned = plans[request, WIDTH], plans[request, PLANNED]
        num_tokens, stored = totals[request, 0], totals[request, 1]
        most_tokens = num_tokens + plans[request, WANTED]
        begin, law_begin = stop, law_stop
        stop += plans[request, COUNT]
        law_stop += plans[request, COUNT] * width
        traits = own_traits if plans[request, ALONE] else shared_traits
        start, pending, run_number = begin, 0, 0
        for position in range(begin, stop):
            if width == 0:
                tokens[num_tokens] = ids[position]
                places[stored] = num_tokens * target_size + ids[position]
                probs[stored] = 1.0
                num_tokens += 1
                stored += 1
                continue
            if num_tokens == most_tokens:
                break
            last = ids[position]
            if last < 0 or last >= draft_size:
                return BAD_TOKEN, request, position
            trait = int(traits[last])
            lacking = _pending_after(pending, trait) if trait > IN_E else 0
            may_extend, in_bound = position + 1 - begin < planned, position - start < longest_run
            # A draft that ended before its plan after an extendable token: nothing known before that token was drawn
            # says that the chunk would end with it, so it is revealed like the rest of the run.
            revealed = may_extend and (lacking > 0 or (in_bound and trait & IN_E != 0))
            if revealed and position + 1 < stop:
                pending = lacking
                if run_number == 0:
                    run_number = last + 1
                elif run_number > 0:
                    run_number = find(slots, ~(run_number * draft_size + last))
                continue

            # The law of the chunk's last token, given its run: the tokens that end the chunk here.
            law = law_begin + (position - begin) * width
            count, drawn, seen_drawn, missing_before = 0, NO_TOKENS, False, num_missing_ids
            for place in range(law, law + width):
                draft_id, probability = int(law_ids[place]), law_probs[place]
                if not probability > 0.0 and draft_id != last:  # also NaN
                    continue
                if draft_id < 0 or draft_id >= draft_size:
                    return BAD_ID, request, position
                if revealed:
                    if draft_id != last:
                        continue
                elif may_extend:
                    trait = int(traits[draft_id])
                    if (in_bound and trait & IN_E) or (trait > IN_E and _pending_after(pending, trait) > 0):
                        continue
                if run_number == 0:
                    word = singles[draft_id]
                elif run_number > 0:
                    word = find(slots, run_number * draft_size + draft_id)
                else:
                    word = UNKNOWN
                if word == UNKNOWN:
                    missing_ids[num_missing_ids] = draft_id
                    num_missing_ids += 1
                elif word != NO_TOKENS:
                    alive[count] = word
                    alive_probs[count] = probability
                    count += 1
                if draft_id == last:
                    drawn, seen_drawn = word, True
            if not seen_drawn:
                return NOT_IN_LAW, request, position
            if num_missing_ids > missing_before:
                missing[num_missing, 0] = start
                missing[num_missing, 1] = position
                missing[num_missing, 2] = num_missing_ids
                num_missing += 1
                if first_missing < 0:
                    first_missing = request
            elif num_missing == 0:
                if drawn == NO_TOKENS:
                    break
                num_tokens, stored = _push_forward(
                    drawn, alive[:count], alive_probs, proxies, target_size, slot_of, num_tokens, most_tokens, stored,
                    tokens, places, probs,
                )  # fmt: skip
                if stored < 0:
                    return NOT_FINITE, request, position
            # The text is over, or has a gap: an unfinished character has no proxy tokens.
            if lacking > 0 or _contains(ends, last):
                break
            start, pending, run_number = position + 1, 0, 0
        totals[request + 1, 0] = num_tokens
        totals[request + 1, 1] = stored
    if num_missing > 0:
        return MISSING, first_missing, num_missing
    return DONE, 0, 0
