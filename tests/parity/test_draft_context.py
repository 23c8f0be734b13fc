"""The incremental draft context equals the encoding of the whole text from scratch, after every commit.

``TOKENTIMING_FUZZ`` multiplies the number of random examples.
"""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.vocabulary import REAL, TEXT_PARTS, TINY, context_from_scratch, paired, real, tiny

from vllm_tokentiming.vocabulary import DraftContext

FUZZ = int(os.environ.get("TOKENTIMING_FUZZ", "1"))


@st.composite
def target_streams(draw, target):
    """Target ids as they may come: texts, cut anywhere, random and special ids, ids of nothing; in random commits."""
    ids = []
    special = sorted(token for token in target.special_ids if token < target.model_vocab_size)[:20]
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(
            st.sampled_from(["text", "text", "text", "cut", "joined", "random", "special", "nothing", "unicode"])
        )
        if kind == "text":
            ids += target.encoder.encode_open(draw(st.sampled_from(TEXT_PARTS)).encode()).ids
        elif kind == "cut":
            data = draw(st.sampled_from(TEXT_PARTS)).encode()
            low = draw(st.integers(0, len(data)))
            ids += target.encoder.encode_open(data[low : draw(st.integers(low, len(data)))]).ids
        elif kind == "joined":
            parts = draw(st.lists(st.sampled_from(TEXT_PARTS), min_size=2, max_size=4))
            ids += target.encoder.encode_open(draw(st.sampled_from(["", " ", "\n"])).join(parts).encode()).ids
        elif kind == "random":
            ids += draw(st.lists(st.integers(0, target.model_vocab_size - 1), max_size=12))
        elif kind == "special" and special:
            ids.append(draw(st.sampled_from(special)))
        elif kind == "nothing":
            ids += draw(st.sampled_from([[-1], [target.model_vocab_size], [target.model_vocab_size - 1], []]))
        else:
            ids += target.encoder.encode_open(draw(st.text(max_size=20)).encode(errors="replace")).ids
    commits, rest = [], ids
    while rest:
        size = draw(st.sampled_from([1, 1, 2, 3, 5, 20, 200]))
        commits.append(rest[:size])
        rest = rest[size:]
    return commits


def check_stream(target, draft, commits):
    special_map = paired(target, draft)
    context = DraftContext(target, draft, special_map)
    committed = []
    for new in commits:
        before = list(context.ids)
        context.commit(new)
        committed += new
        expected, held = context_from_scratch(target, draft, special_map, committed)
        assert context.ids == expected
        assert context.ends_inside_character == (held > 0)
        assert context.num_target_tokens == len(committed)
        assert context.num_stable <= min(len(before), len(context.ids))
        assert context.ids[: context.num_stable] == before[: context.num_stable]
        assert all(0 <= token < draft.model_vocab_size for token in context.ids)
        if draft.bos_id is not None:
            assert context.ids[0] == draft.bos_id
            assert context.ids.count(draft.bos_id) == 1


@pytest.mark.parametrize(("target", "draft"), list(itertools.product(TINY, TINY)))
@settings(max_examples=25 * FUZZ, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_tiny_pairs(target, draft, data):
    target, draft = tiny(target), tiny(draft)
    check_stream(target, draft, data.draw(target_streams(target)))


def test_an_added_token_stays_whole_beside_a_character_that_cannot_be_written():
    """The draft has "<think>", but no token for ">" alone."""
    target, draft = tiny("byte_level"), tiny("few_bytes")
    (think,) = draft.encode(b"<think>")
    for before in (b">", b"> ", b"<think>>"):
        ids = target.encode(before + b"<think>")
        check_stream(target, draft, [[token] for token in ids])
        context = DraftContext(target, draft, paired(target, draft))
        context.commit(ids)
        assert context.ids[-1] == think


@pytest.mark.real_tokenizers
@pytest.mark.parametrize(("target", "draft"), [*list(itertools.permutations(REAL, 2)), ("qwen3", "qwen3")])
@settings(max_examples=4 * FUZZ, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_real_pairs(tokenizer_folder, target, draft, data):
    target, draft = real(tokenizer_folder(target)), real(tokenizer_folder(draft))
    check_stream(target, draft, data.draw(target_streams(target)))


@pytest.mark.real_models
@settings(max_examples=10 * FUZZ, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_models_whose_draft_lacks_bytes(model_folder, data):
    target, draft = real(model_folder("qwen2.5-coder-1.5b-instruct")), real(model_folder("smollm2-135m-instruct"))
    check_stream(target, draft, data.draw(target_streams(target)))


SEAMLESS = {
    "letters": "a" * 3000,
    "thai": "สวัสดีครับผมชื่อสมชายยินดีที่ได้รู้จัก" * 30,
    "cjk": "天地玄黄宇宙洪荒日月盈昃辰宿列张" * 60,
    "digits": "31415926535897932384626433832795" * 60,
    "spaces": " " * 3000,
    "apostrophes": "don't'll've" * 200,
}


@pytest.mark.parametrize("text", SEAMLESS.values(), ids=SEAMLESS)
@pytest.mark.parametrize("draft", TINY)
def test_a_commit_never_encodes_the_whole_text(monkeypatch, draft, text):
    target, draft = tiny("sentencepiece"), tiny(draft)
    context = DraftContext(target, draft, paired(target, draft))
    encode_open, longest = draft.encoder.encode_open, 0

    def spy(data):
        nonlocal longest
        longest = max(longest, len(data))
        return encode_open(data)

    ids = target.encode(("Once upon a time. " * 300 + text).encode())
    context.commit(ids[:1000])
    monkeypatch.setattr(draft.encoder, "encode_open", spy)
    for start in range(1000, len(ids), 3):
        context.commit(ids[start : start + 3])
    assert longest < 2200
    assert context.ids == context_from_scratch(target, draft, paired(target, draft), ids)[0]


def _no_token_is_cut(vocabulary, *, step):
    cut = []
    for token in range(0, vocabulary.model_vocab_size, step):
        spelled = vocabulary.token_bytes[token]
        if spelled and len(spelled) > 1 and vocabulary.encoder.reference(spelled) == [token]:
            seams = vocabulary.encoder.seams
            if seams.split(spelled) != [spelled] or seams.last_fine(spelled):
                cut.append(spelled)
    assert cut == []


@pytest.mark.parametrize("name", TINY)
def test_seams_cut_no_token(name):
    _no_token_is_cut(tiny(name), step=1)


def test_tokens_across_spaces_take_the_seams_away():
    vocabulary = tiny("no_pattern")
    across = [token for token in vocabulary.token_bytes if token and b"e " in token and b" " not in token[:1]]
    assert across, "this tokenizer does join words"
    assert vocabulary.encoder.seams.split(b"the fox") == [b"the fox"]
    assert tiny("byte_level").encoder.seams.split(b"the fox") == [b"the", b" fox"]


@pytest.mark.real_tokenizers
@pytest.mark.parametrize("name", REAL)
def test_seams_cut_no_token_of_real_vocabularies(tokenizer_folder, name):
    _no_token_is_cut(real(tokenizer_folder(name)), step=7)
