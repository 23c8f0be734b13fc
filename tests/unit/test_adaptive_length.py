"""Draft length against a simulated server whose costs and acceptance are known."""

import random

import pytest

from vllm_tokentiming.adaptive_length import AdaptiveLength
from vllm_tokentiming.draft_length import DraftRow, FixedLength, RequestAcceptance

MOST = 8


def adaptive(*, timed=True):
    return AdaptiveLength(num_draft_tokens=MOST, timed=timed)


class Server:
    """Verifies in ``verify`` seconds plus ``per_token`` for each token, drafts a token in ``draft`` seconds.

    ``chance`` maps a draft's confidence to the chance that its token is accepted. In every cycle ``repeats`` requests
    propose three tokens of their own text besides, of which one is accepted. Any proposal costs ``tile`` seconds.
    """

    def __init__(self, *, draft, chance, confidence, verify=0.15, per_token=0.0, batch=1, seed=0, repeats=0, tile=0.0):
        self.draft, self.chance, self.confidence = draft, chance, confidence
        self.repeats, self.tile = repeats, tile
        self.verify, self.per_token, self.batch = verify, per_token, batch
        self.rng = random.Random(seed)
        self.now, self.tokens = 0.0, 0
        self.lengths = {str(request): 10 for request in range(batch)}
        self.acceptance = {request: RequestAcceptance(alone=False) for request in self.lengths}
        self.drafted = []

    def cycle(self, length, *, fixed=None, samples=False):
        """One cycle; ``fixed`` steps, or as many as ``length`` wants."""
        length.begin_cycle(self.now, dict(self.lengths), samples=samples)
        speculates = length.speculates() if fixed is None else fixed > 0
        rows = [DraftRow(acceptance=a, max_steps=fixed or MOST, sampled=True) for a in self.acceptance.values()]
        values = [[] for _ in rows]
        pace, more = length.pace(rows, missing_tokens=3), speculates
        while more:
            confidence = [self.confidence(self.rng) for _ in rows]
            counts = [len(row.confidences) for row in rows]
            more = pace.more(range(len(rows)), confidence)
            if fixed is not None:
                more = pace.steps < fixed
            for place, row in enumerate(rows):
                if fixed is not None or len(row.confidences) > counts[place]:
                    values[place].append(confidence[place])
        self.drafted.append(pace.steps)
        self.now += pace.steps * self.draft
        repeats = self.repeats
        if fixed is None and not speculates and not length.repeats_pay(tokens=3 * repeats, expected=repeats):
            repeats = 0
        proposed = sum(map(len, values)) + 3 * repeats
        length.end_cycle(self.now, num_proposed=proposed)
        self.now += self.verify + self.per_token * (self.batch + proposed) + (self.tile if proposed else 0.0)
        for place, request in enumerate(self.lengths):
            accepted = 0
            while accepted < len(values[place]) and self.rng.random() < self.chance(values[place][accepted]):
                accepted += 1
            if values[place]:
                length.observe_row(rows[place], accepted_tokens=accepted, num_proposed=len(values[place]))
            made = accepted + 1 + (place < repeats)
            self.lengths[request] += made
            self.tokens += made

    def rate(self, *, cycles, fixed=None, length=None):
        """Tokens a second; the estimates learn in the first third, which does not count."""
        length = length or adaptive()
        for _ in range(cycles // 3):
            self.cycle(length, fixed=fixed)
        before, began = self.tokens, self.now
        for _ in range(cycles):
            self.cycle(length, fixed=fixed)
        return (self.tokens - before) / (self.now - began)


def best_fixed(**server):
    return max(Server(**server).rate(cycles=900, fixed=fixed) for fixed in range(MOST + 1))


@pytest.mark.parametrize("draft", [0.005, 0.02, 0.06])
@pytest.mark.parametrize("batch", [1, 4])
def test_beats_the_best_fixed_length_where_confidence_tells(draft, batch):
    server = {
        "draft": draft,
        "batch": batch,
        "chance": lambda confidence: confidence,
        "confidence": lambda rng: rng.choice([0.1, 0.95, 0.95]),
    }
    assert Server(**server).rate(cycles=900) > best_fixed(**server) * (1.0 if batch == 1 else 0.97)


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_comes_near_the_best_fixed_length_where_confidence_tells_nothing(chance):
    server = {
        "draft": 0.02,
        "chance": lambda _: chance,
        "confidence": lambda rng: rng.random(),
    }
    assert Server(**server).rate(cycles=900) > best_fixed(**server) * 0.96


@pytest.mark.parametrize(
    ("draft", "per_token", "batch"), [(0.2, 0.0, 1), (0.02, 0.03, 16), (0.3, 0.01, 4)], ids=["slow", "full", "both"]
)
def test_a_hopeless_draft_costs_almost_nothing(draft, per_token, batch):
    server = {
        "draft": draft,
        "per_token": per_token,
        "batch": batch,
        "chance": lambda _: 0.02,
        "confidence": lambda rng: rng.random(),
    }
    assert Server(**server).rate(cycles=900) > Server(**server).rate(cycles=900, fixed=0) * 0.98


@pytest.mark.parametrize("sizes", [(16,), (1, 2, 4, 8, 16)], ids=["at once", "growing"])
@pytest.mark.parametrize("quality", [0.3, 0.5, 0.8])
def test_few_tokens_at_sizes_never_seen_are_no_slower_than_without(sizes, quality):
    """A server that was just started, and 64 tokens for each request of a batch that is full before long."""

    def rates(fixed=None):
        length, now = adaptive(), 0.0
        for batch in sizes:
            costs = {"draft": 0.03, "verify": 0.3, "per_token": 0.005, "batch": batch}
            server = Server(**costs, chance=lambda c: quality * c + 0.1, confidence=lambda rng: rng.random())
            server.now = began = now
            while server.tokens < 64 * batch:
                server.cycle(length, fixed=fixed, samples=True)
            now = server.now
            yield server.tokens / (now - began)

    assert all(ours > 0.96 * plain for ours, plain in zip(rates(), rates(fixed=0), strict=True))


def test_fewer_tokens_are_drafted_when_verifying_them_takes_time():
    server = {"draft": 0.01, "batch": 8, "chance": lambda c: c, "confidence": lambda rng: rng.choice([0.5, 0.9])}
    free, full = Server(**server), Server(**server, per_token=0.004)
    free.rate(cycles=400)
    assert full.rate(cycles=400) > best_fixed(**server, per_token=0.004) * 0.95
    assert sum(full.drafted[-200:]) < sum(free.drafted[-200:])


def test_comes_back_when_a_draft_gets_better():
    length = adaptive()
    server = Server(draft=0.05, chance=lambda _: 0.0, confidence=lambda rng: rng.random())
    server.rate(cycles=300, length=length)
    assert sum(server.drafted[-50:]) < 25
    server.chance = lambda _: 0.9
    server.rate(cycles=900, length=length)
    assert sum(server.drafted[-50:]) > 100


def good_draft():
    return Server(draft=0.01, chance=lambda c: c, confidence=lambda rng: 0.5 + rng.random() / 2)


def good_draft_after(slow_cycles, *, verify, cycles):
    """A good draft's server, whose first passes are slow."""
    server, length = good_draft(), adaptive()
    usual, server.verify = server.verify, verify
    for _ in range(slow_cycles):
        server.cycle(length)
    server.verify = usual
    for _ in range(cycles):
        server.cycle(length)
    return server


def test_a_slow_start_is_not_held_against_a_good_draft():
    server = good_draft_after(2, verify=3.0, cycles=40)
    assert sum(steps > 0 for steps in server.drafted) >= 40


def test_a_misjudged_draft_is_tried_again_soon():
    server = good_draft_after(7, verify=1.5, cycles=60)
    assert sum(steps > 0 for steps in server.drafted[-30:]) >= 20


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_speeds_up_and_slows_down_does_not_change_the_choice(seed):
    """Neighbours on a shared machine: everything takes up to twice as long, for some seconds."""

    def share_with_drafts(server):
        dice, length = random.Random(seed), adaptive()
        draft, verify, drafted = server.draft, server.verify, 0
        for cycle in range(600):
            if cycle % 23 == 0:
                slow = 1.0 + dice.random()
                server.draft, server.verify = slow * draft, slow * verify
            server.cycle(length)
            drafted += server.drafted[-1] > 0
        return drafted / 600

    assert share_with_drafts(good_draft()) > 0.97
    hopeless = Server(draft=0.03, chance=lambda _: 0.02, confidence=lambda rng: rng.random())
    assert share_with_drafts(hopeless) < 0.2


@pytest.mark.parametrize("samples", [False, True])
def test_a_good_request_after_poor_ones_is_drafted_for_at_once(samples):
    """Whether the poor ones are of its kind or not."""
    length = adaptive()
    kinds = {"good": good_draft(), "poor": Server(draft=0.05, chance=lambda _: 0.05, confidence=lambda _: 0.5)}
    drafted = {name: [] for name in kinds}
    for turn in range(24):
        name = "poor" if turn % 2 else "good"
        server = kinds[name]
        server.lengths = {f"{name} {turn}": 10}
        server.acceptance = {f"{name} {turn}": RequestAcceptance(alone=False)}
        for _ in range(60):
            server.cycle(length, samples=samples and name == "poor")
        drafted[name].append(sum(steps > 0 for steps in server.drafted[-60:]) / 60)
    assert min(drafted["good"][2:]) > 0.85
    assert sum(drafted["poor"][6:]) / 6 < 0.4


def test_a_pause_between_requests_teaches_nothing():
    length = adaptive()
    server = Server(draft=0.02, chance=lambda _: 0.8, confidence=lambda _: 0.8)
    usual = server.rate(cycles=900, length=length)
    for request in range(20):
        server.now += 30.0
        server.lengths = {f"later {request}": 10}
        server.acceptance = {f"later {request}": RequestAcceptance(alone=False)}
        server.rate(cycles=6, length=length)
    assert server.rate(cycles=900, length=length) > 0.95 * usual


def steps_alone(length, *, others):
    alone = DraftRow(acceptance=RequestAcceptance(alone=True), max_steps=5, sampled=True)
    rows = [alone] + [
        DraftRow(acceptance=RequestAcceptance(alone=False), max_steps=5, sampled=True) for _ in range(others)
    ]
    pace = length.pace(rows, missing_tokens=0)
    for value in (0.9, 0.8, 0.5, 0.7, 0.6):
        if not pace.more(range(len(rows)), [value] * len(rows)):
            break
    return len(alone.confidences)


@pytest.mark.parametrize("seed", range(4))
def test_the_last_request_of_a_batch_drafts_as_one_that_was_always_alone(seed):
    """What a token is worth to sixteen requests is not what it is worth to one."""
    costs = {
        "draft": 0.012,
        "per_token": 0.006,
        "chance": lambda value: value,
        "confidence": lambda rng: rng.uniform(0.5, 1),
    }
    length, server = adaptive(), Server(**costs, batch=16, seed=seed)
    server.rate(cycles=200, length=length)
    server.batch, server.lengths = 1, dict(list(server.lengths.items())[:1])
    server.acceptance = {request: server.acceptance[request] for request in server.lengths}
    server.drafted.clear()
    for _ in range(20):
        server.cycle(length)
    alone = Server(**costs, seed=seed)
    alone.rate(cycles=200)
    assert sum(server.drafted) / 20 > 0.75 * sum(alone.drafted) / len(alone.drafted)


def test_a_request_with_a_seed_depends_on_nothing_but_its_own_laws():
    fresh, experienced = adaptive(), adaptive()
    Server(draft=0.2, batch=4, per_token=0.1, chance=lambda _: 0.05, confidence=lambda _: 0.9).rate(
        cycles=100, length=experienced
    )
    assert 1 < steps_alone(fresh, others=0) < 5
    assert len({steps_alone(length, others=others) for length in (fresh, experienced) for others in (0, 3)}) == 1


def test_without_a_clock_ranks_decide_alike():
    def steps(draft):
        server = Server(draft=draft, batch=3, chance=lambda c: c, confidence=lambda rng: rng.choice([0.2, 0.9]), seed=4)
        server.rate(cycles=100, length=adaptive(timed=False))
        return server.drafted

    quick, slow = steps(0.001), steps(3.0)
    assert quick == slow
    assert min(quick) > 0


def test_repeats_alone_do_not_speak_against_drafting():
    """A cycle in which every request repeats its own text drafts nothing, and yet it is one of speculation."""
    length = adaptive()
    server = Server(draft=0.02, chance=lambda _: 0.7, confidence=lambda _: 0.7)
    for cycle in range(300):
        if cycle % 2:
            server.cycle(length)
            continue
        length.begin_cycle(server.now, dict(server.lengths))
        length.speculates()
        length.end_cycle(server.now, num_proposed=8)
        server.now += server.verify
        server.lengths["0"] += 9
    assert sum(server.drafted[-50:]) >= 48  # a probe or two aside


@pytest.mark.parametrize("quality", [0.0, 0.9])
def test_a_batch_in_which_somebody_always_repeats_still_learns_whether_drafting_pays(quality):
    server = {"verify": 0.3, "per_token": 0.005, "batch": 16, "repeats": 3, "draft": 0.02 if quality else 0.1}
    server |= {"chance": lambda c: quality * c, "confidence": lambda rng: rng.random()}
    plain = Server(**server).rate(cycles=120, fixed=0)
    assert Server(**server).rate(cycles=120) > plain * (1.03 if quality else 0.97)


@pytest.mark.parametrize(("tile", "repeats"), [(0.1, 1), (0.1, 12), (0.0, 1)], ids=["dear", "many", "cheap"])
def test_repeats_of_a_batch_are_proposed_where_they_pay_for_verifying_them(tile, repeats):
    server = {"verify": 0.3, "per_token": 0.001, "batch": 16, "tile": tile, "draft": 0.1}
    server |= {"chance": lambda _: 0.0, "confidence": lambda rng: rng.random()}
    with_all, without = (Server(**server, repeats=n).rate(cycles=300, fixed=0) for n in (repeats, 0))
    assert Server(**server, repeats=repeats).rate(cycles=300) > 0.97 * max(with_all, without)


def test_not_a_number_counts_as_no_confidence():
    length = adaptive()
    row = DraftRow(acceptance=RequestAcceptance(alone=False), max_steps=5, sampled=False)
    length.pace([row], missing_tokens=0).more([0], [float("nan")])
    assert row.confidences == [0]


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_steps_than_a_request_has_room_for(most):
    row = DraftRow(acceptance=RequestAcceptance(alone=False), max_steps=most, sampled=False)
    pace = adaptive().pace([row], missing_tokens=0)
    while pace.more([0], [0.99]):
        pass
    assert len(row.confidences) == most


def test_a_fixed_length_drafts_all_that_it_says_and_proposes_all_of_it():
    length = FixedLength(num_draft_tokens=3)
    assert [length.most_steps(proposal) for proposal in (0, 1, 9)] == [0, 3, 3]
    row = DraftRow(acceptance=RequestAcceptance(alone=False), max_steps=3, sampled=True)
    length.begin_cycle(0.0, {"a": 10})
    assert length.speculates()
    assert length.pace([row], missing_tokens=0) is None
    assert length.steps_to_propose(row) == 3
    length.end_cycle(1.0, num_proposed=3)
    length.observe_row(row, accepted_tokens=0, num_proposed=3)
    assert length.speculates()


def test_an_adaptive_length_drafts_no_more_than_can_be_proposed():
    assert [adaptive().most_steps(proposal) for proposal in (0, 1, 9)] == [0, 1, MOST]


def test_a_token_for_free_must_be_as_likely_as_verifying_it_costs():
    server = {"draft": 0.01, "batch": 8, "chance": lambda c: c, "confidence": lambda rng: rng.choice([0.5, 0.9])}
    row = DraftRow(acceptance=RequestAcceptance(alone=False), max_steps=3, sampled=True)
    alone = DraftRow(acceptance=RequestAcceptance(alone=True), max_steps=3, sampled=True)
    first = adaptive().least_chance(row)
    assert first == adaptive(timed=False).least_chance(row) == FixedLength(num_draft_tokens=3).least_chance(row)

    def learned(**costs):
        length = adaptive()
        Server(**server, **costs).rate(cycles=400, length=length)
        assert length.least_chance(alone) == first
        return length.least_chance(row)

    free, dear = learned(), learned(per_token=0.004)
    assert 0.0 < free < 0.1 < dear < 1.0
