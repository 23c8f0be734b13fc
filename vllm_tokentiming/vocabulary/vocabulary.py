"""What can the rest of the package ask about one tokenizer? Immutable but for the encoder's cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.errors import VocabularyError
from vllm_tokentiming.vocabulary.byte_table import build_byte_table
from vllm_tokentiming.vocabulary.encoder import ExactEncoder
from vllm_tokentiming.vocabulary.kinds import Spec, TokenizerKind, components, read_source
from vllm_tokentiming.vocabulary.roles import end_literal_ids

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vocabulary:
    """A tokenizer as a table of bytes, and as an exact encoder.

    Attributes:
        name: of the model, for messages.
        kind: how it writes bytes.
        size: ids that the tokenizer knows (one more than the largest).
        model_vocab_size: rows of the model's logits, smaller or larger than ``size``; bounds every id handed out.
        bos_id: the token that the tokenizer puts before every text, or None where it puts none.
        eos_id: the token that the tokenizer itself calls the end, or None.
        end_ids: tokens that end an answer, a turn or a text.
        special_ids: tokens without bytes.
        literals: literal text of every added token, by id.
        dummy_prefix: what the tokenizer puts before a text's first word (a space), or nothing.
        dummy_prefix_always: also before a text that starts with a space.
        token_bytes: per id below ``model_vocab_size``, its bytes; None for special tokens and ids beyond the tokenizer.
        flat_bytes: the same, concatenated, uint8 [total]; tokens without bytes have none.
        byte_offsets: int32 [model_vocab_size + 1]; token ``i`` is ``flat_bytes[byte_offsets[i]:byte_offsets[i + 1]]``.
    """

    name: str
    kind: TokenizerKind
    size: int
    model_vocab_size: int
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    special_ids: frozenset[int]
    literals: dict[int, str] = field(repr=False)
    dummy_prefix: bytes
    dummy_prefix_always: bool
    token_bytes: list[bytes | None] = field(repr=False)
    flat_bytes: Bytes = field(repr=False)
    byte_offsets: Offsets = field(repr=False)
    encoder: ExactEncoder = field(repr=False)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, *, model_vocab_size: int, name: str, end_ids: Iterable[int] = ()) -> Self:
        """Build from a Hugging Face fast tokenizer.

        Args:
            tokenizer: the tokenizer of the model.
            model_vocab_size: rows of the model's logits.
            name: of the model, for messages.
            end_ids: further end tokens, such as those of its generation configuration.

        Raises:
            VocabularyError: a slow tokenizer, or one whose tokens cannot be mapped to bytes.
        """
        if model_vocab_size < 1:
            raise VocabularyError(f"the vocabulary of {name} has size {model_vocab_size}; a positive size is required.")
        source = read_source(tokenizer, name=name)
        spec, kind = source.spec, source.kind
        table = build_byte_table(spec, kind, model_vocab_size=model_vocab_size)
        eos_id = getattr(tokenizer, "eos_token_id", None)
        ends = {*end_ids, *end_literal_ids(table.literals, table.special_ids)}
        if isinstance(eos_id, int):
            ends.add(eos_id)
        prefix, always = _dummy_prefix(spec)
        return cls(
            name=name,
            kind=kind,
            size=max(tokenizer_ids(spec), default=-1) + 1,
            model_vocab_size=model_vocab_size,
            bos_id=_prepended_id(tokenizer, table.special_ids),
            eos_id=eos_id if isinstance(eos_id, int) else None,
            end_ids=frozenset(ends),
            special_ids=table.special_ids,
            literals=table.literals,
            dummy_prefix=prefix,
            dummy_prefix_always=always,
            token_bytes=table.token_bytes,
            flat_bytes=table.flat_bytes,
            byte_offsets=table.byte_offsets,
            encoder=ExactEncoder(source, table, name=name),
        )

    def encode(self, data: bytes) -> list[int]:
        """Ids whose concatenated bytes equal ``data``, as in the middle of a text: no prefix space, BOS or specials.

        Raises:
            UnencodableTextError: the vocabulary has no token for some byte.
        """
        return self.encoder.encode(data)

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes of ``ids``; special tokens and unknown ids have none."""
        table, size = self.token_bytes, self.model_vocab_size
        return b"".join([table[token] or b"" for token in ids if 0 <= token < size])

    def first_text(self, data: bytes) -> bytes:
        """``data`` as this tokenizer sees it at the very start of a text: behind its dummy prefix, where it has one."""
        if self.dummy_prefix and (self.dummy_prefix_always or not data.startswith(b" ")):
            return self.dummy_prefix + data
        return data


def overlap(target: Vocabulary, draft: Vocabulary) -> int:
    """Number of target tokens whose bytes are also one token of the draft."""
    spelled_by_draft = {token for token in draft.token_bytes if token}
    return sum(token in spelled_by_draft for token in target.token_bytes if token)


def tokenizer_ids(spec: Spec) -> Iterable[int]:
    """Every id that a ``tokenizer.json`` names."""
    vocab = spec["model"]["vocab"]
    yield from vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    for added in spec.get("added_tokens") or ():
        yield added["id"]


def _prepended_id(tokenizer: Any, special_ids: frozenset[int]) -> int | None:
    """The special token that encoding puts before a text, tried out rather than read from the configuration."""
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    return ids[0] if len(ids) > 1 and ids[0] in special_ids else None


def _dummy_prefix(spec: Spec) -> tuple[bytes, bool]:
    """The space before a text's first word, and whether also before a space (tokenizers' rules for each part)."""
    for part in components(spec.get("normalizer")):
        if part["type"] == "Prepend":
            return b" ", True
    for part in components(spec.get("pre_tokenizer")):
        if part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return b" ", False
        if part["type"] == "ByteLevel" and part.get("add_prefix_space"):
            return b" ", False
    return b"", False
