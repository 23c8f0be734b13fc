"""Proxy tokens spell the drafted text exactly, are real target tokens, and stop where they must."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.vocabulary import REAL, TEXT_PARTS, TINY, paired, real, tiny

from vllm_tokentiming.vocabulary import ProxyTokenizer, SpecialTokenMap

FUZZ = int(os.environ.get("TOKENTIMING_FUZZ", "1"))


def _literal_ids(vocabulary):
    return {literal: token for token, literal in vocabulary.literals.items()}


@pytest.fixture(scope="module")
def pair():
    target, draft = tiny("byte_level"), tiny("sentencepiece")
    return target, draft, ProxyTokenizer(target, draft, paired(target, draft))


def test_a_draft_is_encoded_as_one_text(pair):
    target, draft, tokenizer = pair
    text = b" quick brown fox"
    drafted = [token for word in (b" qu", b"ick", b" bro", b"wn", b" fox") for token in draft.encode(word)]
    assert tokenizer.proxy(drafted) == target.encode(text)


def test_an_unfinished_character_is_left_out(pair):
    target, draft, tokenizer = pair
    drafted = draft.encode(b" fox ") + [draft.encoder._byte_ids[byte] for byte in "🙂".encode()[:3]]
    assert target.decode(tokenizer.proxy(drafted)) == b" fox "


def test_nothing_follows_an_invalid_character(pair):
    target, draft, tokenizer = pair
    drafted = [*draft.encode(b"fox"), draft.encoder._byte_ids[128], *draft.encode(b" dog")]
    assert target.decode(tokenizer.proxy(drafted)) == b"fox"
    end = _literal_ids(draft)["</s>"]
    assert tokenizer.proxy([draft.encoder._byte_ids[0xE4], end]) == []


def test_the_drafts_end_is_the_targets_end_and_the_last(pair):
    target, draft, tokenizer = pair
    end = _literal_ids(draft)["</s>"]
    proxy = tokenizer.proxy([*draft.encode(b"fox"), end, *draft.encode(b" dog")])
    assert proxy == [*target.encode(b"fox"), _literal_ids(target)["<|im_end|>"]]


def test_a_special_token_without_counterpart_cuts(pair):
    target, draft, tokenizer = pair
    unknown = _literal_ids(draft)["<unk>"]
    assert tokenizer.proxy([*draft.encode(b"fox"), unknown, *draft.encode(b" dog")]) == target.encode(b"fox")
    assert tokenizer.proxy([draft.bos_id, *draft.encode(b"fox")]) == []
    assert tokenizer.proxy([-1, *draft.encode(b"fox")]) == []
    assert tokenizer.proxy([10**7]) == []
    assert tokenizer.proxy([]) == []


def test_paired_special_tokens_that_end_nothing_go_on():
    target, draft = tiny("byte_level"), tiny("few_bytes")
    tokenizer = ProxyTokenizer(target, draft, paired(target, draft))
    start, expected = _literal_ids(draft)["<|im_start|>"], _literal_ids(target)["<|im_start|>"]
    proxy = tokenizer.proxy([*draft.encode(b"the"), start, *draft.encode(b"fox")])
    assert proxy == [*target.encode(b"the"), expected, *target.encode(b"fox")]


def test_text_that_the_target_cannot_write_is_left_out():
    target, draft = tiny("few_bytes"), tiny("byte_level")
    tokenizer = ProxyTokenizer(target, draft, paired(target, draft))
    drafted = draft.encode(b"the dog\x04 sleeps")
    assert target.decode(tokenizer.proxy(drafted)) == b"the dog"
    assert tokenizer.encode_chunk(tuple(drafted[:-1]), drafted[-1]) == ()


def test_configured_pairs_reach_the_proposal():
    target, draft = tiny("byte_level"), tiny("sentencepiece")
    special_map = SpecialTokenMap.build(target, draft, (("<|im_end|>", "</s>"),))
    proxy = ProxyTokenizer(target, draft, special_map).proxy([_literal_ids(draft)["</s>"]])
    assert proxy == [_literal_ids(target)["<|im_end|>"]]


def test_chunks(pair):
    target, draft, tokenizer = pair
    *run, last = draft.encode(b" quick")
    end, unknown = _literal_ids(draft)["</s>"], _literal_ids(draft)["<unk>"]
    half = draft.encoder._byte_ids[0xE4]
    assert tokenizer.encode_chunk(tuple(run), last) == tuple(target.encode(b" quick"))
    assert tokenizer.encode_chunk((), end) == (_literal_ids(target)["<|im_end|>"],)
    assert tokenizer.encode_chunk((last,), end)[-1] == _literal_ids(target)["<|im_end|>"]
    assert tokenizer.encode_chunk((last,), unknown) == ()
    assert tokenizer.encode_chunk((end,), last) == ()
    assert tokenizer.encode_chunk((unknown,), last) == ()
    assert tokenizer.encode_chunk((), half) == ()
    assert tokenizer.encode_chunk((half,), end) == ()
    assert tokenizer.encode_chunk((half,), last) == ()
    assert tokenizer.encode_chunk((), -1) == ()
    assert tokenizer.encode_chunk((-1,), last) == ()
    assert tokenizer.encode_chunk((), 10**7) == ()


def _spelled_until_it_must_stop(target, draft, special_map, drafted):
    """What a proposal has to spell, token by token: text, and specials as their target ids."""
    spelled, run = [], b""

    def flush():
        whole = b""
        for char in run.decode(errors="surrogateescape"):
            raw = char.encode(errors="surrogateescape")
            if "\udc80" <= char <= "\udcff" or target.encoder.encode_prefix(raw)[1] < len(raw):
                spelled.append(whole)
                return False
            whole += raw
        spelled.append(whole)
        return True

    for token in drafted:
        piece = draft.token_bytes[token] if 0 <= token < draft.model_vocab_size else None
        if piece is not None:
            run += piece
            continue
        complete, run = flush(), b""
        if not complete or token not in special_map.draft_to_target:
            return spelled
        spelled.append(special_map.draft_to_target[token])
        if token in draft.end_ids:
            return spelled
    flush()
    return spelled


@st.composite
def drafts(draw, draft):
    data = draw(st.sampled_from(["", " ", "\n"])).join(draw(st.lists(st.sampled_from(TEXT_PARTS), max_size=2))).encode()
    low = draw(st.integers(0, len(data)))
    ids = draft.encoder.encode_open(data[low : low + draw(st.integers(0, 60))]).ids
    special = sorted(token for token in draft.special_ids if token < draft.model_vocab_size)[:20]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(ids)))
        ids.insert(at, draw(st.one_of(st.integers(0, draft.model_vocab_size - 1), st.sampled_from(special))))
    return ids


def check_draft(target, draft, drafted):
    special_map = paired(target, draft)
    tokenizer = ProxyTokenizer(target, draft, special_map)
    proxy = tokenizer.proxy(drafted)
    assert all(0 <= token < min(target.size, target.model_vocab_size) for token in proxy)
    expected = _spelled_until_it_must_stop(target, draft, special_map, drafted)
    joined = b"".join(b"\xff%d\xff" % part if isinstance(part, int) else part for part in expected)
    found = b"".join(
        b"\xff%d\xff" % token if target.token_bytes[token] is None else target.token_bytes[token] for token in proxy
    )
    assert found == joined
    found.replace(b"\xff", b"").decode()
    if drafted:
        chunk = tokenizer.encode_chunk(tuple(drafted[:-1]), drafted[-1])
        assert chunk in ((), tuple(proxy))
        if all(draft.token_bytes[token] is not None for token in drafted) and target.decode(proxy) == draft.decode(
            drafted
        ):
            assert chunk == tuple(proxy)


@pytest.mark.parametrize(("target", "draft"), list(itertools.product(TINY, TINY)))
@settings(max_examples=25 * FUZZ, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_tiny_pairs(target, draft, data):
    target, draft = tiny(target), tiny(draft)
    check_draft(target, draft, data.draw(drafts(draft)))


@pytest.mark.real_tokenizers
@pytest.mark.parametrize(("target", "draft"), list(itertools.permutations(REAL, 2)))
@settings(max_examples=8 * FUZZ, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_real_pairs(tokenizer_folder, target, draft, data):
    target, draft = real(tokenizer_folder(target)), real(tokenizer_folder(draft))
    check_draft(target, draft, data.draw(drafts(draft)))
