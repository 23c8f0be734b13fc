"""Byte tables and exact encoding of real tokenizers, against the tokenizers' own decoding of whole texts."""

from __future__ import annotations

import json

import pytest
from reference.vocabulary import CORPUS, REAL, TEXT_PARTS, real
from transformers import PreTrainedTokenizerFast

from vllm_tokentiming.errors import UnencodableTextError
from vllm_tokentiming.vocabulary import DraftContext, SpecialTokenMap, TokenizerKind, Vocabulary

pytestmark = pytest.mark.real_tokenizers

KINDS = dict.fromkeys(REAL, TokenizerKind.BYTE_LEVEL) | dict.fromkeys(["llama2", "gemma3"], TokenizerKind.SENTENCEPIECE)
# Normalizers that change text by design: what their own decoding gives back is not what went in.
LOSSY = {"claude"}
# Trained with an alphabet that has not all bytes.
LACKS_BYTES = {"smollm2-135m-instruct"}


@pytest.fixture(params=REAL)
def name(request):
    return request.param


def test_kind(tokenizer_folder, name):
    assert real(tokenizer_folder(name)).kind is KINDS[name]


@pytest.mark.parametrize("text", [*TEXT_PARTS, "".join(TEXT_PARTS)], ids=range(len(TEXT_PARTS) + 1))
def test_round_trip(tokenizer_folder, name, text):
    vocabulary = real(tokenizer_folder(name))
    ids = vocabulary.encode(text.encode())
    assert vocabulary.decode(ids) == text.encode()
    assert ids == vocabulary.encoder.reference(text.encode())
    assert all(vocabulary.token_bytes[token] for token in ids)


def test_every_single_byte_can_be_written(tokenizer_folder, name):
    vocabulary = real(tokenizer_folder(name))
    written = bytes(byte for byte in range(256) if bytes([byte]) in vocabulary.token_bytes)
    assert vocabulary.decode(vocabulary.encode(written * 2)) == written * 2
    assert (len(written) == 256) == (name not in LACKS_BYTES)
    for byte in set(range(256)) - set(written):
        with pytest.raises(UnencodableTextError, match=f"byte 0x{byte:02X} .*lacks a token"):
            vocabulary.encode(bytes([byte]))


def test_bytes_agree_with_the_tokenizers_own_decoding(tokenizer_folder, name):
    """Of the file as it is, and of texts, not of single tokens, whose decoding loses bytes."""
    folder = tokenizer_folder(name)
    vocabulary = real(folder)
    own = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text in CORPUS[:8]:
        ids = own(text, add_special_tokens=False)["input_ids"]
        prefix = b" " if vocabulary.dummy_prefix else b""
        decoded = own.decode(ids, clean_up_tokenization_spaces=False).encode()
        assert vocabulary.decode(ids) == prefix + decoded


def test_a_context_is_what_the_tokenizer_makes_of_the_text(tokenizer_folder, name):
    if name in LOSSY:
        pytest.skip("normalises text, which a context must not")
    folder = tokenizer_folder(name)
    draft = real(folder)
    target = real(tokenizer_folder("qwen3"))
    own = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    spec = json.loads((folder / "tokenizer.json").read_text())
    live_differs = name == "gpt4o"  # loaded with the pattern of its class, GPT-2, not of its file
    for text in CORPUS[:6]:
        context = DraftContext(target, draft, SpecialTokenMap.build(target, draft, ()))
        for token in target.encode(text.encode()):
            context.commit([token])
        assert draft.decode(context.ids) == draft.first_text(text.encode())
        if not live_differs:
            expected = own(text)["input_ids"]
            assert context.ids == expected, spec["pre_tokenizer"]


def test_a_tokenizer_rebuilt_against_its_vocabulary_is_read_from_its_file(tokenizer_folder, caplog):
    folder = tokenizer_folder("deepseek_v3")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if "ByteLevel" in tokenizer.backend_tokenizer.pre_tokenizer.__getstate__().decode():
        pytest.skip("this transformers loads it as it is")
    vocabulary = Vocabulary.from_tokenizer(tokenizer, model_vocab_size=len(tokenizer), name="deepseek")
    assert vocabulary.kind is TokenizerKind.BYTE_LEVEL
    assert "the file is used" in caplog.text
