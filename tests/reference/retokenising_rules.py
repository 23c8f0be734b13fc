"""Rules that re-tokenise the whole draft, for the enumeration: point masses, which are exact, and two that are not."""

from __future__ import annotations

import numpy as np
from reference.enumeration import longest_match

from vllm_tokentiming.transfer.paper import paper_scalars
from vllm_tokentiming.transfer.point_mass import point_mass_rows


def retokenised(toy, drafted):
    """Full re-tokenisation of a draft without specials; for each proxy token the last draft token that overlaps it."""
    proxy = longest_match(toy.target, b"".join(toy.draft[i] for i in drafted.ids))
    ends = np.cumsum([len(toy.draft[i]) for i in drafted.ids])
    last = np.searchsorted(ends, np.cumsum([len(toy.target[t]) for t in proxy]))
    return proxy, ends, last


def point_mass_rule(toy):
    """Full re-tokenisation and no rows, which vLLM reads as certainties."""

    def rule(drafted):
        assert point_mass_rows(ids_in_draft_vocab=drafted.ids) is None
        return [(token, {token: 1.0}) for token in retokenised(toy, drafted)[0]]

    return rule


def paper_rule(toy):
    """The product's paper transfer, with the last overlapping draft token in place of the alignment's."""

    def rule(drafted):
        proxy, _, last = retokenised(toy, drafted)
        scalars = paper_scalars(
            ids_in_draft_vocab=drafted.ids,
            law_ids=drafted.law_ids,
            law_probs=drafted.law_probs,
            ids_in_target_vocab=proxy,
            last_draft_index=last.astype(np.int32),
        )
        return [(t, {t: p}) for t, p in zip(proxy, scalars.tolist(), strict=True)]

    return rule


def aligned_table_rule(toy):
    """Full re-tokenisation; a token aligned one to one takes its law through a fixed table, others a point mass."""

    def rule(drafted):
        proxy, ends, last = retokenised(toy, drafted)
        proposal, position = [], 0
        for token, i in zip(proxy, last, strict=True):
            size = len(toy.target[token])
            if ends[i] == position + size and len(toy.draft[drafted.ids[i]]) == size:
                row: dict[int, float] = {}
                for d, p in drafted.laws()[i].items():
                    first = longest_match(toy.target, toy.draft[d])[0]
                    row[first] = row.get(first, 0.0) + p
            else:
                row = {token: 1.0}
            proposal.append((token, row))
            position += size
        return proposal

    return rule
