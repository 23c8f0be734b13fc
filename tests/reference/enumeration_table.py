"""Prints the figures of docs/losslessness.md: ``python -m reference.enumeration_table`` in the folder ``tests``."""

from __future__ import annotations

import sys

import numpy as np
from reference.enumeration import GO_ON, STOP, outcome
from reference.retokenising_rules import aligned_table_rule, paper_rule, point_mass_rule
from reference.toy_rules import faulty_encoder, faulty_link, product_rule, reference_rule, world

SEEDS = range(20)


def stop_at_flat_law(probs):
    return STOP if probs.max() < 0.5 else GO_ON


RULES = {
    "exact, E = {}": product_rule,
    "exact, E = {0, 1}": lambda toy: product_rule(toy, extendable=(0, 1)),
    "exact, E = everything": lambda toy: product_rule(toy, extendable=range(len(toy.draft))),
    "exact, aligner and tokenizer that err": lambda toy: product_rule(
        toy, extendable=(0, 1), linked=faulty_link, encode=faulty_encoder(toy)
    ),
    "point masses, sampled draft": point_mass_rule,
    "paper's scalar": paper_rule,
    "aligned table": aligned_table_rule,
    "links of the drawn token alone, aligner that errs": lambda toy: reference_rule(
        toy, extendable=(0, 1), linked=faulty_link, check_every_candidate=False
    ),
}


def line(name, results):
    distances = [r.distance for r in results]
    accepted, in_blocks = np.mean([r.accepted for r in results]), np.mean([r.accepted_in_blocks for r in results])
    figures = f"{max(distances):.1e} | {np.mean(distances):.1e} | {accepted:.3f} | {in_blocks:.3f}"
    sys.stdout.write(f"| {name} | {figures} |\n")


def main():
    for name, build in RULES.items():
        line(name, [outcome(toy := world(s, ends=False), build(toy), steps=3, depth=3) for s in SEEDS])
    for name, planned in (
        ("exact, drafting stopped on a law", None),
        ("the same, the stop taken for a plan", lambda drafted: len(drafted.ids)),
    ):
        line(
            name,
            [
                outcome(
                    toy := world(s, ends=False),
                    product_rule(toy, extendable=(0, 1), planned=planned),
                    steps=3,
                    depth=3,
                    stop=stop_at_flat_law,
                )
                for s in SEEDS
            ],
        )


if __name__ == "__main__":
    main()
