"""What E learns from committed text, compiled, equals the plain count; boundaries are where both texts have an end."""

from __future__ import annotations

import random

import numpy as np
import pytest
from reference.vocabulary import CORPUS, tiny

from vllm_tokentiming.pair import BoundaryObserver, Pair
from vllm_tokentiming.transfer.chunk_kernel import IN_E, pending_after
from vllm_tokentiming.transfer.extendable import ExtendableSet
from vllm_tokentiming.vocabulary import SpecialTokenMap

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


def test_boundaries_are_where_both_texts_have_an_end():
    target, draft = tiny("byte_level"), tiny("sentencepiece")
    pair = Pair(target, draft, SpecialTokenMap.build(target, draft, ()), window_radius=8)
    seen = []

    class Recorder:
        def observe(self, ids, is_boundary):
            seen.append((list(ids), [bool(end) for end in is_boundary]))

    observer = BoundaryObserver(pair, Recorder())
    text = CORPUS[1].encode()
    ids = target.encode(text)
    observer._observe([target.token_bytes[token] for token in ids])
    ((drafted, is_boundary),) = seen
    ends = {len(target.decode(ids[: place + 1])) for place in range(len(ids))}
    assert drafted == draft.encode(text)[:-1]
    assert is_boundary == [len(draft.decode(drafted[: place + 1])) in ends for place in range(len(drafted))]
    assert {True, False} == set(is_boundary)
