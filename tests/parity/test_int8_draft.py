"""Does ``draft_quantization='int8'`` give a draft that says nearly what the original says?"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_harness as harness
import pytest
import torch

from vllm_tokentiming.config import TokenTimingConfig
from vllm_tokentiming.engine import int8_checkpoint
from vllm_tokentiming.errors import ConfigError
from vllm_tokentiming.tiny_pair import tiny_pair

pytest.importorskip("vllm")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("VLLM_TOKENTIMING_CACHE", str(folder))
        yield folder / "int8"


TEXT = (
    "Return a list of the names in the current scope. If the argument is a class, its attributes are returned, and "
    "those of its bases, recursively. The list is sorted. Raise ValueError if the object has no name, or one that is "
    "not a string. The function open() opens a file and returns a file object, which can be used to read it."
)


def _logits(folder: Path, **options: Any) -> torch.Tensor:
    """After each of the tokens of a text but the first 8, [n, V]; the last ones from decode steps."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    with harness.vllm_engine(folder, draft_dtype="bfloat16", draft_max_model_len=1024, **options) as engine:
        forward = engine._forward
        assert forward.hand_step is not None
        forward.prefill(ids=[ids[:8]], starts=[0], block_ids=[[1, 2]])
        forward.begin_decode(lengths=[8], block_ids=[[1, 2]])
        return torch.cat([forward.decode_step(torch.tensor([token])).double() for token in ids[8:]])


def _agreement(folder: Path) -> tuple[float, float]:
    """How often both choose the same token, and the mean of Σ min(p, q)."""
    original, int8 = _logits(folder), _logits(folder, draft_quantization="int8")
    same = (original.argmax(1) == int8.argmax(1)).double().mean()
    overlap = torch.minimum(original.softmax(1), int8.softmax(1)).sum(1).mean()
    return float(same), float(overlap)


def test_the_tiny_pairs_draft_says_nearly_the_same() -> None:
    same, overlap = _agreement(tiny_pair().draft)
    assert same > 0.9
    assert 0.9 < overlap < 0.9999, "not the original itself"


@pytest.mark.real_models
def test_a_real_draft_says_nearly_the_same(model_folder: Callable[[str], Path]) -> None:
    same, overlap = _agreement(model_folder("smollm2-135m-instruct"))
    assert same > 0.75
    assert 0.8 < overlap < 0.9999


def test_body_and_head_are_int8_and_the_tokenizer_is_the_original() -> None:
    folder = tiny_pair().draft
    with harness.vllm_engine(folder, draft_dtype="bfloat16", draft_quantization="int8") as engine:
        model, config = engine._model, engine.config.model_config
        if config.quantization is None:
            assert "bfloat16, int8" in engine.describe()
            pytest.skip("vLLM keeps float weights on this CPU; those beside them are tested with the steps")
        layers = [model.lm_head]
        for layer in model.model.layers:
            layers += [layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]
        assert all(layer.weight.dtype == torch.int8 for layer in layers)
        assert model.model.embed_tokens.weight.dtype == torch.bfloat16
        assert config.tokenizer == str(folder)
        assert config.quantization == "compressed-tensors"
        assert "bfloat16, int8" in engine.describe()


def test_a_vocabulary_that_vllm_pads(tmp_path: Path) -> None:
    """Rows that vLLM adds to the head must not be said, nor their unset scales spoil the others."""
    folder = harness.make_random_llama(tmp_path, vocab_size=331, tie_word_embeddings=True)
    model = harness.load_reference(folder)
    with harness.vllm_engine(folder, draft_dtype="bfloat16", draft_quantization="int8") as engine:
        ids = list(range(100, 140))
        logits = engine._forward.prefill(ids=[ids], starts=[0], block_ids=[[1]]).double()
        assert logits.shape == (1, 331)
        expected = harness.reference_logits(model, ids, 1)
        assert torch.corrcoef(torch.cat([logits, expected]))[0, 1] > 0.95


def test_a_second_start_makes_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    options = {"draft_dtype": "bfloat16", "draft_quantization": "int8"}
    with harness.vllm_engine(tiny_pair().draft, **options):
        made = sorted(cache.iterdir())
    monkeypatch.setattr(int8_checkpoint, "_write", None)
    with harness.vllm_engine(tiny_pair().draft, **options):
        assert sorted(cache.iterdir()) == made


def _target() -> Any:
    from vllm.config import ModelConfig

    return ModelConfig(model=str(tiny_pair().target), dtype="bfloat16")


def test_the_front_end_refuses_what_cannot_be_int8_and_makes_nothing(tmp_path: Path, cache: Path) -> None:
    from vllm_tokentiming.engine.vllm_config import draft_model_config

    before = sorted(cache.iterdir()) if cache.exists() else []
    folder = Path(shutil.copytree(tiny_pair().draft, tmp_path / "draft"))
    options = TokenTimingConfig(draft_model=str(folder), draft_quantization="int8")
    assert draft_model_config(_target(), options).quantization is None
    with pytest.raises(ConfigError, match=r"torch\.float16. Required: bfloat16"):
        draft_model_config(_target(), dataclasses.replace(options, draft_dtype="float16"))
    quantized = int8_checkpoint.int8_checkpoint(tiny_pair().draft)
    shutil.copy(quantized / "config.json", folder / "config.json")
    with pytest.raises(ConfigError, match=r"quantised already \(compressed-tensors\)"):
        draft_model_config(_target(), options)
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    after = sorted(cache.iterdir())
    assert set(after) - set(before) <= {quantized}


def test_another_method_still_goes_to_vllm() -> None:
    from vllm_tokentiming.engine.vllm_config import draft_model_config

    options = TokenTimingConfig(draft_model=str(tiny_pair().draft), draft_quantization="no_such_method")
    with pytest.raises(ConfigError, match="no_such_method"):
        draft_model_config(_target(), options)
