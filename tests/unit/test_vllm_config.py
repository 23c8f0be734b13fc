"""The draft's own config: what it takes over from the target's, and what it must not."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch

from vllm_tokentiming import TokenTimingConfig
from vllm_tokentiming.tiny_pair import tiny_pair

pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_TOKENTIMING_CACHE", str(tmp_path / "cache"))


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


@pytest.fixture
def vnni(monkeypatch):
    """A CPU on which int8 was found to be faster."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": True})


BFLOAT16 = {"dtype": "bfloat16"}


def test_a_bfloat16_draft_on_a_cpu_that_gains_by_it_becomes_int8(vnni, tmp_path):
    draft, _ = draft_config(target=BFLOAT16)
    assert draft.model_config.quantization == "compressed-tensors"
    assert draft.model_config.model.startswith(str(tmp_path / "cache"))
    assert draft.model_config.tokenizer == str(tiny_pair().draft)


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_int8_weights_leave_the_tokenizer_and_its_revision_as_they_were(vnni, quantization):
    draft, _ = draft_config(target=BFLOAT16, draft_revision="v2", draft_quantization=quantization)
    own = draft.model_config
    assert (own.tokenizer, own.tokenizer_revision, own.revision) == (str(tiny_pair().draft), "v2", None)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ({"dtype": "float32"}, {}),
        (BFLOAT16, {"draft_dtype": "float32"}),
        (BFLOAT16, {"draft_quantization": None}),
    ],
    ids=["float32", "float32 draft", "null"],
)
def test_other_drafts_stay_as_they_are(vnni, tmp_path, target, options):
    draft, _ = draft_config(target=target, **options)
    assert draft.model_config.quantization is None
    assert draft.model_config.model == str(tiny_pair().draft)
    assert not (tmp_path / "cache").exists()


def test_on_other_cpus_it_must_be_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert draft_config(target=BFLOAT16)[0].model_config.quantization is None
    asked, _ = draft_config(target=BFLOAT16, draft_quantization="int8")
    assert asked.model_config.quantization == "compressed-tensors"


def test_an_architecture_of_which_none_was_run_must_be_asked_for(vnni, tmp_path):
    folder = shutil.copytree(tiny_pair().draft, tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MistralForCausalLM"]}))
    assert draft_config(target=BFLOAT16, draft_model=str(folder))[0].model_config.quantization is None


def test_a_draft_without_safetensors_stays_as_it_is_and_the_log_says_so(vnni, tmp_path, caplog):
    folder = shutil.copytree(tiny_pair().draft, tmp_path / "draft")
    (folder / "model.safetensors").rename(folder / "model.bin")
    with caplog.at_level(logging.INFO, logger="vllm_tokentiming"):
        draft, _ = draft_config(target=BFLOAT16, draft_model=str(folder))
    assert draft.model_config.quantization is None
    assert "keeps its weights as they are" in caplog.text
