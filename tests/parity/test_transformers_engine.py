"""Does the Hugging Face draft engine, with its caches and rollbacks, draft what the same model does from scratch?"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_harness as harness
import numpy as np
import pytest
import torch

from vllm_tokentiming.engine.interface import DraftedTokens, DraftRequest, DraftSampling, Silence
from vllm_tokentiming.errors import ConfigError, DraftEngineError, UnsupportedModelError

TOKEN_BYTES = 2 * 2 * 32 * 4  # keys and values, layers, head size, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.make_random_llama(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return harness.load_reference(folder)


@pytest.fixture
def engine(folder: Path) -> Any:
    return harness.transformers_engine(folder)


@pytest.fixture
def computed(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward pass."""
    passes: list[int] = []
    append = engine._append

    def counting(sequence: Any, ids: list[int]) -> torch.Tensor:
        passes.append(len(ids))
        return append(sequence, ids)

    monkeypatch.setattr(engine, "_append", counting)
    return passes


def _text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(harness.VOCAB_SIZE) for _ in range(length)]


def _draft(engine: Any, request_id: str, context: list[int], num_steps: int = 4, **rest: Any) -> DraftedTokens:
    (drafted,) = engine.draft([DraftRequest(request_id=request_id, context_ids=context, num_steps=num_steps, **rest)])
    return drafted


@pytest.mark.parametrize("seed", range(3))
def test_random_cycles_draft_what_the_reference_drafts(engine: Any, model: Any, seed: int) -> None:
    assert harness.simulate_server(engine, model, seed=seed, cycles=40, max_num_seqs=6) > 100
    assert engine.num_requests == 0


def test_prefill_in_chunks_drafts_the_same(engine: Any, model: Any, computed: list[int]) -> None:
    engine._max_prefill_tokens = 48
    silent = frozenset({Silence.PREFILLING})
    assert harness.simulate_server(engine, model, seed=11, cycles=80, max_num_seqs=3, may_be_silent=silent) > 30
    assert max(computed) == 48


@pytest.mark.parametrize("top_k", [1, 7, 10_000])
def test_laws_are_the_references_softmax_over_its_top_k(engine: Any, model: Any, top_k: int) -> None:
    sampling = DraftSampling(temperature=1.3, top_k=top_k)
    context = _text(60, top_k)
    harness.check_laws(model, context, _draft(engine, "a", context, 5, sampling=sampling), sampling)


def test_the_cache_is_reused_between_cycles(engine: Any, model: Any, computed: list[int]) -> None:
    context = _text(100, 8)
    drafted = _draft(engine, "a", context, 5).ids_in_draft_vocab
    assert computed == [100, 1, 1, 1, 1]
    computed.clear()
    context = [*context, *drafted[:3], (drafted[3] + 1) % harness.VOCAB_SIZE]
    harness.check_greedy(model, context, _draft(engine, "a", context, 2, num_stable=100).ids_in_draft_vocab)
    assert computed == [1, 1]
    assert _draft(engine, "a", [*context, 1], 0).reason is Silence.WARMING
    engine.release("a")
    engine.release("never seen")
    computed.clear()
    _draft(engine, "a", context, 1)
    assert computed == [len(context)]


def test_an_empty_context_and_an_empty_batch_are_silent(engine: Any, model: Any) -> None:
    assert engine.draft([]) == []
    empty, other = engine.draft(
        [
            DraftRequest(request_id="empty", context_ids=[], num_steps=3),
            DraftRequest(request_id="other", context_ids=[4, 5], num_steps=3),
        ]
    )
    assert empty.reason is Silence.WARMING
    harness.check_greedy(model, [4, 5], other.ids_in_draft_vocab)


def test_past_its_own_length_a_request_is_silent_and_keeps_no_memory(folder: Path, model: Any) -> None:
    engine = harness.transformers_engine(folder, draft_max_model_len=64)
    assert engine.max_model_len == 64
    context = _text(60)
    harness.check_greedy(model, context, _draft(engine, "a", context, 4).ids_in_draft_vocab)
    assert _draft(engine, "a", [*context, 1], 4).reason is Silence.CONTEXT_TOO_LONG
    assert engine.num_requests == 0
    assert harness.transformers_engine(folder).max_model_len == harness.MAX_MODEL_LEN


