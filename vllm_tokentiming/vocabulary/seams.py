"""Where can text be cut so that encoding the parts equals encoding the whole? Found once per vocabulary.

A *seam* is a place between two characters that no token spans, before and after which the tokenizer works
independently, whatever text follows later. A non-space followed by a space is one in every known byte-level
pre-tokenizer (all their patterns start a match there and none looks behind) and in SentencePiece vocabularies without a
token that spans it; likewise a letter or digit followed by a newline. *Fine* seams (before punctuation and digits) are
looked for only in long stretches without the others, such as CJK text, base64 or minified JSON.

Nothing is taken on trust: a pair of characters counts only where no token of this vocabulary has it inside, and every
rule is tried out with this tokenizer on crafted texts at start-up. What fails is not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

EncodeText = Callable[[str], Sequence[int]]
"""The tokenizer's plain encoding of a text, without this package's cuts."""

_SPACE: Final = 0x20
_NEWLINE: Final = 0x0A
_DIGITS: Final = frozenset(b"0123456789")
_LETTERS: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_ALNUM: Final = _DIGITS | _LETTERS
_GRAPHIC: Final = frozenset(range(0x21, 0x7F))
_MARKS: Final = _GRAPHIC - _ALNUM - frozenset(b"'")
"""ASCII punctuation before which a word ends; not the apostrophe, which some patterns take in (``don't``)."""
_MAYBE_LAST_OF_SPACE: Final = frozenset({0x85, 0xA0, 0xA8, 0xA9, 0xAF, 0x9F, *range(0x80, 0x8B)})
_LAST_BYTES: Final = frozenset(range(0x80, 0xC0)) - _MAYBE_LAST_OF_SPACE
"""Last bytes of characters beyond ASCII, without those that may end a Unicode space (U+0085, U+00A0, U+2000, …)."""

_CJK_LETTER: Final = (
    rb"(?:(?<=[\xe5-\xe9][\x80-\xbf][\x80-\xbf])|(?<=\xe3\x81[\x81-\xbf])"
    rb"|(?<=\xe3\x82[\xa1-\xbf])|(?<=\xe3\x83[\x80-\xba]))"
)
_CJK_MARKS: Final = "，。、！？；：」』）"
_AFTER_SPACE: Final = (" the", "  y", " \n z", " ", " 1", " 'll", " é", " 你", "  ", " (")
_AFTER_NEWLINE: Final = ("\n", "\n\n", "\n  a", "\n\n  a", "\n\t\tb", "\n1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """Zero-width patterns over bytes; None where this vocabulary has no such seams."""

    coarse: re.Pattern[bytes] | None
    fine: re.Pattern[bytes] | None
    _after: dict[int, frozenset[int]] = field(default_factory=dict, repr=False)

    def split(self, data: bytes) -> list[bytes]:
        """The pieces of ``data`` between its coarse seams; joined, they are ``data``."""
        return [data] if self.coarse is None else self.coarse.split(data)

    def last_coarse(self, data: bytes) -> int:
        """Offset of the last coarse seam, 0 where there is none. Costs the length of the last piece, not of all."""
        return _last(self.coarse, data)

    def last_fine(self, data: bytes) -> int:
        """Offset of the last fine seam, 0 where there is none."""
        return _last(self.fine, data)

    def after(self, byte: int) -> frozenset[int]:
        """The bytes before which text that ends in ``byte`` can be cut, whatever else it holds."""
        if byte not in self._after:
            patterns = [pattern for pattern in (self.coarse, self.fine) if pattern is not None]
            self._after[byte] = frozenset(
                following
                for following in range(256)
                if any(pattern.match(bytes((byte, following)), 1) for pattern in patterns)
            )
        return self._after[byte]


def _last(pattern: re.Pattern[bytes] | None, data: bytes) -> int:
    if pattern is None:
        return 0
    width = 64
    while True:
        base = max(0, len(data) - width)
        found = 0
        for match in pattern.finditer(data, base):
            found = match.start()
        if found or base == 0:
            return found
        width *= 4


def find_seams(
    flat_bytes: npt.NDArray[np.uint8],
    byte_offsets: npt.NDArray[np.int32],
    *,
    encode: EncodeText,
    pre_tokenized: bool,
) -> Seams:
    """Find the seams of one vocabulary.

    Args:
        flat_bytes: bytes of all tokens that encoding can produce, uint8 [total].
        byte_offsets: int32 [tokens + 1].
        encode: the tokenizer's plain mid-text encoding.
        pre_tokenized: whether a pre-tokenizer splits the text. If so, a token that spans a seam does no harm where
            encoding its bytes does not give it back.
    """
    tried = _Trial(encode)
    spanned = _spanned_pairs(flat_bytes, byte_offsets, encode=encode if pre_tokenized else None)

    before_space = {byte for byte in _GRAPHIC | _LAST_BYTES if (byte, _SPACE) not in spanned}
    if not tried.holds(("é", "你", "ก", "д", "🙂", "한"), (" a", "  b", " 你")):
        before_space -= _LAST_BYTES
    before_space = {byte for byte in before_space if byte >= 0x80 or tried.holds(("x" + chr(byte),), _AFTER_SPACE)}
    before_newline = {
        byte for byte in _ALNUM if (byte, _NEWLINE) not in spanned and tried.holds(("x" + chr(byte),), _AFTER_NEWLINE)
    }
    coarse = [(_one_of(before_space), b" "), (_one_of(before_newline), rb"\n")]

    marks_by_left: dict[frozenset[int], set[int]] = {}
    for mark in _MARKS:
        if tried.holds(("ab", "B", "x1", " Ab"), [chr(mark) + more for more in ("", "a", "1", " ", "\n", "=", "..")]):
            left = frozenset(byte for byte in _ALNUM if (byte, mark) not in spanned)
            marks_by_left.setdefault(left, set()).add(mark)
    fine = [(_one_of(left), _class(marks)) for left, marks in marks_by_left.items()]
    if tried.holds(("a", "Ab", " x", "zQ"), ("1", "1234", "0a", "9 ", "3.1")):
        letters = {byte for byte in _LETTERS if all((byte, digit) not in spanned for digit in _DIGITS)}
        fine.append((_one_of(letters), _class(_DIGITS)))
    spanned_marks = _spanned_cjk_marks(flat_bytes, byte_offsets)
    cjk = [
        mark.encode()
        for mark in _CJK_MARKS
        if mark not in spanned_marks
        and tried.holds(("好", "你好", "か", "カ"), [mark + more for more in ("", "你", "a", " ", "\n", mark)])
    ]
    if cjk:
        fine.append((_CJK_LETTER, b"(?:" + b"|".join(cjk) + b")"))
    return Seams(coarse=_pattern(coarse), fine=_pattern(fine))


@dataclass(frozen=True, slots=True)
class _Trial:
    encode: EncodeText

    def holds(self, lefts: Iterable[str], rights: Iterable[str]) -> bool:
        """Whether the place between each of ``lefts`` and each of ``rights`` is a seam, also when text follows."""
        rights = [right + more for right in rights for more in ("", "zq")]
        tails = [list(self.encode(right)) for right in rights]
        for left in lefts:
            head = list(self.encode(left))
            if any(list(self.encode(left + r)) != head + tail for r, tail in zip(rights, tails, strict=True)):
                return False
        return True


def _spanned_pairs(
    flat_bytes: npt.NDArray[np.uint8], byte_offsets: npt.NDArray[np.int32], *, encode: EncodeText | None
) -> set[tuple[int, int]]:
    """Pairs of neighbouring bytes that some token has inside, of those pairs that could be seams.

    With ``encode``, tokens that encoding their own bytes does not give back are passed over.
    """
    wanted = np.zeros((256, 256), dtype=np.bool_)
    wanted[sorted(_GRAPHIC | _LAST_BYTES), _SPACE] = True
    wanted[np.ix_(sorted(_ALNUM), [_NEWLINE, *sorted(_MARKS)])] = True
    wanted[np.ix_(sorted(_LETTERS), sorted(_DIGITS))] = True
    found = wanted[flat_bytes[:-1], flat_bytes[1:]]
    starts = byte_offsets[1:-1]
    found[starts[(starts > 0) & (starts < len(flat_bytes))] - 1] = False  # pairs across two tokens
    spanned: set[tuple[int, int]] = set()
    positions = np.flatnonzero(found)
    tokens = np.searchsorted(byte_offsets, positions, side="right") - 1
    for position, token in zip(positions.tolist(), tokens.tolist(), strict=True):
        pair = (int(flat_bytes[position]), int(flat_bytes[position + 1]))
        if pair not in spanned:
            spelled = flat_bytes[byte_offsets[token] : byte_offsets[token + 1]].tobytes()
            if encode is None or not _is_cut(spelled, encode):
                spanned.add(pair)
    return spanned


def _spanned_cjk_marks(flat_bytes: npt.NDArray[np.uint8], byte_offsets: npt.NDArray[np.int32]) -> set[str]:
    """Marks that some token has inside, behind a CJK letter."""
    marks = re.compile(_CJK_LETTER + b"(?=(" + b"|".join(mark.encode() for mark in _CJK_MARKS) + b"))")
    flat = flat_bytes.tobytes()
    starts = set(byte_offsets.tolist())
    return {match[1].decode() for match in marks.finditer(flat) if match.start() not in starts}


def _is_cut(token: bytes, encode: EncodeText) -> bool:
    """Whether encoding a token's own bytes gives several tokens: then no text is encoded to it."""
    try:
        return len(encode(token.decode())) > 1
    except UnicodeDecodeError:
        return False


def _class(values: Iterable[int]) -> bytes:
    """A regular expression's class of bytes, in ranges."""
    ranges: list[list[int]] = []
    for value in sorted(values):
        if ranges and ranges[-1][1] == value - 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    return b"[" + b"".join(rb"\x%02x-\x%02x" % (low, high) for low, high in ranges) + b"]"


def _one_of(values: Iterable[int]) -> bytes:
    values = sorted(values)
    return b"(?<=" + _class(values) + b")" if values else b""


def _pattern(rules: Sequence[tuple[bytes, bytes]]) -> re.Pattern[bytes] | None:
    """One zero-width pattern; the right-hand character first, which fails fastest."""
    usable = [(left, right) for left, right in rules if left]
    if not usable:
        return None
    alternatives = b"|".join(b"(?=" + right + b")" + left for left, right in usable)
    return re.compile(b"(?=" + b"|".join(right for _, right in usable) + b")(?:" + alternatives + b")")
