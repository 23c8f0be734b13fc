"""Kinds, byte tables and exact encoding, on tokenizers built here."""

from __future__ import annotations

import pytest
from reference.vocabulary import CORPUS, byte_level, held_back, sentencepiece, word_piece

from vllm_tokentiming.errors import UnencodableTextError, VocabularyError
from vllm_tokentiming.vocabulary import TokenizerKind, Vocabulary, overlap
from vllm_tokentiming.vocabulary.utf8 import incomplete_suffix, valid_prefix

TEXTS = [
    b"",
    b" ",
    b"  leading and trailing  ",
    *(text.encode() for text in CORPUS[:8]),
    "▁ literal ▁▁ mark".encode(),
    b"<|im_end|> </s> <s> <unk> <think> <0x41>",
    b"\xff\xfe broken \xe4\xbd and \x80\x80 more",
    "e\u0301 \u212b NFC".encode(),
    b"\x00\x01\x7f control \x1f",
    b"\n\n\n\n    \n\t\t\r\n" * 3,
    bytes(range(256)),
    b"A" * 700 + " 你好".encode() * 90,
]


@pytest.fixture(scope="module", params=["byte_level", "byte_level_nfc", "no_pattern", "sentencepiece", "unigram"])
def vocabulary(request):
    tokenizer = {
        "byte_level": byte_level,
        "byte_level_nfc": lambda: byte_level(nfc=True, add_prefix_space=True),
        "no_pattern": lambda: byte_level(pattern=None),
        "sentencepiece": sentencepiece,
        "unigram": lambda: sentencepiece(unigram=True),
    }[request.param]()
    return Vocabulary.from_tokenizer(tokenizer, model_vocab_size=len(tokenizer) + 7, name=request.param)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_encoding_spells_the_text_exactly(vocabulary, text):
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert all(vocabulary.token_bytes[token] for token in ids)
    assert vocabulary.encode(text) == ids, "the cache changes nothing"
    assert vocabulary.encoder.reference(text) == ids, "seams change nothing"


def test_special_tokens_have_no_bytes_and_are_never_encoded(vocabulary):
    assert vocabulary.special_ids
    for token in vocabulary.special_ids:
        assert vocabulary.token_bytes[token] is None
        literal = vocabulary.literals[token].encode()
        ids = vocabulary.encode(b"x" + literal + b" y")
        assert token not in ids
        assert vocabulary.decode(ids) == b"x" + literal + b" y"
        if vocabulary.name != "unigram":  # whose model takes the literal for the piece, so it is spelled in bytes
            assert vocabulary.encoder._checked(b"x" + literal + b" y") == ids, "encoded as plain text, not mended"


def test_flat_tables_agree_with_the_list(vocabulary):
    assert len(vocabulary.token_bytes) == vocabulary.model_vocab_size
    assert vocabulary.byte_offsets.shape == (vocabulary.model_vocab_size + 1,)
    for token, spelled in enumerate(vocabulary.token_bytes):
        low, high = vocabulary.byte_offsets[token : token + 2]
        assert vocabulary.flat_bytes[low:high].tobytes() == (spelled or b"")


def test_ids_beyond_the_tokenizer_have_no_bytes(vocabulary):
    assert vocabulary.size == vocabulary.model_vocab_size - 7
    assert vocabulary.token_bytes[vocabulary.size :] == [None] * 7


@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_no_id_reaches_a_smaller_model_vocabulary(build):
    tokenizer = build()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, model_vocab_size=300, name="cut")
    whole = Vocabulary.from_tokenizer(tokenizer, model_vocab_size=len(tokenizer), name="whole")
    assert max(whole.encode(CORPUS[0].encode())) >= 300, "the cut is felt"
    for text in TEXTS:
        ids, covered = vocabulary.encoder.encode_prefix(text)
        assert max(ids, default=0) < 300
        assert vocabulary.decode(ids) == text[:covered]


