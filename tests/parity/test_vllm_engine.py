"""Does the vLLM draft engine draft what Hugging Face's float32 model would, whatever its cache went through?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_harness as harness
import numpy as np
import pytest
import torch

from vllm_tokentiming.engine.interface import DraftedTokens, DraftRequest, DraftSampling, Silence
from vllm_tokentiming.errors import ConfigError, DraftEngineError

pytest.importorskip("vllm")

MAX_NUM_SEQS = 8
BLOCK = 128
BLOCK_BYTES = 2 * 2 * BLOCK * 1 * 32 * 4  # keys and values, layers, tokens, KV heads, head size, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.make_random_llama(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return harness.load_reference(folder)


@pytest.fixture(scope="module")
def shared_engine(folder: Path) -> Iterator[Any]:
    with harness.vllm_engine(folder, max_num_seqs=MAX_NUM_SEQS) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Any) -> Iterator[Any]:
    """The module's engine, without requests before and, as every test must leave it, after."""
    free = shared_engine._cache.num_blocks - 1
    assert shared_engine._blocks.num_free == free
    yield shared_engine
    for request_id in list(shared_engine._blocks._sequences):
        shared_engine.release(request_id)
    assert shared_engine.num_requests == 0
    assert shared_engine._blocks.num_free == free, "blocks leaked"
    shared_engine._blocks._pool.reset_prefix_cache()


