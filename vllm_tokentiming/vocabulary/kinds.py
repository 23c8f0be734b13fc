"""Which kind of tokenizer is this, and can its tokens be mapped to bytes? No state.

A ``tokenizer.json`` names no kind: it is read off the parts that carry bytes. Byte-level tokenizers translate bytes to
256 printable characters in a pre-tokenizer or normalizer; SentencePiece-style ones write spaces as ``▁`` and fall
back to ``<0xNN>`` tokens. Everything else loses bytes somewhere and is refused.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from vllm_tokentiming.errors import VocabularyError

_log = logging.getLogger(__name__)

Spec = dict[str, Any]
"""A parsed ``tokenizer.json``."""

SPACE_MARK = "▁"
_REMEDY = (
    "Use a model with a byte-level BPE tokenizer (as Qwen, Llama 3, GPT, DeepSeek, SmolLM) or a SentencePiece one with "
    "byte fallback (as Llama 2, Mistral, Gemma)."
)


class TokenizerKind(enum.StrEnum):
    """How a tokenizer writes bytes as tokens."""

    BYTE_LEVEL = "byte_level"
    SENTENCEPIECE = "sentencepiece"


def components(part: Any) -> Iterator[Spec]:
    """The leaves of a normalizer, pre-tokenizer or decoder, in order; none for null."""
    if not isinstance(part, dict):
        return
    for key in ("normalizers", "pretokenizers", "decoders"):
        if key in part:
            for child in part[key]:
                yield from components(child)
            return
    yield part


def piece_ids(spec: Spec) -> dict[str, int]:
    """The model's own vocabulary, piece → id, of BPE (a mapping) or Unigram (a list of piece and score)."""
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {piece: index for index, (piece, _) in enumerate(vocab)}


def byte_token(byte: int) -> str:
    """The SentencePiece name of one byte's token."""
    return f"<0x{byte:02X}>"


@dataclass(frozen=True, slots=True)
class Source:
    """A tokenizer as it was read.

    Attributes:
        spec: its ``tokenizer.json``; without the merges, which only ``backend`` needs, for a BPE model.
        backend: the ``tokenizers.Tokenizer``.
        kind: read off ``spec``.
    """

    spec: Spec
    backend: Tokenizer
    kind: TokenizerKind


