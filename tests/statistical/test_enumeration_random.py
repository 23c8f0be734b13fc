"""The enumeration over everything at once: vocabularies, E, bounds, top-k, faults, early stops and cuts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from reference.enumeration import GO_ON, LAST, STOP, outcome
from reference.toy_rules import CHARACTERS, LETTERS, faulty_encoder, faulty_link, product_rule, world


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_exact_has_the_law_of_the_target(data):
    alphabet = data.draw(st.sampled_from([LETTERS, CHARACTERS]))
    toy = world(
        data.draw(st.integers(0, 2**20)),
        alphabet=alphabet,
        ends=data.draw(st.booleans()),
        top_k=data.draw(st.sampled_from([1, 2, 3, 99])),
        size=data.draw(st.integers(len(alphabet), 5)),
    )
    threshold = data.draw(st.floats(0.2, 1.0))
    decision = data.draw(st.sampled_from([STOP, LAST]))
    rule = product_rule(
        toy,
        extendable=data.draw(st.sets(st.integers(0, len(toy.draft) - 1))),
        longest_run=data.draw(st.integers(0, 3)),
        max_tokens=data.draw(st.sampled_from([1, 2, 3, 99])),
        encode=data.draw(st.sampled_from([None, faulty_encoder(toy)])),
        linked=data.draw(st.sampled_from([None, faulty_link])),
    )
    steps = data.draw(st.integers(1, 3))
    result = outcome(toy, rule, steps=steps, depth=3, stop=lambda probs: decision if probs.max() < threshold else GO_ON)
    assert result.distance < 1e-12
