"""Where does a byte string stop being whole characters? No state."""

from __future__ import annotations

_LONGEST_INCOMPLETE = 3


def incomplete_suffix(data: bytes) -> int:
    """Number of bytes at the end of ``data`` that begin a UTF-8 character which more bytes could complete.

    0 for text that ends in a whole character, and for an end that no further byte can make valid.
    """
    if not data or data[-1] < 0x80:
        return 0
    for length in range(1, min(_LONGEST_INCOMPLETE, len(data)) + 1):
        if data[-length] < 0x80:
            return 0
        if data[-length] >= 0xC0:
            try:
                data[-length:].decode()
            except UnicodeDecodeError as error:
                return length if error.reason == "unexpected end of data" else 0
            return 0
    return 0


def valid_prefix(data: bytes) -> int:
    """Number of leading bytes of ``data`` that are whole, valid UTF-8 characters."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(data)