def test_with_little_memory_idle_requests_give_way_and_busy_ones_are_silent(folder: Path, model: Any) -> None:
    engine = harness.transformers_engine(folder, draft_kv_cache_memory=300 * TOKEN_BYTES / (1 << 30))
    assert engine.bytes_per_token == TOKEN_BYTES
    assert "300 tokens" in engine.describe()
    texts = {name: _text(120, seed) for seed, name in enumerate(["one", "two", "three"])}
    for name, text in texts.items():
        harness.check_greedy(model, text, _draft(engine, name, text).ids_in_draft_vocab)
    assert list(engine._sequences) == ["two", "three"]  # "one" was the coldest
    batch = [DraftRequest(request_id=name, context_ids=text, num_steps=3) for name, text in texts.items()]
    drafted = engine.draft(batch)
    assert [d.reason for d in drafted].count(Silence.CACHE_EXHAUSTED) == 1
    for request, proposal in zip(batch, drafted, strict=True):
        harness.check_proposal(model, request, proposal, may_be_silent=frozenset({Silence.CACHE_EXHAUSTED}))
    assert sum(len(sequence.ids) for sequence in engine._sequences.values()) <= 300
    assert _draft(engine, "huge", _text(301)).reason is Silence.CACHE_EXHAUSTED
    silent = frozenset({Silence.CACHE_EXHAUSTED})
    assert harness.simulate_server(engine, model, seed=5, cycles=60, max_num_seqs=4, may_be_silent=silent) > 30


def test_a_broken_row_is_silent_alone(engine: Any, model: Any) -> None:
    bad = harness.VOCAB_SIZE - 1
    good = [i % bad for i in _text(50, 17)]
    with torch.no_grad():
        engine._model.get_input_embeddings().weight[bad] = float("nan")
    broken, fine = engine.draft(
        [
            DraftRequest(request_id="broken", context_ids=[*good, bad, 1], num_steps=3),
            DraftRequest(request_id="fine", context_ids=good, num_steps=3),
        ]
    )
    assert broken.reason is Silence.NOT_FINITE
    assert broken.ids_in_draft_vocab == []
    harness.check_greedy(model, good, fine.ids_in_draft_vocab)
    harness.check_greedy(model, good, _draft(engine, "broken", good).ids_in_draft_vocab)


def test_a_failing_pass_is_one_error_and_the_next_cycle_is_right(
    engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = _text(40, 16)
    _draft(engine, "a", context)
    with monkeypatch.context() as broken:
        broken.setattr(engine._model, "forward", lambda **_: 1 / 0)
        with pytest.raises(DraftEngineError, match="ZeroDivisionError"):
            _draft(engine, "a", [*context, 3])
    assert engine.num_requests == 0
    harness.check_greedy(model, [*context, 3], _draft(engine, "a", [*context, 3]).ids_in_draft_vocab)


def test_a_sliding_window_model_rolls_back_past_its_window(tmp_path: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.5,
        max_position_embeddings=512,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    model = harness.load_reference(tmp_path)
    engine = harness.transformers_engine(tmp_path)
    assert harness.simulate_server(engine, model, seed=2, cycles=40, max_num_seqs=3, longest_prompt=60) > 60


@pytest.mark.parametrize("architecture", ["mamba", "jamba"])
def test_a_model_whose_state_cannot_roll_back_is_refused(tmp_path: Path, architecture: str) -> None:
    from transformers import JambaConfig, JambaForCausalLM, MambaConfig, MambaForCausalLM

    if architecture == "mamba":
        small = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4))
    else:
        small = JambaForCausalLM(
            JambaConfig(
                vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
                num_experts=2, num_key_value_heads=1, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4,
                use_mamba_kernels=False, mamba_dt_rank=2,
            )
        )  # fmt: skip
    small.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"cannot roll back.*Required of a draft.*Choose another"):
        harness.transformers_engine(tmp_path)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
        initializer_range=0.5
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="Required of a draft"):
        harness.transformers_engine(tmp_path)


def test_what_cannot_be_loaded_or_done_is_a_config_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot load .*Required: a folder or Hub id"):
        harness.transformers_engine(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "no such architecture"}')
    with pytest.raises(ConfigError, match="Required: a folder or Hub id"):
        harness.transformers_engine(tmp_path)
    with pytest.raises(ConfigError, match=f"at most {harness.MAX_MODEL_LEN} tokens"):
        harness.transformers_engine(folder, draft_max_model_len=harness.MAX_MODEL_LEN + 1)
    with pytest.raises(ConfigError, match="engine='vllm'"):
        harness.transformers_engine(folder, draft_quantization="fp8")
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        harness.transformers_engine(folder, draft_kv_cache_memory=TOKEN_BYTES / (1 << 30))


def test_the_options_dtype_wins_over_the_targets(folder: Path) -> None:
    engine = harness.transformers_engine(folder, draft_dtype="bfloat16")
    assert engine._model.dtype is torch.bfloat16
    assert "bfloat16" in engine.describe()
    assert len(_draft(engine, "a", _text(20), 3).ids_in_draft_vocab) == 3


@pytest.mark.real_models
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_real_models_draft_what_the_reference_drafts(model_folder: Callable[[str], Path], name: str) -> None:
    folder = model_folder(name)
    model = harness.load_reference(folder)
    engine = harness.transformers_engine(folder, draft_max_model_len=1024)
    context = [int(i) for i in np.random.default_rng(0).integers(1000, 20_000, 700)]
    harness.check_greedy(model, context, _draft(engine, "long", context, 4).ids_in_draft_vocab)
    shorter = [*context[:600], 5]
    harness.check_greedy(model, shorter, _draft(engine, "long", shorter, 4).ids_in_draft_vocab)
