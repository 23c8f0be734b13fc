"""What E learns from committed text, compiled, equals the plain count; boundaries are where both texts have an end."""

from __future__ import annotations

import random

import numpy as np
import pytest
from reference.vocabulary import CORPUS, tiny

from vllm_tokentiming.alignment.spelling import common_ends
from vllm_tokentiming.pair import BoundaryObserver, Pair
from vllm_tokentiming.transfer.chunk_kernel import IN_E, pending_after
from vllm_tokentiming.transfer.extendable import ExtendableSet
from vllm_tokentiming.vocabulary import DraftContext, SpecialTokenMap

TOKENS = (b"", b"a", b"b", b"ab", b"\xc3", b"\xa9", b"a\xc3", b"\xe4", b"\xbd", b"\xa0", b"\xf0\x9f", b"\x98\x80", b" ")


class PlainCounts:
    def __init__(self, prior, traits, *, threshold, strength):
        self.counts = {token: [strength, float(p) * strength] for token, p in enumerate(prior)}
        self.traits = traits.tolist()
        self.threshold = threshold

    def observe(self, ids, is_boundary):
        # Traits beside membership never change, so what was pending can be told from any snapshot's.
        pending = 0
        for token, boundary in zip(ids, is_boundary, strict=True):
            trait = self.traits[token]
            pending = pending_after(pending, trait) if trait > IN_E else 0
            if not pending and TOKENS[token]:
                counts = self.counts[token]
                counts[0] += 1
                counts[1] += not boundary
                self.traits[token] = (trait & ~IN_E) | (IN_E if counts[1] > self.threshold * counts[0] else 0)


@pytest.mark.parametrize("seed", range(20))
def test_counts_equal_the_plain_ones(seed):
    rng = random.Random(seed)
    prior = np.array([rng.choice((0.0, 0.2, 0.3, 0.5, 1.0)) for _ in TOKENS])
    learnt = ExtendableSet(prior, TOKENS, threshold=0.3, strength=2.0)
    plain = PlainCounts(prior, learnt.snapshot().traits, threshold=0.3, strength=2.0)
    changes = 0
    for _ in range(60):
        ids = rng.choices(range(len(TOKENS)), k=rng.randint(0, 12))
        ends = [rng.random() < 0.6 for _ in ids]
        before = learnt.snapshot()
        kept = before.traits.copy()
        learnt.observe(ids, ends)
        plain.observe(ids, ends)
        assert learnt.snapshot().traits.tolist() == plain.traits
        assert before.traits.tolist() == kept.tolist(), "a snapshot was written to"
        changes += learnt.snapshot() is not before
    assert changes


class Recorder:
    def __init__(self):
        self.seen = []

    def observe(self, ids, is_boundary):
        self.seen += zip(ids.tolist(), is_boundary.tolist(), strict=True)


@pytest.mark.parametrize(("target", "draft"), [("byte_level", "sentencepiece"), ("sentencepiece", "byte_level")])
@pytest.mark.parametrize("seed", range(5))
def test_boundaries_are_where_both_texts_have_an_end(target, draft, seed):
    target, draft = tiny(target), tiny(draft)
    pair = Pair(target, draft, SpecialTokenMap.build(target, draft, ()), window_radius=8)
    rng = random.Random(seed)
    text = "\n".join(rng.sample(CORPUS, len(CORPUS))).encode()
    ids = target.encode(text)
    context = DraftContext(target, draft, pair.special_tokens)
    recorder = Recorder()
    observer = BoundaryObserver(pair.shown_bytes(), recorder)
    before, start, pieces = 0, 0, 0
    for token in ids:
        context.commit([token])
        observer.commit([token], context)
        if not observer._pending:
            # Counted from the front of the text, where the observer counts from its end.
            shift = len(draft.decode(context.ids)) - len(target.decode(ids[: context.num_target_tokens]))
            target_ends = {shift + len(target.decode(ids[:n])) for n in range(start, context.num_target_tokens + 1)}
            draft_ends = [len(draft.decode(context.ids[: n + 1])) for n in range(len(context.ids))]
            expected = [
                (token, end in target_ends)
                for token, end, data in zip(
                    context.ids, draft_ends, map(draft.decode, ([i] for i in context.ids)), strict=True
                )
                if data and end - len(data) >= min(target_ends) and end < draft_ends[-1]
            ]
            # Twice as many draft tokens as target tokens are looked at, without the last.
            expected = expected[1 - 2 * (context.num_target_tokens - start) :]
            assert recorder.seen[before:] == expected
            before, start, pieces = len(recorder.seen), context.num_target_tokens, pieces + 1
    assert pieces > 1
    assert {True, False} == {end for _, end in recorder.seen}


def table(*tokens):
    offsets = np.cumsum([0, *map(len, tokens)], dtype=np.int32)
    return np.frombuffer(bytearray(b"".join(tokens)), dtype=np.uint8), offsets


@pytest.mark.parametrize(
    ("draft", "target", "first", "expected"),
    [
        ([b"a", b"b", b"c"], [b"ab", b"c"], 0, [False, True, True]),
        ([b"ab", b"c"], [b"b", b"c"], 1, [True]),
        # They differ, or one has more than the other.
        ([b"a", b"x", b"c"], [b"a", b"b", b"c"], 2, [True]),
        ([b"a", b"b"], [b"x", b"a", b"b"], 0, [True, True]),
        # Tokens without bytes on both sides, on one, and inside a token of the other.
        ([b"a", b"", b"b"], [b"a", b"", b"b"], 0, [True, True, True]),
        ([b"a", b"", b"b"], [b"a", b"b"], 2, [True]),
        ([b"a", b"b"], [b"a", b"", b"b"], 1, [True]),
        ([b"a", b"", b"b"], [b"ab"], 2, [True]),
        ([b""], [], 1, []),
        ([], [b"a"], 0, []),
    ],
)
def test_common_ends(draft, target, first, expected):
    ends = np.zeros(len(draft), dtype=np.bool_)
    sides = [np.arange(len(side), dtype=np.int32) for side in (draft, target)]
    assert common_ends(*table(*draft), *table(*target), *sides, ends) == first
    assert ends[first:].tolist() == expected
