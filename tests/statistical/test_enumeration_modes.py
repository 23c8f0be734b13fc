"""The other transfers under the same enumeration: point masses, TLI and SLEM are exact, two tempting rules are not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from reference.enumeration import World, outcome
from reference.retokenising_rules import aligned_table_rule, paper_rule, point_mass_rule
from reference.toy_rules import CHARACTERS, LETTERS, rows_of, world

from vllm_tokentiming.transfer.chunks import ChunkTable
from vllm_tokentiming.transfer.extendable import Extendable
from vllm_tokentiming.transfer.interface import Draft
from vllm_tokentiming.transfer.special_cases import point_law, shared_law, slem_transfer, tli_transfer

EXACT = 1e-12


class SharedTokensWorld(World):
    """A draft that draws from the tokens that both vocabularies share."""

    @property
    def target_of_draft(self):
        table = [self.target.index(token) if token and token in self.target else -1 for token in self.draft]
        if self.draft_end >= 0:
            table[self.draft_end] = self.target_end
        return np.array(table, dtype=np.int32)

    def draft_law(self, context):
        ids, probs = super().draft_law(context)
        restricted = shared_law(ids, probs, self.target_of_draft)
        assert restricted is not None
        return ids, restricted


class GreedyWorld(World):
    def draft_law(self, context):
        ids, _ = super().draft_law(context)
        return ids[:1], np.ones(1)


def as_kind(toy, kind):
    return kind(**{f.name: getattr(toy, f.name) for f in dataclasses.fields(World)})


@pytest.mark.parametrize("alphabet", [LETTERS, CHARACTERS], ids=["letters", "split-characters"])
@pytest.mark.parametrize("ends", [False, True], ids=["endless", "ends"])
def test_tli_has_the_law_of_the_target(alphabet, ends):
    for seed in range(4):
        toy = as_kind(world(seed, alphabet=alphabet, ends=ends), SharedTokensWorld)
        transfer = tli_transfer(
            toy.target_of_draft,
            target_vocab_size=len(toy.target),
            end_ids_in_draft_vocab=[toy.draft_end] if ends else [],
        )

        def rule(drafted, toy=toy, transfer=transfer):
            draft = Draft(drafted.ids, drafted.law_ids, drafted.law_probs, drafted.planned_steps, max_tokens=99)
            exact = transfer.exact_rows(draft, Extendable.nothing(len(toy.draft)))
            assert len(exact.tokens_in_target_vocab) == len(drafted.ids)
            return rows_of(exact)

        result = outcome(toy, rule, steps=3, depth=3)
        assert result.distance < EXACT
        assert result.accepted > 0.1


@pytest.mark.parametrize("alphabet", [LETTERS, CHARACTERS], ids=["letters", "split-characters"])
def test_slem_has_the_law_of_the_target(alphabet):
    for seed in range(6):
        toy = as_kind(world(seed, alphabet=alphabet), GreedyWorld)
        table = ChunkTable(
            draft_vocab_size=len(toy.draft),
            target_vocab_size=len(toy.target),
            encode=lambda run, lasts, toy=toy: [toy.encode(run, d) for d in lasts],
        )
        transfer = slem_transfer(table, end_ids_in_draft_vocab=[toy.draft_end])
        everything = Extendable.build(np.ones(len(toy.draft), dtype=np.bool_), toy.draft)

        def rule(drafted, toy=toy, transfer=transfer, everything=everything):
            draft = Draft(drafted.ids, *point_law(drafted.ids), drafted.planned_steps, max_tokens=99)
            exact = transfer.exact_rows(draft, everything)
            whole = toy.encode(drafted.ids[:-1], drafted.ids[-1])
            assert tuple(exact.tokens_in_target_vocab) == whole
            return rows_of(exact)

        assert outcome(toy, rule, steps=3, depth=3).distance < EXACT


def test_point_masses_have_the_law_of_the_target_however_drawn():
    for seed in range(6):
        toy = world(seed, ends=False)
        assert outcome(toy, point_mass_rule(toy), steps=3, depth=3).distance < EXACT


@pytest.mark.parametrize("lossy", [paper_rule, aligned_table_rule])
def test_enumeration_finds_the_bias_of_lossy_rules(lossy):
    distances = [outcome(toy := world(seed, ends=False), lossy(toy), steps=3, depth=2).distance for seed in range(6)]
    assert max(distances) > 0.01


def test_one_token_with_the_paper_scalar_gives_the_documented_law():
    """q = (.3, .5, .2), a proposal of token 0 with p = .6: the output law is (.500, .357, .143)."""
    toy = World((b"a",), (b"a", b"b", b"c"), seed=0)
    toy._cache["draft", ()] = np.ones(1)
    toy._cache["target", ()] = q = np.array([0.3, 0.5, 0.2])
    biased = np.array([0.5, 0.5 * 0.5 / 0.7, 0.5 * 0.2 / 0.7])
    expected = 0.5 * np.abs(biased - q).sum()
    assert outcome(toy, lambda _drafted: [(0, {0: 0.6})], steps=1, depth=1).distance == pytest.approx(expected)
    assert outcome(toy, lambda _drafted: [(0, {0: 1.0})], steps=1, depth=1).distance < EXACT
