"""What cannot work is refused before anything is loaded; the error says found, required, remedy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_tokentiming.errors import ConfigError, UnsupportedModelError, UnsupportedVLLMError, VocabularyError
from vllm_tokentiming.tiny_pair import tiny_pair

PLAIN = {"method": "custom_class", "model": "vllm_tokentiming.TokenTimingProposer", "num_speculative_tokens": 4}

Check = Callable[..., Any]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """What ``vllm serve`` does with its arguments before it starts an engine."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    def create(speculative: dict[str, Any] | None, **arguments: Any) -> Any:
        return EngineArgs(
            model=str(tiny_pair().target),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            speculative_config=speculative,
            **arguments,
        ).create_engine_config()

    return create


def method(draft: object = None, num_speculative_tokens: object = 5, **options: Any) -> dict[str, Any]:
    model = str(draft or tiny_pair().draft)
    return {"method": "tokentiming", "model": model, "num_speculative_tokens": num_speculative_tokens, **options}


def save_model(folder: Path, *, architecture: str, tokenizer: str) -> Path:
    """A folder as a Hub download would leave it, without weights: they are never reached."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import BertConfig, LlamaConfig, PreTrainedTokenizerFast

    config_type = BertConfig if architecture.startswith("Bert") else LlamaConfig
    config_type(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        architectures=[architecture],
    ).save_pretrained(folder)
    if tokenizer == "WordPiece":
        vocabulary = {w: i for i, w in enumerate(["[UNK]", "[CLS]", "[SEP]", "the", "a", "##a", "##b"])}
        fast = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        fast.pre_tokenizer, fast.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]").save_pretrained(folder)
    return folder


def test_the_good_case_passes_both_ways(check):
    for config in (
        check(method()),
        check(PLAIN, additional_config={"tokentiming": {"draft_model": str(tiny_pair().draft)}}),
    ):
        assert config.speculative_config.method == "custom_class"
        assert config.additional_config["tokentiming"]["draft_model"] == str(tiny_pair().draft)


def test_other_methods_are_left_alone(check):
    config = check({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3})
    assert config.speculative_config.method == "ngram"
    assert "tokentiming" not in (config.additional_config or {})
    assert check(None).speculative_config is None


def test_the_scheduler_is_ours_unless_another_is_named(check):
    def name(chosen: Any) -> str:
        return chosen if isinstance(chosen, str) else f"{chosen.__module__}.{chosen.__qualname__}"

    assert name(check(method()).scheduler_config.scheduler_cls).endswith("scheduler.UnpaddedScheduler")
    own = "vllm.v1.core.sched.scheduler.Scheduler"
    assert name(check(method(), scheduler_cls=own).scheduler_config.scheduler_cls) == own
    assert check(None).scheduler_config.scheduler_cls is None


def test_pipeline_parallel_on_cpu(check):
    from vllm.platforms import current_platform

    if current_platform.device_type != "cpu":
        pytest.skip("only vLLM's CPU worker dies of it")
    with pytest.raises(UnsupportedVLLMError, match=r"--pipeline-parallel-size is 2.*Required on CPU: one stage.*Use"):
        check(method(), pipeline_parallel_size=2)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "~/nowhere"])
def test_missing_draft_path(check, path):
    with pytest.raises(ConfigError, match=rf"draft model '{path}' does not exist.*Required: .*Correct the path"):
        check(method(path))


def test_missing_draft_tokenizer_path(check):
    with pytest.raises(ConfigError, match=r"draft_tokenizer '/no/such/tokenizer' does not exist.*Required: "):
        check(method(draft_tokenizer="/no/such/tokenizer"))


def test_folder_without_a_model(check, tmp_path):
    with pytest.raises(
        ConfigError, match=rf"cannot use '{tmp_path}' as a draft model.*Required: .*config\.json.*Check"
    ):
        check(method(tmp_path))


def test_draft_without_a_tokenizer(check, tmp_path):
    folder = save_model(tmp_path, architecture="LlamaForCausalLM", tokenizer="none")
    with pytest.raises(
        ConfigError, match=r"(?s)tokenizer .* cannot be loaded.*Required: .*tokenizer\.json.*draft_tokenizer"
    ):
        check(method(folder))


def test_draft_of_an_unknown_tokenizer_kind(check, tmp_path):
    folder = save_model(tmp_path, architecture="LlamaForCausalLM", tokenizer="WordPiece")
    with pytest.raises(VocabularyError, match=rf"{tmp_path} is a WordPiece model.*is required.*Use a model with"):
        check(method(folder))


@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM"])
def test_encoder_only_draft(check, tmp_path, architecture):
    folder = save_model(tmp_path, architecture=architecture, tokenizer="WordPiece")
    with pytest.raises(
        UnsupportedModelError, match=rf"{architecture}\) does not generate text.*Required: .*Choose another"
    ):
        check(method(folder))


@pytest.mark.parametrize("number", [0, -1, 129, 1000])
@pytest.mark.parametrize(
    "speculative", [method, lambda num_speculative_tokens: {**PLAIN, "num_speculative_tokens": num_speculative_tokens}]
)
def test_number_of_speculative_tokens(check, number, speculative):
    with pytest.raises(ConfigError, match=rf"num_speculative_tokens is {number}; it must be .* from 1 to 128.*: 5\."):
        check(speculative(num_speculative_tokens=number), additional_config={})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_radios": 3}, "'window_radios'.*Did you mean 'window_radius'.*Known options: "),
        ({"transfer": "best"}, "transfer is 'best'; it must be one of 'exact'"),
        ({"transfer": "paper"}, "transfer='paper'.*changes.*Set allow_lossy=true.*or use"),
        ({"quantization": "nonsense"}, r"Unknown quantization method: nonsense\. Must be one of"),
        ({"draft_max_model_len": 100_000}, r"max_model_len \(100000\) is greater than"),
        ({"special_token_pairs": [["<|im_end|>", "</nope>"]]}, "'</nope>'.*not an added token.*Write the literal"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options(check, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check(method(**options))
    assert "[type=" not in str(caught.value)


@pytest.mark.parametrize("model", [PLAIN["model"], "vllm_tokentiming.proposer.TokenTimingProposer"])
def test_the_plain_form_without_options(check, model):
    with pytest.raises(ConfigError, match=r'no draft model is named.*"draft_model" in --additional-config'):
        check({**PLAIN, "model": model})


def test_the_plain_form_with_options_of_the_wrong_type(check):
    with pytest.raises(ConfigError, match="--additional-config is 'draft'; it must be an object"):
        check(PLAIN, additional_config={"tokentiming": "draft"})


def test_another_vllm(check, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.31.0")
    with pytest.raises(UnsupportedVLLMError, match=r"vLLM 0\.31\.0 is installed.*supports 0\.32\.x.*pip install"):
        check(method())
    assert check(None).speculative_config is None


def test_the_other_model_runner(check, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(UnsupportedVLLMError, match=r"VLLM_USE_V2_MODEL_RUNNER=1 is set.*Required: .*Unset"):
        check(method())


@pytest.mark.server
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": "/no/such/draft"},
            r"'/no/such/draft' does not exist on this machine\. Required: .*Correct the path\.",
        ),
        ({"num_speculative_tokens": 1000}, r"num_speculative_tokens is 1000; it must be .* from 1 to 128"),
    ],
    ids=["path", "number"],
)
def test_the_command_line_ends_with_the_reason(change, message):
    speculative = json.dumps({**method(), **change})
    done = subprocess.run(
        [
            Path(sys.executable).with_name("vllm"),
            "serve",
            str(tiny_pair().target),
            "--enforce-eager",
            "--dtype",
            "float32",
            "--max-model-len",
            "256",
            "--port",
            "0",
            "--speculative-config",
            speculative,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    assert done.returncode not in (0, None)
    last = done.stdout.strip().splitlines()[-1]
    assert re.search(message, last), done.stdout[-3000:]