def test_added_tokens_that_are_not_special_spell_their_literal():
    vocabulary = Vocabulary.from_tokenizer(byte_level(), model_vocab_size=700, name="b")
    think = next(token for token, literal in vocabulary.literals.items() if literal == "<think>")
    assert vocabulary.token_bytes[think] == b"<think>"
    assert think in vocabulary.encode(b"so <think> on")


def test_sentencepiece_added_tokens_in_the_vocabulary_are_spaces():
    tokenizer = sentencepiece()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, model_vocab_size=len(tokenizer), name="s")
    ids = {literal: token for token, literal in vocabulary.literals.items()}
    assert vocabulary.token_bytes[ids["\n\n"]] == b"\n\n"
    in_model = "▁▁▁▁" in tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    assert vocabulary.token_bytes[ids["▁▁▁▁"]] == (b"    " if in_model else "▁▁▁▁".encode())


def test_dummy_prefix_and_bos_stay_out_of_encodings():
    vocabulary = Vocabulary.from_tokenizer(sentencepiece(), model_vocab_size=900, name="s")
    assert vocabulary.kind is TokenizerKind.SENTENCEPIECE
    assert vocabulary.dummy_prefix == b" "
    assert vocabulary.bos_id == 1
    assert vocabulary.decode(vocabulary.encode(b"fox")) == b"fox"


def test_byte_level_has_neither_bos_nor_prefix():
    vocabulary = Vocabulary.from_tokenizer(byte_level(), model_vocab_size=900, name="b")
    assert vocabulary.kind is TokenizerKind.BYTE_LEVEL
    assert vocabulary.bos_id is None
    assert vocabulary.dummy_prefix == b""
    assert vocabulary.eos_id in vocabulary.end_ids


def test_bytes_without_a_token_cannot_be_encoded():
    vocabulary = Vocabulary.from_tokenizer(byte_level(alphabet=False), model_vocab_size=900, name="few")
    with pytest.raises(UnencodableTextError, match="0x04 at offset 9"):
        vocabulary.encode(b"The quick\x04 fox")
    assert vocabulary.decode(vocabulary.encoder.encode_prefix(b"The quick\x04 fox")[0]) == b"The quick"
    opened = vocabulary.encoder.encode_open(b"The quick\x04 fox")
    assert vocabulary.decode(opened.ids) == b"The quick fox"


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (word_piece(), "WordPiece.*BPE or Unigram is required"),
        (sentencepiece(byte_fallback=False), "byte_fallback=False"),
        (object(), "not a fast tokenizer"),
    ],
    ids=["word_piece", "no_byte_fallback", "slow"],
)
def test_tokenizers_that_lose_bytes_are_refused(tokenizer, message):
    with pytest.raises(VocabularyError, match=message):
        Vocabulary.from_tokenizer(tokenizer, model_vocab_size=300, name="refused")


def test_overlap_counts_equal_bytes():
    one = Vocabulary.from_tokenizer(byte_level(), model_vocab_size=900, name="one")
    other = Vocabulary.from_tokenizer(sentencepiece(), model_vocab_size=1200, name="other")
    expected = len([b for b in one.token_bytes if b and b in [o for o in other.token_bytes if o]])
    assert overlap(one, other) == expected > 256
    assert overlap(one, one) == sum(1 for b in one.token_bytes if b)


@pytest.mark.parametrize("char", ["a", "é", "你", "🙂", "\u0800", "\U0010ffff", "\ud7ff"])
def test_unfinished_characters_are_recognised(char):
    whole = char.encode()
    for length in range(len(whole) + 1):
        expected = length if 0 < length < len(whole) else 0
        assert incomplete_suffix(b"x " + whole[:length]) == expected == held_back(b"x " + whole[:length])
        assert valid_prefix(b"x " + whole[:length]) == 2 + (length if length == len(whole) else 0)


@pytest.mark.parametrize("end", [b"\x80", b"\xc0", b"\xff", b"\xe0\x80", b"\xed\xa0", b"\xf5", b"\xf4\x90", b"\xe4a"])
def test_ends_that_nothing_can_finish_are_not_held(end):
    assert incomplete_suffix(b"x" + end) == 0
