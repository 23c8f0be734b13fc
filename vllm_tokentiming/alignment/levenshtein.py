"""How far apart two tokens are: the local cost of the alignment.

Sources: TokenTiming (arXiv 2510.15545), section 3.2, for the cost; Myers, "A fast bit-vector algorithm for approximate
string matching" (JACM 46, 1999), in Hyyrö's form, for one word of bits per column of the table.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.compilation import compiled

MAX_PATTERN_LENGTH: Final = 62
"""Bytes of a token that fit one int64 of bits: the sum below needs one bit more, and the sign stays clear."""


@compiled
def mark_pattern(
    flat_bytes: npt.NDArray[np.uint8], start: int, end: int, positions_of_byte: npt.NDArray[np.int64]
) -> None:
    """Set bit n of ``positions_of_byte[b]`` where the token's n-th byte is b.

    Args:
        flat_bytes: uint8, a vocabulary's bytes; the token is ``flat_bytes[start:end]``, at most MAX_PATTERN_LENGTH.
        positions_of_byte: int64 [256], all zero.
    """
    for position in range(start, end):
        positions_of_byte[flat_bytes[position]] |= 1 << (position - start)


@compiled
def unmark_pattern(
    flat_bytes: npt.NDArray[np.uint8], start: int, end: int, positions_of_byte: npt.NDArray[np.int64]
) -> None:
    """Set what :func:`mark_pattern` set back to zero."""
    for position in range(start, end):
        positions_of_byte[flat_bytes[position]] = 0


@compiled
def levenshtein_from_pattern(
    positions_of_byte: npt.NDArray[np.int64],
    pattern_length: int,
    flat_bytes: npt.NDArray[np.uint8],
    start: int,
    end: int,
) -> int:
    """Least number of inserted, deleted and replaced bytes that turn the marked token into ``flat_bytes[start:end]``.

    Args:
        positions_of_byte: int64 [256], the marked token.
        pattern_length: its length, at most MAX_PATTERN_LENGTH.
        flat_bytes: uint8, the other vocabulary's bytes.
    """
    if pattern_length == 0:
        return end - start
    every_bit = (1 << pattern_length) - 1
    last_bit = 1 << (pattern_length - 1)
    distance = pattern_length
    one_more = every_bit
    one_less = 0
    for position in range(start, end):
        equal = positions_of_byte[flat_bytes[position]]
        vertical = equal | one_less
        horizontal = (((equal & one_more) + one_more) ^ one_more) | equal
        rises = one_less | (~(horizontal | one_more) & every_bit)
        falls = one_more & horizontal
        if rises & last_bit:
            distance += 1
        elif falls & last_bit:
            distance -= 1
        rises = (rises << 1) | 1
        falls <<= 1
        one_more = (falls | ~(vertical | rises)) & every_bit
        one_less = rises & vertical & every_bit
    return distance


@compiled
def levenshtein(  # noqa: PLR0917 -- a compiled function takes no keywords cheaply
    left: npt.NDArray[np.uint8],
    left_start: int,
    left_end: int,
    right: npt.NDArray[np.uint8],
    right_start: int,
    right_end: int,
    scratch: npt.NDArray[np.int32],
) -> int:
    """The same distance for tokens of any length, one row of the table at a time.

    Args:
        left: uint8, a vocabulary's bytes; the token is ``left[left_start:left_end]``.
        right: uint8, likewise for the other token.
        scratch: int32, at least one longer than the right token; its content is overwritten.
    """
    columns = right_end - right_start
    for column in range(columns + 1):
        scratch[column] = column
    for row in range(left_end - left_start):
        byte = left[left_start + row]
        diagonal = row
        current = row + 1
        for column in range(columns):
            above = int(scratch[column + 1])
            replaced = diagonal + (1 if byte != right[right_start + column] else 0)
            current = min(replaced, min(above, current) + 1)
            scratch[column + 1] = current
            diagonal = above
        scratch[0] = row + 1
    return int(scratch[columns])
