"""The draft's own config: what it takes over from the target's, and what it must not."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch

from vllm_tokentiming import TokenTimingConfig
from vllm_tokentiming.errors import ConfigError
from vllm_tokentiming.tiny_pair import tiny_pair

pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache = tmp_path / "cache"
    monkeypatch.setenv("VLLM_TOKENTIMING_CACHE", str(cache))
    return cache


def target_config(**arguments):
    from vllm.engine.arg_utils import EngineArgs

    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, **arguments}
    return EngineArgs(model=str(tiny_pair().target), **arguments).create_engine_config()


def draft_config(*, target=None, **options):
    """The draft's config, and the target's that it was made of."""
    from vllm_tokentiming.engine.vllm_config import make_draft_vllm_config

    config = target_config(**(target or {}))
    chosen = TokenTimingConfig(**{"draft_model": str(tiny_pair().draft), **options})
    return make_draft_vllm_config(config, chosen), config


@pytest.mark.parametrize("chosen", [None, 64])
def test_a_block_size_that_nobody_chose_is_left_to_the_drafts_kernels(chosen):
    draft, target = draft_config(target={} if chosen is None else {"block_size": chosen})
    assert draft.cache_config is not target.cache_config
    assert draft.cache_config.block_size == target.cache_config.block_size
    assert draft.cache_config.user_specified_block_size == (chosen is not None)


def test_the_targets_reasoning_parser_is_not_the_drafts():
    """Its tokens are none of the draft's; a parser of a plugin is not even known where the draft is loaded."""
    from vllm.config import ReasoningConfig

    from vllm_tokentiming.engine.vllm_config import make_draft_vllm_config

    target = target_config()
    target.reasoning_config = ReasoningConfig(reasoning_parser="of a plugin")
    draft = make_draft_vllm_config(target, TokenTimingConfig(draft_model=str(tiny_pair().draft)))
    assert draft.reasoning_config is None
    assert target.reasoning_config.reasoning_parser == "of a plugin"


CPUS = {
    "AMX": {"avx512_vnni": True, "amx_tile": True},
    "VNNI": {"avx512_vnni": True},
    "AVX2": {"avx2": True},
}


@pytest.fixture
def cpu(monkeypatch):
    """Say what the CPU has, and whether kernels of our own run on it."""
    from vllm_tokentiming.engine import vllm_int8_layers

    def be(name, *, own_kernels=True):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: CPUS[name])
        monkeypatch.setattr(vllm_int8_layers, "why_unfit_place", lambda: None if own_kernels else "said by a test")

    return be


@pytest.fixture
def amx(cpu):
    """A CPU on which vLLM runs int8 drafts faster."""
    cpu("AMX")


BFLOAT16, FLOAT32 = {"dtype": "bfloat16"}, {"dtype": "float32"}


def int8_of_steps(target, draft, **options):
    from vllm_tokentiming.engine.vllm_config import int8_weights_of_steps

    chosen = TokenTimingConfig(**{"draft_model": str(tiny_pair().draft), **options})
    return int8_weights_of_steps(target, draft.model_config, chosen)


@pytest.mark.parametrize(
    ("machine", "asked", "place"),
    [
        ("AMX", (BFLOAT16, "auto"), "vLLM"),
        ("AMX alone", (BFLOAT16, "auto"), "vLLM"),
        ("AMX", (FLOAT32, "auto"), "steps"),
        ("AMX alone", (FLOAT32, "auto"), None),
        ("VNNI", (BFLOAT16, "auto"), "steps"),
        ("VNNI alone", (BFLOAT16, "auto"), "vLLM"),
        ("VNNI", (FLOAT32, "int8"), "steps"),
        ("AVX2", (BFLOAT16, "auto"), "steps"),
        ("AVX2", (FLOAT32, "auto"), "steps"),
        ("AVX2", (FLOAT32, "int8"), "steps"),
        ("AVX2", (FLOAT32, None), None),
        ("AVX2 alone", (BFLOAT16, "auto"), None),
        ("AVX2 alone", (BFLOAT16, "int8"), "vLLM"),
        ("AMX", (BFLOAT16, None), None),
    ],
)
def test_where_int8_weights_go(cpu, cache, machine, asked, place):
    """A machine "alone" has no kernels of our own."""
    name, *alone = machine.split()
    dtype, quantization = asked
    cpu(name, own_kernels=not alone)
    draft, target = draft_config(target=dtype, draft_quantization=quantization)
    assert draft.model_config.quantization == ("compressed-tensors" if place == "vLLM" else None)
    assert draft.model_config.model.startswith(str(cache if place == "vLLM" else tiny_pair().draft))
    assert draft.model_config.tokenizer == str(tiny_pair().draft)
    folder = int8_of_steps(target, draft, draft_quantization=quantization)
    assert (folder is not None) is (place == "steps")
    assert cache.exists() is (place is not None)


def test_float16_cannot_be_int8(cpu):
    cpu("AVX2")
    with pytest.raises(ConfigError, match=r"torch.float16. Required: bfloat16; or float32"):
        draft_config(target=BFLOAT16, draft_dtype="float16", draft_quantization="int8")


def test_float32_cannot_be_int8_where_only_vllm_could_run_it(cpu):
    cpu("AMX", own_kernels=False)
    with pytest.raises(ConfigError, match=r"torch.float32. Required: bfloat16"):
        draft_config(target=FLOAT32, draft_quantization="int8")


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_int8_weights_leave_the_tokenizer_and_its_revision_as_they_were(amx, quantization):
    draft, _ = draft_config(target=BFLOAT16, draft_revision="v2", draft_quantization=quantization)
    own = draft.model_config
    assert (own.tokenizer, own.tokenizer_revision, own.revision) == (str(tiny_pair().draft), "v2", None)


def test_an_architecture_of_which_none_was_run_must_be_asked_for(cpu, tmp_path):
    cpu("VNNI", own_kernels=False)
    folder = shutil.copytree(tiny_pair().draft, tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MistralForCausalLM"]}))
    assert draft_config(target=BFLOAT16, draft_model=str(folder))[0].model_config.quantization is None


@pytest.mark.parametrize("name", ["AMX", "AVX2"])
def test_a_draft_without_safetensors_stays_as_it_is_and_the_log_says_so(cpu, tmp_path, caplog, name):
    cpu(name)
    folder = shutil.copytree(tiny_pair().draft, tmp_path / "draft")
    (folder / "model.safetensors").rename(folder / "model.bin")
    with caplog.at_level(logging.INFO, logger="vllm_tokentiming"):
        draft, target = draft_config(target=BFLOAT16, draft_model=str(folder))
        assert int8_of_steps(target, draft, draft_model=str(folder)) is None
    assert draft.model_config.quantization is None
    assert "keeps its weights as they are" in caplog.text
