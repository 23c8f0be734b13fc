"""Many chunks encoded in one call equal each encoded alone, and compiled links equal the plain certificate.

``TOKENTIMING_FUZZ`` multiplies the number of random examples.
"""

from __future__ import annotations

import itertools
import os
import random

import numpy as np
import pytest
from reference.vocabulary import REAL, TEXT_PARTS, TINY, byte_level, real, tiny
from tokenizers import AddedToken

from vllm_tokentiming.pair import Pair
from vllm_tokentiming.vocabulary import ProxyTokenizer, SpecialTokenMap, Vocabulary

FUZZ = int(os.environ.get("TOKENTIMING_FUZZ", "1"))
TEXT = (
    "def main(argv: list[str]) -> int:\n    return len(argv)  # naïve 你好，世界。 안녕하세요 😀\n\n\n"
    "It's the user's <think>x</think> 3.14, 1234567890; final_encoder pop_position [x for x in a.b(c)] "
    "Internationalisation of antidisestablishmentarianism.\r\n\tSchöne Grüße aus Köln <|im_end|> ▁▁▁▁ <0x0A> éé  "
)


def runs_and_lasts(draft, rng, *, count):
    """Runs as drafts have them, from text and at random, each with last tokens of all kinds."""
    text_ids = draft.encoder.reference("".join([TEXT, *TEXT_PARTS]).encode())
    special = [*draft.special_ids, draft.model_vocab_size - 1]
    for _ in range(count):
        length, at = rng.randint(0, 4), rng.randrange(len(text_ids))
        run = tuple(text_ids[at : at + length])
        if rng.random() < 0.3:
            run = tuple(rng.randrange(draft.model_vocab_size) for _ in range(length))
        lasts = {text_ids[(at + length) % len(text_ids)], *rng.choices(text_ids, k=12), rng.choice(special)}
        lasts |= {rng.randrange(draft.model_vocab_size) for _ in range(20)}
        yield run, sorted(lasts)


def check(target, draft, *, count):
    special_map = SpecialTokenMap.build(target, draft, ())
    pair = Pair(target, draft, special_map, window_radius=8)
    rng = random.Random(target.name + draft.name)
    alone = ProxyTokenizer(target, draft, special_map)
    for run, lasts in runs_and_lasts(draft, rng, count=count):
        expected = [alone.encode_chunk(run, last) for last in lasts]
        assert pair.proxy_tokenizer.encode_chunks(run, lasts) == expected, (run, lasts)


@pytest.mark.parametrize(("target", "draft"), list(itertools.product(TINY, repeat=2)))
def test_chunks_of_tiny_vocabularies(target, draft):
    check(tiny(target), tiny(draft), count=100 * FUZZ)


@pytest.mark.real_tokenizers
@pytest.mark.parametrize("draft", ["qwen3", "llama2"])
@pytest.mark.parametrize("target", REAL)
def test_chunks_of_real_vocabularies(tokenizer_folder, target, draft):
    check(real(tokenizer_folder(target)), real(tokenizer_folder(draft)), count=200 * FUZZ)


@pytest.mark.parametrize(("target", "draft"), [("byte_level", "sentencepiece"), ("sentencepiece", "byte_level")])
def test_links_are_those_of_the_alignment_where_the_bytes_agree(target, draft):
    target, draft = tiny(target), tiny(draft)
    pair = Pair(target, draft, SpecialTokenMap.build(target, draft, ()), window_radius=8)
    rng = random.Random(0)
    seen = set()
    for run, lasts in runs_and_lasts(draft, rng, count=150):
        for last in lasts:
            drafted = [*run, last]
            proxies = list(pair.proxy_tokenizer.encode_chunk(run, last))
            if rng.random() < 0.4:  # a wrong encoding
                proxies.insert(rng.randint(0, len(proxies)), rng.randrange(target.size))
            if rng.random() < 0.2:
                proxies = proxies[:-1]
            same = target.decode(proxies) == draft.decode(drafted)
            (aligned,) = pair.last_draft_index([drafted], [proxies])
            expected = [same and index == len(run) for index in aligned]
            offsets = [np.array([0, len(ids)], dtype=np.int32) for ids in (drafted, proxies)]
            ids = [np.array(ids, dtype=np.int32) for ids in (drafted, proxies)]
            assert pair.aligner.links(ids[0], offsets[0], ids[1], offsets[1]).tolist() == expected
            seen |= {(same, link) for link in expected}
    assert seen == {(True, True), (True, False), (False, False)}


def check_words(vocabulary):
    encoder, rng = vocabulary.encoder, random.Random(vocabulary.name)
    assert encoder._space_mark is not None, "words take the slow way"
    bare = encoder._tokenizer
    for _ in range(2000 * FUZZ):
        letters = rng.choices("etaoinshrdlucmfwypvbgkqjxz", k=rng.randint(1, 12))
        word = rng.choice(["", " "]) + rng.choice(["", rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ")]) + "".join(letters)
        assert encoder._plain(word) == bare.encode(word, add_special_tokens=False).ids, word


@pytest.mark.parametrize("name", TINY)
def test_words_of_tiny_vocabularies(name):
    check_words(tiny(name))


@pytest.mark.real_tokenizers
@pytest.mark.parametrize("name", REAL)
def test_words_of_real_vocabularies(tokenizer_folder, name):
    check_words(real(tokenizer_folder(name)))


def test_words_go_through_the_tokenizer_where_it_cuts_them_or_knows_some_by_name():
    named = byte_level()
    named.add_tokens([AddedToken("ick", normalized=False)])
    cutting = byte_level(pattern=r"[a-z]{1,3}|.")
    for tokenizer, text in ((named, b" quick brown"), (cutting, b"jumps over")):
        vocabulary = Vocabulary.from_tokenizer(tokenizer, model_vocab_size=len(tokenizer), name="odd")
        assert vocabulary.encoder._space_mark is None
        assert vocabulary.encode(text) == vocabulary.encoder.reference(text)
