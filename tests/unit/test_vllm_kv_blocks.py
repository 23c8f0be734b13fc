"""Does every draft context keep the KV that was computed for it, whatever is shared, rolled back or forgotten?"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_tokentiming.engine import vllm_kv_blocks
from vllm_tokentiming.engine.vllm_kv_blocks import DraftBlocks, DraftSequence
from vllm_tokentiming.errors import DraftCacheExhaustedError

BLOCK = 4
NAMES = st.sampled_from(["a", "b", "c", "d"])
IDS = st.lists(st.integers(0, 1), min_size=1, max_size=26)  # two tokens: contexts share prefixes all the time
POISON = (-1,)


@pytest.fixture(autouse=True)
def _small_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kv_blocks, "_ROLLBACK_MARGIN", 2)


class _Cache:
    """The memory behind the blocks, used like the engine does: a slot holds the context that its KV came from."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = DraftBlocks(num_blocks=num_blocks, block_size=BLOCK)
        self.num_blocks = num_blocks
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}

    def cycle(self, name: str, context: list[int], drafted: list[int], busy: set[str]) -> int | None:
        """A cycle as the engine runs it; returns the tokens computed, or None where there is no room."""
        sequence = self.blocks.sequence(name, context)
        same = 0
        while same < min(len(sequence.ids), len(context) - 1) and sequence.ids[same] == context[same]:
            same += 1
        kept = self.blocks.roll_back(sequence, same)
        assert kept <= same
        assert sequence.ids == context[:kept]
        try:
            self.blocks.reserve(sequence, len(context) + len(drafted), busy=busy)
        except DraftCacheExhaustedError:
            self.blocks.release(name)
            return None
        self.write(sequence, context[kept:])
        self.blocks.register_prefix(sequence)
        self.write(sequence, drafted)
        return len(context) - kept

    def write(self, sequence: DraftSequence, ids: list[int]) -> None:
        for token in ids:
            place = len(sequence.ids)
            block = sequence.blocks[place // BLOCK]
            assert block.ref_cnt == 1, "a block that somebody else reads is written"
            assert block.block_hash is None, "a block that others may come to read is written"
            sequence.ids.append(token)
            self.memory[block.block_id, place % BLOCK] = tuple(sequence.ids)

    def check(self) -> None:
        held: set[int] = set()
        for name, sequence in self.blocks._sequences.items():
            ids = sequence.block_ids()
            assert len(ids) * BLOCK >= len(sequence.ids)
            assert 0 not in ids
            assert len(set(ids)) == len(ids)
            held.update(ids)
            for place in range(len(sequence.ids)):
                found = self.memory[ids[place // BLOCK], place % BLOCK]
                assert found == tuple(sequence.ids[: place + 1]), (name, place)
        assert self.blocks.num_free == self.num_blocks - 1 - len(held)


class _Machine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(3, 24))
    def start(self, num_blocks: int) -> None:
        self.cache = _Cache(num_blocks)

    @rule(name=NAMES, context=IDS, drafted=st.lists(st.integers(0, 1), max_size=6), busy=st.sets(NAMES))
    def any_context(self, name: str, context: list[int], drafted: list[int], busy: set[str]) -> None:
        self.cache.cycle(name, context, drafted, busy | {name})

    @rule(
        name=NAMES,
        back=st.integers(0, 9),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        drafted=st.lists(st.integers(0, 1), max_size=6),
    )
    def go_on(self, name: str, back: int, more: list[int], drafted: list[int]) -> None:
        sequence = self.cache.blocks._sequences.get(name)
        if sequence is None or len(sequence.ids) > 60:
            return
        keep = max(0, len(sequence.ids) - back)
        self.cache.cycle(name, [*sequence.ids[:keep], *more], drafted, {name})

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        self.cache.blocks.release(name)

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        # What the blocks of a broken request hold is worthless from here on, for whoever gets to read them.
        sequence = self.cache.blocks._sequences.get(name)
        others = [s for n, s in self.cache.blocks._sequences.items() if n != name]
        if sequence is not None:
            shared = {block_id for other in others for block_id in other.block_ids()}
            for block_id in set(sequence.block_ids()) - shared:
                for offset in range(BLOCK):
                    self.cache.memory[block_id, offset] = POISON
        held = [] if sequence is None else sequence.block_ids()
        cleared = self.cache.blocks.forget(name)
        assert cleared == [block_id for block_id in held if not any(block_id in o.block_ids() for o in others)]

    @invariant()
    def every_context_has_its_own_kv(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for name in list(self.cache.blocks._sequences):
            self.cache.blocks.release(name)
        assert self.cache.blocks.num_free == self.cache.num_blocks - 1
        assert len(self.cache.blocks) == 0


def test_any_order_of_cycles_releases_and_evictions() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(_Machine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))


def _text(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def test_an_identical_prefix_is_reused_and_any_other_is_not() -> None:
    cache = _Cache(64)
    text = _text(22)
    assert cache.cycle("a", text, [], {"a"}) == 22
    assert cache.cycle("b", text, [], {"b"}) == 2  # five blocks of four
    assert cache.cycle("c", [*text[:13], *_text(9, 90)], [], {"c"}) == 22 - 12
    assert cache.cycle("d", [99, *text[1:]], [], {"d"}) == 22
    # The same block after another beginning is another block.
    cache.cycle("e", _text(22, 50), [], {"e"})
    assert cache.cycle("g", [*_text(4, 50), *text[4:]], [], {"g"}) == 22 - 4
    cache.blocks.release("a")
    cache.blocks.release("b")
    assert cache.cycle("f", text, [], {"f"}) == 2
    cache.check()


def test_the_last_token_of_a_context_is_always_left_to_compute() -> None:
    cache = _Cache(64)
    text = _text(16)
    cache.cycle("a", _text(30), [], {"a"})
    assert cache.cycle("b", text, [], {"b"}) == 4
    assert cache.cycle("b", text, [], {"b"}) in {1, 4}
    assert cache.cycle("c", text[:1], [], {"c"}) == 1
    cache.check()


def test_blocks_near_the_end_are_not_offered() -> None:
    cache = _Cache(64)
    text = _text(17)
    cache.cycle("a", text, [], {"a"})  # 15 tokens are behind the margin of 2: three blocks
    assert cache.cycle("b", text, [], {"b"}) == 17 - 12


def test_rolling_back_into_a_shared_block_leaves_it_to_its_reader() -> None:
    cache = _Cache(64)
    text = _text(22)
    cache.cycle("a", text, [], {"a"})
    cache.cycle("b", text, [], {"b"})
    sequence = cache.blocks.sequence("a", text)
    assert cache.blocks.roll_back(sequence, 10) == 8  # block 2 holds tokens 8 to 11
    cache.cycle("a", [*text[:10], 77, 78], [], {"a"})
    cache.check()
    assert cache.blocks.sequence("b", text).ids == text


def test_what_follows_a_rewritten_block_is_not_offered_after_the_old_one() -> None:
    cache = _Cache(64)
    text = _text(22)
    cache.cycle("a", text, [], {"a"})
    cache.cycle("a", [*text[:8], *_text(4, 70), *text[12:]], [], {"a"})
    cache.blocks.release("a")
    cache.cycle("b", [*text[:12], *_text(10, 80)], [], {"b"})
    assert cache.cycle("c", [*text[:8], *_text(4, 70), *text[12:]], [], {"c"}) == 2
    assert cache.cycle("d", text, [], {"d"}) == 2
    cache.check()


def test_rolling_back_returns_blocks() -> None:
    cache = _Cache(64)
    cache.cycle("a", _text(10), _text(10, 30), {"a"})
    before = cache.blocks.num_free
    cache.blocks.roll_back(cache.blocks.sequence("a", []), 9)
    assert cache.blocks.num_free == before + 2
    assert cache.blocks.sequence("a", []).ids == _text(9)


def test_idle_requests_are_evicted_coldest_first() -> None:
    cache = _Cache(1 + 6)
    for name, first in (("a", 100), ("b", 200), ("c", 300)):
        cache.cycle(name, _text(8, first), [], {name})
    cache.cycle("a", _text(8, 100), [], {"a"})  # "b" is the coldest now
    assert cache.cycle("d", _text(5, 400), [], {"d"}) == 5
    assert sorted(cache.blocks._sequences) == ["a", "c", "d"]
    cache.check()
    assert cache.cycle("e", _text(8, 500), [], {"e", "c"}) == 8  # "c" is colder than "a", but busy
    assert sorted(cache.blocks._sequences) == ["c", "d", "e"]
    cache.check()


def test_where_everybody_is_busy_the_cache_is_exhausted() -> None:
    cache = _Cache(1 + 4)
    busy = {"a", "b", "c"}
    assert cache.cycle("a", _text(8), [], busy) == 8
    assert cache.cycle("b", _text(8, 50), [], busy) == 8
    sequence = cache.blocks.sequence("c", _text(3, 90))
    with pytest.raises(DraftCacheExhaustedError, match=r"1 blocks of 4 tokens are needed, 0 are free\. Raise"):
        cache.blocks.reserve(sequence, 3, busy=busy)
    cache.blocks.release("c")
    cache.check()
    assert len(cache.blocks) == 2


def test_nobody_reuses_what_was_forgotten() -> None:
    cache = _Cache(64)
    text = _text(30)
    cache.cycle("a", text, [], {"a"})
    cache.cycle("b", [*text[:10], *_text(20, 60)], [], {"b"})  # shares the first two blocks
    held = cache.blocks.sequence("a", text).block_ids()
    assert cache.blocks.forget("a") == held[2:]  # the others still have their reader
    assert cache.blocks.forget("never seen") == []
    assert cache.cycle("c", text, [], {"c"}) == 30
    cache.check()
    for name in ("b", "c"):
        cache.blocks.release(name)
    assert cache.blocks.num_free == 63