def read_source(tokenizer: Any, *, name: str) -> Source:
    """Read a Hugging Face fast tokenizer.

    Transformers rebuilds the pipeline of some tokenizers from their class name alone: DeepSeek's byte-level vocabulary,
    which its configuration calls a Llama tokenizer, gets SentencePiece parts that cannot encode it. Where the parts
    contradict the vocabulary, the file on disk is read instead.

    Raises:
        VocabularyError: not a fast tokenizer, or one whose tokens cannot be mapped to bytes.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise VocabularyError(
            f"the tokenizer of {name} is a {type(tokenizer).__name__}, which is not a fast tokenizer (no "
            f"tokenizer.json behind it). A fast tokenizer is required. Use a model that ships tokenizer.json, or "
            f"convert its tokenizer with transformers.convert_slow_tokenizer."
        )
    spec = _spec_of(backend)
    try:
        return Source(spec, backend, kind_of(spec, name=name))
    except VocabularyError:
        on_disk = _backend_on_disk(getattr(tokenizer, "name_or_path", ""))
        if on_disk is None or on_disk.get_vocab() != backend.get_vocab():
            raise
        spec = _spec_of(on_disk)
        source = Source(spec, on_disk, kind_of(spec, name=name))
    _log.warning(
        "the tokenizer of %s was loaded as %s, which contradicts its own tokenizer.json; the file is used",
        name,
        type(tokenizer).__name__,
    )
    return source


def _spec_of(backend: Tokenizer) -> Spec:
    model = backend.model
    if not isinstance(model, BPE):
        spec: Spec = json.loads(backend.to_str())
        return spec
    # to_str() spells out hundreds of thousands of merges, which takes seconds to write and to parse.
    return {
        "normalizer": _state(backend.normalizer),
        "pre_tokenizer": _state(backend.pre_tokenizer),
        "decoder": _state(backend.decoder),
        "added_tokens": [
            {"id": token, "content": added.content, "special": added.special, "normalized": added.normalized}
            for token, added in backend.get_added_tokens_decoder().items()
        ],
        "model": {
            "type": "BPE",
            "vocab": backend.get_vocab(with_added_tokens=False),
            "byte_fallback": model.byte_fallback,
            "unk_token": model.unk_token,
            "continuing_subword_prefix": model.continuing_subword_prefix,
            "end_of_word_suffix": model.end_of_word_suffix,
        },
    }


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _backend_on_disk(name_or_path: str) -> Tokenizer | None:
    path: Path | str | None = Path(name_or_path) / "tokenizer.json"
    if not Path(name_or_path).is_dir():
        from transformers.utils import cached_file  # noqa: PLC0415  (heavy, and rarely needed)

        try:
            path = cached_file(name_or_path, "tokenizer.json", local_files_only=True)
        except (OSError, ValueError):
            return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001  (tokenizers raises bare Exception for a missing or broken file)
        return None


def kind_of(spec: Spec, *, name: str) -> TokenizerKind:
    """Read the kind off the parts of a ``tokenizer.json``.

    Raises:
        VocabularyError: an unknown kind; says what was found, what is required, and the remedy.
    """
    model = spec["model"]
    if model.get("type") not in ("BPE", "Unigram"):
        raise VocabularyError(
            f"the tokenizer of {name} is a {model.get('type')} model, whose tokens do not spell the text's bytes. "
            f"BPE or Unigram is required. {_REMEDY}"
        )
    affix = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if affix:
        raise VocabularyError(
            f"the tokenizer of {name} marks parts of words with {affix!r}, which loses where spaces were. "
            f"Tokens that spell the text's bytes are required. {_REMEDY}"
        )
    parts = [*components(spec.get("normalizer")), *components(spec.get("pre_tokenizer"))]
    decoders = [*components(spec.get("decoder"))]
    pieces = piece_ids(spec)
    if any(part["type"] == "ByteLevel" for part in parts):
        if decoders and not any(part["type"] == "ByteLevel" for part in decoders):
            raise VocabularyError(
                f"the tokenizer of {name} encodes bytes (ByteLevel) but decodes with {_names(decoders)}. "
                f"The two must agree. Repair the decoder in its tokenizer.json, or use another model."
            )
        return TokenizerKind.BYTE_LEVEL
    if _marks_spaces(parts) or _marks_spaces(decoders):
        missing = sum(byte_token(byte) not in pieces for byte in range(256))
        if missing or not model.get("byte_fallback"):
            raise VocabularyError(
                f"the tokenizer of {name} is SentencePiece-style with {256 - missing} of the 256 byte tokens and "
                f"byte_fallback={model.get('byte_fallback')!r}, so it cannot spell every text. Byte "
                f"fallback is required. {_REMEDY}"
            )
        return TokenizerKind.SENTENCEPIECE
    raise VocabularyError(
        f"the tokenizer of {name} is of an unknown kind: model {model.get('type')}, normalizer and pre-tokenizer "
        f"{_names(parts)}, decoder {_names(decoders)}. A ByteLevel pre-tokenizer, or {SPACE_MARK} for spaces with byte "
        f"fallback, is required. {_REMEDY}"
    )


def _marks_spaces(parts: list[Spec]) -> bool:
    return any(
        part["type"] == "Metaspace"
        or (part["type"] == "Replace" and SPACE_MARK in (part.get("content"), part.get("pattern", {}).get("String")))
        for part in parts
    )


def _names(parts: list[Spec]) -> str:
    return ", ".join(part["type"] for part in parts) or "none"
