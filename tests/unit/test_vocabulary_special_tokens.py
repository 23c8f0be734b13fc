"""Special tokens of two vocabularies, paired by literal, role and configuration."""

from __future__ import annotations

import pytest
from reference.vocabulary import byte_level, sentencepiece
from tokenizers import processors

from vllm_tokentiming.errors import ConfigError
from vllm_tokentiming.vocabulary import SpecialTokenMap, Vocabulary


@pytest.fixture(scope="module")
def byte_vocabulary():
    return Vocabulary.from_tokenizer(byte_level(), model_vocab_size=700, name="byte")


@pytest.fixture(scope="module")
def piece_vocabulary():
    return Vocabulary.from_tokenizer(sentencepiece(), model_vocab_size=1200, name="piece")


def _ids(vocabulary):
    return {literal: token for token, literal in vocabulary.literals.items()}


def test_equal_literals_are_paired(byte_vocabulary):
    special = SpecialTokenMap.build(byte_vocabulary, byte_vocabulary, ())
    assert special.target_to_draft == {token: token for token in byte_vocabulary.special_ids}
    assert special.draft_to_target == special.target_to_draft
    assert special.shown == {}


def test_a_literal_that_is_text_on_one_side_is_not_paired(byte_vocabulary, piece_vocabulary):
    text, special = _ids(byte_vocabulary)["<s>"], _ids(piece_vocabulary)["<s>"]
    assert byte_vocabulary.token_bytes[text] == b"<s>"
    assert special not in SpecialTokenMap.build(byte_vocabulary, piece_vocabulary, ()).draft_to_target
    assert text not in SpecialTokenMap.build(piece_vocabulary, byte_vocabulary, ()).draft_to_target


def test_a_drafts_only_end_proposes_the_end_that_the_target_uses(byte_vocabulary, piece_vocabulary):
    target, draft = _ids(byte_vocabulary), _ids(piece_vocabulary)
    special = SpecialTokenMap.build(byte_vocabulary, piece_vocabulary, ())
    assert byte_vocabulary.eos_id == target["<|im_end|>"]
    assert special.draft_to_target == {draft["</s>"]: target["<|im_end|>"]}
    assert special.target_to_draft == {target["<|endoftext|>"]: draft["</s>"], target["<|im_end|>"]: draft["</s>"]}
    assert special.literal(target["<|im_start|>"]) == b"<|im_start|>"
    assert special.literal(10**6) == b""


def test_a_beginning_is_never_shown_or_proposed(byte_vocabulary, piece_vocabulary):
    special = SpecialTokenMap.build(piece_vocabulary, byte_vocabulary, ())
    begin = _ids(piece_vocabulary)["<s>"]
    assert begin not in special.target_to_draft
    assert special.literal(begin) == b""
    same = SpecialTokenMap.build(piece_vocabulary, piece_vocabulary, ())
    assert begin not in same.target_to_draft
    assert begin not in same.draft_to_target


def test_a_beginning_is_shown_to_a_draft_that_knows_it_but_puts_none(piece_vocabulary):
    tokenizer = sentencepiece()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    draft = Vocabulary.from_tokenizer(tokenizer, model_vocab_size=1200, name="without")
    assert draft.bos_id is None
    begin = _ids(piece_vocabulary)["<s>"]
    assert SpecialTokenMap.build(piece_vocabulary, draft, ()).target_to_draft[begin] == begin


def test_a_configured_second_beginning_is_ignored(piece_vocabulary):
    begin = _ids(piece_vocabulary)["<s>"]
    special = SpecialTokenMap.build(piece_vocabulary, piece_vocabulary, (("<s>", "<s>"),))
    assert begin not in special.target_to_draft
    assert begin not in special.draft_to_target


def test_configured_pairs_win(byte_vocabulary, piece_vocabulary):
    target, draft = _ids(byte_vocabulary), _ids(piece_vocabulary)
    special = SpecialTokenMap.build(byte_vocabulary, piece_vocabulary, (("<|im_end|>", "</s>"),))
    assert special.draft_to_target[draft["</s>"]] == target["<|im_end|>"]


@pytest.mark.parametrize("pair", [("<|im_edn|>", "</s>"), ("<|im_end|>", "</S>")])
def test_unknown_configured_literals_are_errors(byte_vocabulary, piece_vocabulary, pair):
    with pytest.raises(ConfigError, match=r"not an added token of .*Did you mean"):
        SpecialTokenMap.build(byte_vocabulary, piece_vocabulary, (pair,))


def test_tokens_beyond_the_models_are_not_paired(byte_vocabulary):
    cut = Vocabulary.from_tokenizer(byte_level(), model_vocab_size=578, name="cut")
    special = SpecialTokenMap.build(cut, byte_vocabulary, ())
    assert special.draft_to_target == {}
    assert special.target_to_draft == {}