@pytest.fixture
def computed(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward pass."""
    passes: list[int] = []
    run = engine._forward._run

    def counting(common: Any, *, tokens: int, **rest: Any) -> torch.Tensor:
        passes.append(tokens)
        return run(common, tokens=tokens, **rest)

    kind = type(engine._forward.hand_step)
    step = kind.__call__

    def counting_by_hand(self: Any, ids: torch.Tensor, **rest: Any) -> torch.Tensor:
        passes.append(len(ids))
        return step(self, ids, **rest)

    monkeypatch.setattr(engine._forward, "_run", counting)
    monkeypatch.setattr(kind, "__call__", counting_by_hand)
    return passes


def _text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(harness.VOCAB_SIZE) for _ in range(length)]


def _draft(engine: Any, request_id: str, context: list[int], num_steps: int = 4, **rest: Any) -> DraftedTokens:
    (drafted,) = engine.draft([DraftRequest(request_id=request_id, context_ids=context, num_steps=num_steps, **rest)])
    return drafted


@pytest.mark.parametrize("seed", range(6))
def test_random_cycles_draft_what_the_reference_drafts(engine: Any, model: Any, seed: int) -> None:
    checked = harness.simulate_server(engine, model, seed=seed, cycles=40, max_num_seqs=MAX_NUM_SEQS)
    assert checked > 100


def test_prefill_in_chunks_drafts_the_same(engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._forward, "max_tokens", 48)
    checked = harness.simulate_server(
        engine, model, seed=11, cycles=120, max_num_seqs=4, may_be_silent=frozenset({Silence.PREFILLING})
    )
    assert checked > 40


def test_a_long_prompt_is_prefilled_in_bounded_passes_while_others_draft(
    engine: Any, model: Any, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._forward, "max_tokens", 64)
    short, long = _text(20, 1), _text(300, 2)
    reasons = []
    for _ in range(6):
        requests = [
            DraftRequest(request_id="long", context_ids=long, num_steps=2),
            DraftRequest(request_id="short", context_ids=short, num_steps=2),
        ]
        first, second = engine.draft(requests)
        reasons.append(first.reason)
        assert harness.check_proposal(model, requests[1], second) == 2
        short = [*short, second.ids_in_draft_vocab[0]]
    assert max(computed) <= 64
    assert reasons[:4] == [Silence.PREFILLING] * 4
    assert reasons[-1] is None
    harness.check_greedy(model, long, first.ids_in_draft_vocab)


@pytest.mark.parametrize("length", [1, 2, 125, 126, 127, 128, 129, 253, 256, 257, 383, 384, 385])
def test_drafting_across_a_block_boundary(engine: Any, model: Any, length: int) -> None:
    context = _text(length, length)
    drafted = _draft(engine, "a", context, 8)
    harness.check_greedy(model, context, drafted.ids_in_draft_vocab)
    # All accepted, then rolled back over the boundary, then on.
    for keep in (length + 8, length + 1, max(1, length - 3)):
        again = [*[*context, *drafted.ids_in_draft_vocab][:keep], 5]
        harness.check_greedy(model, again, _draft(engine, "a", again, 8).ids_in_draft_vocab)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [1, 7, 64, 10_000])
def test_laws_are_the_references_softmax_over_its_top_k(
    engine: Any, model: Any, temperature: float, top_k: int
) -> None:
    sampling = DraftSampling(temperature=temperature, top_k=top_k)
    context = _text(150, top_k)
    drafted = _draft(engine, "a", context, 5, sampling=sampling)
    harness.check_laws(model, context, drafted, sampling)


def test_draws_follow_their_laws(engine: Any) -> None:
    """Frequencies of the first token over many draws against its law, within five standard errors."""
    context = _text(10, 3)
    sampling = DraftSampling(temperature=2.0, top_k=8)
    counts: dict[int, int] = {}
    cycles = 60
    for _ in range(cycles):
        batch = [
            DraftRequest(request_id=f"{i}", context_ids=context, num_steps=1, sampling=sampling)
            for i in range(MAX_NUM_SEQS)
        ]
        for drafted in engine.draft(batch):
            token = drafted.ids_in_draft_vocab[0]
            counts[token] = counts.get(token, 0) + 1
    total = cycles * MAX_NUM_SEQS
    assert drafted.law_ids is not None
    assert drafted.law_probs is not None
    for token, prob in zip(drafted.law_ids[0].tolist(), drafted.law_probs[0].tolist(), strict=True):
        error = (prob * (1 - prob) / total) ** 0.5
        assert abs(counts.get(token, 0) / total - prob) < 5 * error + 1e-9
    assert sum(counts.values()) == total


def test_a_seeded_request_drafts_the_same_alone_and_in_a_batch(engine: Any) -> None:
    context = _text(40, 4)
    sampling = DraftSampling(temperature=1.5, top_k=16, seed=9)

    def cycles(others: list[DraftRequest]) -> list[list[int]]:
        found = []
        for steps in (5, 3, 4):
            mine = DraftRequest(request_id="mine", context_ids=context, num_steps=steps, sampling=sampling)
            found.append(engine.draft([*others, mine])[-1].ids_in_draft_vocab)
        engine.release("mine")
        return found

    wider = DraftSampling(temperature=0.9, top_k=50)
    crowd = [
        DraftRequest(request_id="wide", context_ids=_text(30, 5), num_steps=7, sampling=wider),
        DraftRequest(request_id="greedy", context_ids=_text(140, 6), num_steps=2),
        DraftRequest(
            request_id="other seed",
            context_ids=_text(9, 7),
            num_steps=6,
            sampling=DraftSampling(temperature=1.0, top_k=3, seed=1),
        ),
    ]
    assert cycles([]) == cycles(crowd)


def test_the_cache_is_reused_between_cycles(engine: Any, model: Any, computed: list[int]) -> None:
    context = _text(500, 8)
    drafted = _draft(engine, "a", context, 5).ids_in_draft_vocab
    assert computed == [500, 1, 1, 1, 1]
    computed.clear()
    # Three accepted and one of the verifier's: the third drafted token is in the cache already.
    context = [*context, *drafted[:3], (drafted[3] + 1) % harness.VOCAB_SIZE]
    harness.check_greedy(model, context, _draft(engine, "a", context, 2, num_stable=500).ids_in_draft_vocab)
    assert computed == [1, 1]


def test_a_prompt_sent_again_is_not_prefilled_again(engine: Any, model: Any, computed: list[int]) -> None:
    context = _text(500, 9)
    first = _draft(engine, "a", context, 3).ids_in_draft_vocab
    engine.release("a")
    computed.clear()
    assert _draft(engine, "b", context, 3).ids_in_draft_vocab == first
    # Three full blocks of 128 are reused; so they are while their first owner is still there.
    assert computed == [500 - 3 * BLOCK, 1, 1]
    computed.clear()
    other_end = [*context[:450], *_text(20, 10)]
    harness.check_greedy(model, other_end, _draft(engine, "c", other_end, 3).ids_in_draft_vocab)
    assert computed[0] == 470 - 3 * BLOCK
    computed.clear()
    other_start = [(context[0] + 1) % harness.VOCAB_SIZE, *context[1:]]
    harness.check_greedy(model, other_start, _draft(engine, "d", other_start, 3).ids_in_draft_vocab)
    assert computed[0] == 500
    harness.check_greedy(model, context, _draft(engine, "b", context, 3).ids_in_draft_vocab)


def test_rewriting_a_shared_prefix_does_not_touch_its_other_reader(engine: Any, model: Any) -> None:
    context = _text(400, 12)
    _draft(engine, "a", context)
    _draft(engine, "b", context)
    changed = [*context[:130], *_text(100, 13)]
    harness.check_greedy(model, changed, _draft(engine, "a", changed).ids_in_draft_vocab)
    longer = [*context, 7]
    harness.check_greedy(model, longer, _draft(engine, "b", longer).ids_in_draft_vocab)


def test_warming_then_drafting(engine: Any, model: Any, computed: list[int]) -> None:
    context = _text(90, 14)
    assert _draft(engine, "a", context, 0).reason is Silence.WARMING
    assert computed == [90]
    context += [1, 2]
    harness.check_greedy(model, context, _draft(engine, "a", context, 2).ids_in_draft_vocab)
    assert computed[1:] == [2, 1]


def test_an_empty_context_and_an_empty_batch_are_silent(engine: Any, model: Any) -> None:
    assert engine.draft([]) == []
    empty, other = engine.draft(
        [
            DraftRequest(request_id="empty", context_ids=[], num_steps=3),
            DraftRequest(request_id="other", context_ids=[4, 5], num_steps=3),
        ]
    )
    assert empty.ids_in_draft_vocab == []
    assert empty.reason is Silence.WARMING
    harness.check_greedy(model, [4, 5], other.ids_in_draft_vocab)
    context = _text(200)
    _draft(engine, "empty", context)
    assert _draft(engine, "empty", []).reason is Silence.WARMING
    harness.check_greedy(model, context, _draft(engine, "empty", context).ids_in_draft_vocab)


def test_past_its_own_length_a_request_is_silent_and_keeps_no_memory(engine: Any, model: Any) -> None:
    longest = _text(harness.MAX_MODEL_LEN - 3, 15)
    harness.check_greedy(model, longest, _draft(engine, "a", longest, 3).ids_in_draft_vocab)
    assert engine.num_requests == 1
    assert _draft(engine, "a", [*longest, 1], 3).reason is Silence.CONTEXT_TOO_LONG
    assert engine.num_requests == 0
    harness.check_greedy(model, longest, _draft(engine, "a", longest, 3, num_stable=len(longest)).ids_in_draft_vocab)


def test_more_requests_than_rows_wait_for_their_turn(engine: Any, model: Any) -> None:
    requests = [
        DraftRequest(request_id=f"{i}", context_ids=_text(10 + i, i), num_steps=2) for i in range(MAX_NUM_SEQS + 3)
    ]
    drafted = engine.draft(requests)
    assert [d.reason for d in drafted].count(Silence.PREFILLING) == 3
    for request, one in zip(requests, drafted, strict=True):
        harness.check_proposal(model, request, one, may_be_silent=frozenset({Silence.PREFILLING}))


def test_a_failing_pass_is_one_error_and_the_next_cycle_is_right(
    engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = _text(200, 16)
    _draft(engine, "a", context)
    with monkeypatch.context() as broken:
        broken.setattr(engine._model, "compute_logits", lambda hidden: hidden.no_such_thing)
        with pytest.raises(DraftEngineError, match="no_such_thing"):
            _draft(engine, "a", [*context, 3])
    assert engine.num_requests == 0
    harness.check_greedy(model, [*context, 3], _draft(engine, "a", [*context, 3]).ids_in_draft_vocab)


def test_a_broken_row_is_silent_alone_and_its_blocks_are_safe_to_use_again(engine: Any, model: Any) -> None:
    bad = harness.VOCAB_SIZE - 1
    weight = engine._model.model.embed_tokens.weight
    saved = weight.data[bad].clone()
    good = [i % (harness.VOCAB_SIZE - 2) for i in _text(200, 17)]
    try:
        weight.data[bad] = float("nan")
        poisoned = [*good[:150], bad, *good[150:]]
        for sampling in (None, DraftSampling(temperature=1.0, top_k=8)):
            broken, fine = engine.draft(
                [
                    DraftRequest(request_id="broken", context_ids=poisoned, num_steps=3, sampling=sampling),
                    DraftRequest(request_id="fine", context_ids=good, num_steps=3),
                ]
            )
            assert broken.reason is Silence.NOT_FINITE
            assert broken.ids_in_draft_vocab == []
            harness.check_greedy(model, good, fine.ids_in_draft_vocab)
        # Nobody reads what the broken row left behind: every block is handed out again, most only partly filled.
        for i in range(40):
            context = good[i : i + 140]
            harness.check_greedy(model, context, _draft(engine, f"after {i}", context, 2).ids_in_draft_vocab)
        shares_prefix = good[:150]
        harness.check_greedy(model, shares_prefix, _draft(engine, "prefix", shares_prefix, 2).ids_in_draft_vocab)
        long = [*good[:10], bad, *_text(250, 18)]  # its first block is offered to others, and broken
        assert _draft(engine, "long", long).reason is Silence.NOT_FINITE
    finally:
        weight.data[bad] = saved
    for request_id in ("long", "somebody else"):
        harness.check_greedy(model, long, _draft(engine, request_id, long).ids_in_draft_vocab)


def test_with_little_memory_idle_requests_give_way_and_busy_ones_are_silent(folder: Path, model: Any) -> None:
    with harness.vllm_engine(folder, draft_kv_cache_memory=5 * BLOCK_BYTES / (1 << 30)) as small:
        assert small._cache.num_blocks == 5
        free = small._blocks.num_free
        assert free == 4
        one, two, three = _text(200, 20), _text(200, 21), _text(200, 22)
        _draft(small, "one", one)
        _draft(small, "two", two)
        harness.check_greedy(model, three, _draft(small, "three", three).ids_in_draft_vocab)  # "one" was the coldest
        assert sorted(small._blocks._sequences) == ["three", "two"]
        batch = [
            DraftRequest(request_id=name, context_ids=text, num_steps=3)
            for name, text in (("one", one), ("two", two), ("three", three))
        ]
        drafted = small.draft(batch)
        assert sorted(str(d.reason) for d in drafted) == ["None", "None", "cache_exhausted"]
        for request, proposal in zip(batch, drafted, strict=True):
            harness.check_proposal(model, request, proposal, may_be_silent=frozenset({Silence.CACHE_EXHAUSTED}))
        assert _draft(small, "huge", _text(700)).reason is Silence.CACHE_EXHAUSTED
        checked = harness.simulate_server(
            small, model, seed=5, cycles=80, max_num_seqs=4, may_be_silent=frozenset({Silence.CACHE_EXHAUSTED})
        )
        assert checked > 30
        for name in list(small._blocks._sequences):
            small.release(name)
        assert small._blocks.num_free == free


def test_what_cannot_be_loaded_is_a_config_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draft model"), harness.vllm_engine(folder, draft_max_model_len=10**6):
        pass
    with (
        pytest.raises(ConfigError, match="at least 2 blocks"),
        harness.vllm_engine(folder, draft_kv_cache_memory=BLOCK_BYTES / (1 << 30)),
    ):
        pass


def test_the_embedded_pair_drafts_what_the_reference_drafts() -> None:
    from vllm_tokentiming.tiny_pair import tiny_pair

    folder = tiny_pair().draft
    model = harness.load_reference(folder)
    with harness.vllm_engine(folder) as engine:
        assert harness.simulate_server(engine, model, seed=3, cycles=30, max_num_seqs=4) > 60


@pytest.mark.real_models
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_real_models_draft_what_the_reference_drafts(model_folder: Callable[[str], Path], name: str) -> None:
    folder = model_folder(name)
    model = harness.load_reference(folder)
    with harness.vllm_engine(folder, draft_max_model_len=1024) as engine:
        # Longer than gemma's sliding window of 512, of which the cache keeps every block.
        context = [int(i) for i in np.random.default_rng(0).integers(1000, 20_000, 700)]
        harness.check_greedy(model, context, _draft(engine, "long", context, 4).ids_in_draft_vocab)
        assert harness.simulate_server(engine, model, seed=1, cycles=4, max_num_seqs=2, longest_prompt=150) > 4
