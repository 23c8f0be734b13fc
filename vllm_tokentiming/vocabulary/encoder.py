"""How are bytes written as tokens of one vocabulary, exactly? Owns the encoding tokenizer and its cache.

The tokenizer is rebuilt from its ``tokenizer.json`` without everything that changes the text: normalizers (NFC,
lower-casing, stripping), the dummy prefix space, the post-processor, truncation and padding, and matching of special
tokens, so that text which spells ``<|im_end|>`` stays text. What comes out is checked byte by byte; what does not check
out is mended with single-byte tokens.

Text is encoded piece by piece between *seams* (see ``seams.py``), so the pieces of running text, mostly single words,
come from a cache.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import re
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Tokenizer

from vllm_tokentiming.errors import UnencodableTextError, VocabularyError
from vllm_tokentiming.vocabulary.byte_table import ByteTable
from vllm_tokentiming.vocabulary.kinds import SPACE_MARK, Source, Spec, TokenizerKind, components, piece_ids
from vllm_tokentiming.vocabulary.seams import Seams, find_seams

_log = logging.getLogger(__name__)

Ids = tuple[int, ...]

_NEVER: Final = b"\xff\xfe\xff"
"""Stands in for tokens that encoding must not produce; invalid UTF-8, so the check against valid text always fails."""
_CACHED_PIECE_BYTES: Final = 64
_CACHED_PIECES: Final = 1 << 16
_PIECEWISE_BYTES: Final = 512
_LARGEST_GAP: Final = 1 << 14
_WORD: Final = re.compile(" ?[A-Z]?[a-z]+")
_TRIED_WORDS: Final = 1000
_BAD_OR_GOOD: Final = re.compile("[\udc80-\udcff]+|[^\udc80-\udcff]+")


class OpenEncoding(NamedTuple):
    """An encoding that may go on. A named tuple, which is made faster than a dataclass: one is made in every cycle.

    Attributes:
        ids: token ids of the whole text.
        open_start: byte offset of the last piece, the only one that further text can change.
        open_ids: how many of the ids belong to it.
    """

    ids: list[int]
    open_start: int
    open_ids: int


class ExactEncoder:
    """Bytes → ids whose bytes are the same bytes."""

    def __init__(self, source: Source, table: ByteTable, *, name: str) -> None:
        self._name = name
        self._tokenizer = _bare_tokenizer(source, name=name)
        self._bytes = [_NEVER if token is None else token for token in table.token_bytes]
        self._byte_ids = table.byte_ids
        self._known: dict[bytes, Ids] = {}
        self._known_partial: dict[bytes, tuple[Ids, int]] = {}
        self._character_ok: dict[str, bool] = {}
        added = (token["content"] for token in source.spec.get("added_tokens") or () if not token["special"])
        self._literals = sorted(filter(None, added), key=len, reverse=True)  # the longest one matches
        self._space_mark: str | None = None
        pre_tokenized = source.kind is TokenizerKind.BYTE_LEVEL and any(
            part["type"] != "ByteLevel" or part.get("use_regex", True)
            for part in components(source.spec.get("pre_tokenizer"))
        )
        seams = find_seams(table.flat_bytes, table.byte_offsets, encode=self._plain, pre_tokenized=pre_tokenized)
        if source.spec["model"]["type"] == "Unigram":
            # It takes text such as "<0x0A>" for the piece of that name; mending that must see the literal whole.
            seams = dataclasses.replace(seams, fine=None)
        self.seams: Seams = seams
        self._model = source.backend.model
        self._space_mark = self._find_space_mark(source)
        if self.seams.coarse is None:
            _log.warning("the tokenizer of %s joins words across spaces; text is encoded in longer stretches", name)

    def encode(self, data: bytes) -> list[int]:
        """Ids whose concatenated bytes equal ``data``.

        Raises:
            UnencodableTextError: the vocabulary has no token for some byte.
        """
        known = self._known.get(data)
        if known is not None:
            return list(known)
        ids, covered = self.encode_prefix(data)
        if covered < len(data):
            raise UnencodableTextError(
                f"byte 0x{data[covered]:02X} at offset {covered} cannot be written in the vocabulary of {self._name}, "
                f"which lacks a token for it. The text is left out of proposals; nothing needs to be done."
            )
        return ids

    def plain(self, data: bytes) -> Ids | None:
        """The tokenizer's own ids where they spell ``data`` without any mending, else None."""
        ids = self._checked(data)
        return None if ids is None else tuple(ids)

    def encode_prefix(self, data: bytes) -> tuple[list[int], int]:
        """Encode as much as the vocabulary can write: the ids, and how many leading bytes of ``data`` they spell."""
        if len(data) > _PIECEWISE_BYTES:
            whole = self._checked(data)
            if whole is not None:
                return whole, len(data)
        ids: list[int] = []
        known = self._known
        covered = 0
        pieces = self.seams.split(data)
        self._learn(pieces)
        for piece in pieces:
            hit = known.get(piece)
            if hit is None:
                hit, unwritable = self._encode_piece(piece)
                if unwritable >= 0:
                    # Only what stands before the byte that has no token.
                    return ids + self.encode(piece[:unwritable]), covered + unwritable
            ids += hit
            covered += len(piece)
        return ids, covered

    def encode_open(self, data: bytes) -> OpenEncoding:
        """Encode text that goes on later. Bytes that the vocabulary cannot write are left out."""
        if len(data) > _PIECEWISE_BYTES:
            whole = self._checked(data)
            if whole is not None:
                start = self.seams.last_coarse(data)
                return OpenEncoding(whole, start, len(self._piece(data[start:])) if start else len(whole))
        pieces = self.seams.split(data)
        get = self._known.get
        encoded = [get(piece) for piece in pieces]
        if None in encoded:
            self._learn(pieces)
            encoded = [get(piece) or self._piece(piece) for piece in pieces]
        ids = [token for each in encoded if each for token in each]
        return OpenEncoding(ids, len(data) - len(pieces[-1]), len(encoded[-1] or ()))

    def reference(self, data: bytes) -> list[int]:
        """Encode without seams or cache, leaving out bytes that the vocabulary cannot write. For tests and checks."""
        plain = self._checked(data)
        return list(self._mend(data)[0]) if plain is None else plain

    def _learn(self, pieces: list[bytes]) -> None:
        """Encode the unknown ones of several pieces in one call, whose cost is mostly that of the call."""
        known = self._known
        unknown = [index for index, piece in enumerate(pieces) if piece not in known]
        if len(unknown) < 2:
            return
        new = pieces[unknown[0] : unknown[-1] + 1]
        ids = self._checked(b"".join(new))
        if ids is None:
            return
        spelled = self._bytes
        low = high = 0
        for piece in new:
            missing = len(piece)
            while missing > 0:
                missing -= len(spelled[ids[high]])
                high += 1
            if missing < 0:
                return  # not a seam after all; the pieces are encoded one by one
            if len(piece) <= _CACHED_PIECE_BYTES:
                _remember(known, piece, tuple(ids[low:high]))
            low = high

    def _piece(self, piece: bytes) -> Ids:
        return self._known.get(piece) or self._encode_piece(piece)[0]

    def _encode_piece(self, piece: bytes) -> tuple[Ids, int]:
        """Ids, and the offset of the first byte left out (-1: none)."""
        partial = self._known_partial.get(piece)
        if partial is not None:
            return partial
        plain = self._checked(piece)
        ids, unwritable = self._mend(piece) if plain is None else (tuple(plain), -1)
        if len(piece) <= _CACHED_PIECE_BYTES:
            if unwritable >= 0:
                _remember(self._known_partial, piece, (ids, unwritable))
            else:
                _remember(self._known, piece, ids)
        return ids, unwritable

    def _find_space_mark(self, source: Source) -> str | None:
        """What the model takes for a space in front of a word, if words can be given to it directly, else None.

        Tried on pairs of this vocabulary's own pieces: that its pre-tokenizer keeps words whole, and that none of them
        means something else to it.
        """
        if any(literal.strip(f" {SPACE_MARK}").isalpha() for literal in self._literals):
            return None  # it would be matched inside of words
        mark = "\u0120" if source.kind is TokenizerKind.BYTE_LEVEL else SPACE_MARK
        rng = random.Random(0)  # noqa: S311 - equal on every rank, and nothing secret
        sample = rng.sample(self._bytes, min(len(self._bytes), 4 * _TRIED_WORDS))
        heads = [text for data in sample if _WORD.fullmatch(text := data.decode(errors="replace"))]
        tails = [text for text in heads if text.islower() and text[0] != " "]
        if not tails:
            return None
        for _ in range(_TRIED_WORDS):
            text = rng.choice(heads) + rng.choice((*rng.choices(tails, k=3), ""))
            if self._whole_word(text, mark) != self._plain(text):
                return None
        return mark

    def _whole_word(self, text: str, mark: str) -> list[int]:
        word = mark + text[1:] if text[0] == " " else text
        return [token.id for token in self._model.tokenize(word)]

    def _plain(self, text: str) -> list[int]:
        if self._space_mark is not None and _WORD.fullmatch(text):
            # The tokenizer's other parts take longer than its model.
            return self._whole_word(text, self._space_mark)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _checked(self, data: bytes) -> list[int] | None:
        """The tokenizer's own ids, or None where they do not spell ``data``."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return None
        ids = self._plain(text)
        try:
            return ids if b"".join([self._bytes[token] for token in ids]) == data else None
        except IndexError:  # an id beyond the model's vocabulary
            return None

    def _mend(self, data: bytes) -> tuple[Ids, int]:
        """Encode the stretches that check out, the rest by single-byte tokens."""
        ids: list[int] = []
        unwritable, offset = -1, 0
        for stretch in _BAD_OR_GOOD.findall(data.decode(errors="surrogateescape")):
            invalid = "\udc80" <= stretch[0] <= "\udcff"
            # Single bytes or characters where it does not check out; a character is written whole or not at all.
            for part in stretch if invalid else self._trusted_parts(stretch):
                raw = part.encode(errors="surrogateescape")
                checked = None if invalid else self._checked(raw)
                if checked is None:
                    singles = [self._byte_ids[byte] for byte in raw]
                    checked = [single for single in singles if single is not None]
                    if len(checked) < len(raw):
                        checked = []
                        unwritable = offset if unwritable < 0 else unwritable
                ids += checked
                offset += len(raw)
        return tuple(ids), unwritable

    def _trusted_parts(self, text: str) -> list[str]:
        """Cut valid text so that every part either checks out or is one character that cannot."""
        wrong = [char for char in dict.fromkeys(text) if not self._checks_out(char)]
        parts = [text]
        if wrong:
            # An added token such as "<think>" may hold a character that has no token of its own.
            literals = [literal for literal in self._literals if literal in text and self._checked(literal.encode())]
            divider = "|".join(map(re.escape, [*literals, *wrong]))
            parts = [part for part in re.split(f"({divider})", text) if part]
        trusted: list[str] = []
        for part in parts:
            if len(part) == 1 or self._checked(part.encode()) is not None:
                trusted.append(part)
                continue
            # A literal that the model takes for a special piece, as Unigram does: spell only its own surroundings.
            for piece in self.seams.split(part.encode()):
                trusted += [piece.decode()] if self._checked(piece) is not None else list(piece.decode())
        return trusted

    def _checks_out(self, char: str) -> bool:
        known = self._character_ok.get(char)
        if known is None:
            known = self._checked(char.encode()) is not None
            _remember(self._character_ok, char, known)
        return known


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= _CACHED_PIECES:
        cache.clear()
    cache[key] = value


def _bare_tokenizer(source: Source, *, name: str) -> Tokenizer:
    """The same model behind the parts that keep the text as it is. The model is shared, which saves rebuilding it."""
    spec = source.spec
    normalizers = [part for part in components(spec.get("normalizer")) if part["type"] == "ByteLevel"]
    pre_tokenizers = [_lossless(part) for part in components(spec.get("pre_tokenizer"))]
    if source.kind is TokenizerKind.SENTENCEPIECE and not any(part["type"] == "Metaspace" for part in pre_tokenizers):
        normalizers = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}]
    shell: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers} if pre_tokenizers else None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    bare = Tokenizer(source.backend.model)
    try:
        parts = Tokenizer.from_str(json.dumps(shell))
    except Exception as error:  # tokenizers raises bare Exception
        raise VocabularyError(
            f"the tokenizer of {name} cannot be rebuilt from its tokenizer.json: {error}. Its parts must be ones that "
            f"the installed tokenizers library knows; upgrade it, or use another model."
        ) from error
    if parts.normalizer is not None:
        bare.normalizer = parts.normalizer
    if parts.pre_tokenizer is not None:
        bare.pre_tokenizer = parts.pre_tokenizer
    bare.add_tokens(_added_tokens(spec))
    bare.encode_special_tokens = True
    return bare


def _added_tokens(spec: Spec) -> list[AddedToken]:
    """The added tokens in the order of their ids, which the library numbers anew; placeholders fill gaps.

    Special ones are there to keep the count; they are not matched. ``lstrip``, ``rstrip`` and ``single_word`` are left
    out: they make a match swallow, or depend on, what stands around it.
    """
    pieces = piece_ids(spec)
    tokens: list[AddedToken] = []
    following = len(pieces)
    for added in sorted(spec.get("added_tokens") or (), key=lambda token: int(token["id"])):
        if added["content"] not in pieces:
            gap = added["id"] - following
            tokens += [AddedToken(f"\x00gap{following + n}", special=True) for n in range(min(gap, _LARGEST_GAP))]
            following += max(gap, 0) + 1
        tokens.append(AddedToken(added["content"], normalized=added["normalized"], special=added["special"]))
    return tokens


def _lossless(part: Spec) -> Spec:
    """A pre-tokenizer that keeps every character and adds none."""
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    if part.get("behavior") == "Removed":
        return {**part, "behavior": "Isolated"}
    return part
