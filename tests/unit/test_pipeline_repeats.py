"""A repeat after a draft: what is proposed, and who learns from it. The draft and both vocabularies are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from vllm_tokentiming.draft_length import FixedLength
from vllm_tokentiming.engine.interface import DraftedTokens
from vllm_tokentiming.metrics import Metrics
from vllm_tokentiming.pipeline import Pipeline
from vllm_tokentiming.policy import FORCED
from vllm_tokentiming.repeats import Repeat, RepeatAcceptance
from vllm_tokentiming.requests import TargetRequest
from vllm_tokentiming.transfer.interface import Proposals

TEXT = [1, 2, 3, 7, 8, 9, 4, 5, 3]
PROXY = [7, 8]


class Context:
    ends_inside_character = False

    def __init__(self):
        self.ids = []

    @property
    def num_target_tokens(self):
        return len(self.ids)

    @property
    def num_stable(self):
        return len(self.ids)

    def commit(self, ids):
        self.ids += ids


class Mode:
    """Every draft becomes the same proxy tokens."""

    def __init__(self):
        self.accepted = []

    def new_context(self):
        return Context()

    def new_policy(self, *, alone):
        del alone
        return SimpleNamespace(observe=lambda _arm, accepted: self.accepted.append(accepted))

    def new_observer(self):
        return None

    def choose(self, *_args, **_options):
        return FORCED

    def sampling(self, *_args, **_options):
        return None

    def proposals(self, drafts):
        return Proposals([PROXY[: draft.max_tokens] if draft.ids_in_draft_vocab else [] for draft in drafts])


class Engine:
    def draft(self, requests, stop_rule=None):
        assert stop_rule is None
        return [DraftedTokens(ids_in_draft_vocab=[0] * request.num_steps) for request in requests]

    def release(self, request_id):
        pass


class Length(FixedLength):
    def __init__(self):
        super().__init__(num_draft_tokens=2)
        self.seen = []

    def observe_row(self, row, *, accepted_tokens, num_proposed):
        self.seen.append((accepted_tokens, num_proposed))


class Repeats(RepeatAcceptance):
    def __init__(self):
        super().__init__()
        self.seen = []

    def observe(self, repeat, accepted):
        self.seen.append((repeat, accepted))


def request(ids, *, max_proposal=5):
    return TargetRequest("a", "owner", np.array(ids, dtype=np.int32), max_proposal, temperature=0.0)


def served(*, repeats):
    mode, length, metrics = Mode(), Length(), Metrics(CollectorRegistry())
    pipeline = Pipeline(mode=mode, engine=Engine(), length=length, metrics=metrics, repeats=repeats)
    return SimpleNamespace(pipeline=pipeline, mode=mode, length=length, metrics=metrics)


def test_what_followed_the_draft_earlier_is_proposed_after_it_while_it_is_likely_and_there_is_room():
    for max_proposal, expected in ((5, [7, 8, 9]), (3, [7, 8, 9]), (2, [7, 8]), (1, [7])):
        server = served(repeats=RepeatAcceptance())
        proposals = server.pipeline.propose([None, request(TEXT, max_proposal=max_proposal)])
        assert proposals.ids_in_target_vocab == [[], expected]
        server.metrics.end_cycle()
        assert server.metrics.totals["appended_tokens"] == len(expected) - min(2, max_proposal)
        assert server.metrics.totals["proxy_tokens"] == len(expected)


def test_without_repeats_nothing_is_appended():
    assert served(repeats=None).pipeline.propose([request(TEXT)]).ids_in_target_vocab == [PROXY]


@pytest.mark.parametrize(
    ("committed", "of_draft", "of_repeat"),
    [([7, 8, 9, 6], 2, [1]), ([7, 8, 6], 2, [0]), ([7, 6], 1, []), ([6], 0, [])],
    ids=["all", "the draft's", "one", "none"],
)
def test_draft_and_repeat_learn_of_their_own_tokens(committed, of_draft, of_repeat):
    repeats = Repeats()
    server = served(repeats=repeats)
    server.pipeline.propose([request(TEXT)])
    server.pipeline.propose([request(TEXT + committed)])
    assert server.mode.accepted == [of_draft]
    assert server.length.seen == [(of_draft, 2)]
    assert repeats.seen == [(Repeat([9], 3), accepted) for accepted in of_repeat]
