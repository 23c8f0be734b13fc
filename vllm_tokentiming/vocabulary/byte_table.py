"""Which bytes does each token id stand for? Built once per tokenizer from its ``tokenizer.json``; no state.

Never by decoding single ids, which drops the bytes of half characters and of leading spaces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.vocabulary.kinds import SPACE_MARK, Spec, TokenizerKind, byte_token, piece_ids

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character of each byte value, character → byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteTable:
    """Ids and what they stand for.

    Attributes:
        token_bytes: per id below the model's vocabulary size, its bytes; None: special, unused, unknown.
        flat_bytes: the same, concatenated, uint8 [total]; tokens without bytes have none.
        byte_offsets: int32 [ids + 1].
        byte_ids: per byte value, the id of the token that spells only it, or None where the vocabulary has none.
        literals: literal text of every added token, special or not, by id (ids beyond the model's vocabulary too).
        special_ids: the special ones among them.
    """

    token_bytes: list[bytes | None]
    flat_bytes: npt.NDArray[np.uint8]
    byte_offsets: npt.NDArray[np.int32]
    byte_ids: tuple[int | None, ...]
    literals: dict[int, str]
    special_ids: frozenset[int]


def build_byte_table(spec: Spec, kind: TokenizerKind, *, model_vocab_size: int) -> ByteTable:
    """Read the table off a ``tokenizer.json``.

    Special tokens have no bytes. Added tokens that are not special stand for their literal text, except those that are
    also SentencePiece pieces, where ``▁`` is a space.
    """
    pieces = piece_ids(spec)
    token_bytes: list[bytes | None] = [None] * model_vocab_size
    spell = _byte_level_bytes if kind is TokenizerKind.BYTE_LEVEL else _sentencepiece_bytes
    for piece, token in pieces.items():
        if token < model_vocab_size:
            token_bytes[token] = spell(piece)

    literals: dict[int, str] = {}
    special: set[int] = set()
    for added in spec.get("added_tokens") or ():
        token, literal = added["id"], added["content"]
        literals[token] = literal
        if added["special"]:
            special.add(token)
        elif token < model_vocab_size and (kind is TokenizerKind.BYTE_LEVEL or pieces.get(literal) != token):
            token_bytes[token] = literal.encode(errors="replace")
    special |= _unknown_token(spec, pieces)
    for token in special:
        if token < model_vocab_size:
            token_bytes[token] = None

    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    byte_ids: list[int | None] = []
    for byte in range(256):
        piece = alphabet[byte] if kind is TokenizerKind.BYTE_LEVEL else byte_token(byte)
        single = pieces.get(piece)
        usable = single is not None and single < model_vocab_size and token_bytes[single] == bytes((byte,))
        byte_ids.append(single if usable else None)
    spelled = [token or b"" for token in token_bytes]
    return ByteTable(
        token_bytes=token_bytes,
        flat_bytes=np.frombuffer(b"".join(spelled), dtype=np.uint8),
        byte_offsets=np.cumsum([0, *map(len, spelled)], dtype=np.int32),
        byte_ids=tuple(byte_ids),
        literals=literals,
        special_ids=frozenset(special),
    )


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(map(_ALPHABET.__getitem__, piece))
    except KeyError:
        # A piece outside the alphabet, such as a name for padding; the ByteLevel decoder shows it as it is.
        return piece.encode(errors="replace")


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    if byte:
        return bytes((int(byte[1], 16),))
    return piece.replace(SPACE_MARK, " ").encode(errors="replace")


def _unknown_token(spec: Spec, pieces: dict[str, int]) -> set[int]:
    """The model's own unknown token, which may be missing from the added tokens."""
    model = spec["model"]
    if model["type"] == "Unigram":
        return set() if model.get("unk_id") is None else {model["unk_id"]}
    unknown = model.get("unk_token")
    return {pieces[unknown]} if unknown in pieces else set()
