"""Either way in becomes vLLM's custom_class form, and bad input is refused in words."""

from __future__ import annotations

import platform

import pytest
import torch

from vllm_tokentiming.errors import ConfigError, UnsupportedVLLMError
from vllm_tokentiming.plugin import METHOD, PROPOSER, rewrite
from vllm_tokentiming.vllm_adapter.compat import (
    check_layout,
    check_version,
    require_supported_vllm,
    warn_of_costly_verification,
)


def test_the_method_becomes_custom_class_and_the_rest_becomes_options():
    speculative, options = rewrite(
        {"method": METHOD, "model": "draft", "num_speculative_tokens": 5, "quantization": "fp8", "window_radius": 4},
        None,
    )
    assert speculative == {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 5}
    assert (options.draft_model, options.draft_quantization, options.window_radius) == ("draft", "fp8", 4)


def test_the_plain_form_takes_its_options_from_additional_config():
    plain = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 3}
    speculative, options = rewrite(plain, {"draft_model": "draft"})
    assert speculative == plain
    assert options.draft_model == "draft"


@pytest.mark.parametrize("value", [0, -1, 129, 1000, True, "5", 2.5, None])
def test_num_speculative_tokens_out_of_range(value):
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is .* from 1 to 128"):
        rewrite({"method": METHOD, "model": "draft", "num_speculative_tokens": value}, None)


def test_num_speculative_tokens_missing():
    with pytest.raises(ConfigError, match="num_speculative_tokens is missing"):
        rewrite({"method": METHOD, "model": "draft"}, None)


def test_no_draft_model():
    with pytest.raises(ConfigError, match="no draft model is named"):
        rewrite({"method": METHOD, "num_speculative_tokens": 5}, None)


def test_unknown_key_names_the_nearest_option():
    with pytest.raises(ConfigError, match=r"'window_radios'.*'window_radius'"):
        rewrite({"method": METHOD, "model": "d", "num_speculative_tokens": 5, "window_radios": 3}, None)


def test_an_option_set_twice():
    with pytest.raises(ConfigError, match="draft_model is set twice"):
        rewrite({"method": METHOD, "model": "d", "num_speculative_tokens": 5}, {"draft_model": "e"})
    with pytest.raises(ConfigError, match="draft_dtype is set twice"):
        rewrite(
            {"method": METHOD, "model": "d", "num_speculative_tokens": 5, "dtype": "auto", "draft_dtype": "auto"}, None
        )


def test_the_plain_form_takes_no_options_in_speculative_config():
    with pytest.raises(ConfigError, match=r"window_radius.*--additional-config"):
        rewrite(
            {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 3, "window_radius": 8},
            {"draft_model": "d"},
        )


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.0.0", "nightly", "0.3.2"])
def test_other_vllm_versions_are_refused_with_the_remedy(version):
    with pytest.raises(UnsupportedVLLMError, match=r"pip install 'vllm==0\.32\.0'"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.1rc1.dev3+gabc"])
def test_supported_versions_pass(version):
    assert check_version(version) is None


def test_a_version_that_was_not_tried_passes_with_a_warning(caplog):
    with caplog.at_level("WARNING", logger="vllm_tokentiming"):
        check_version("0.33.0+cu130")
    assert "0.33.0+cu130" in caplog.text
    assert "has not been run on it" in caplog.text


def test_the_v2_model_runner_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(UnsupportedVLLMError, match="VLLM_USE_V2_MODEL_RUNNER"):
        require_supported_vllm()


def test_pipeline_parallelism_on_cpu_is_refused_with_the_remedy():
    with pytest.raises(UnsupportedVLLMError, match=r"--pipeline-parallel-size is 2.*--tensor-parallel-size"):
        check_layout(pipeline_parallel_size=2, device_type="cpu")
    check_layout(pipeline_parallel_size=1, device_type="cpu")
    check_layout(pipeline_parallel_size=2, device_type="cuda")


@pytest.mark.parametrize(
    ("other", "warned"),
    [
        ({}, True),
        ({"bfloat16_kernels": True}, False),
        ({"machine": "aarch64"}, False),
        ({"device_type": "cuda"}, False),
        ({"dtype": torch.float32}, False),
    ],
)
def test_who_serves_where_no_proposal_can_pay_is_told_what_to_do(monkeypatch, caplog, other, warned):
    case = {
        "machine": "x86_64", "bfloat16_kernels": False, "device_type": "cpu", "dtype": torch.bfloat16, **other
    }  # fmt: skip
    monkeypatch.setattr(platform, "machine", lambda: case["machine"])
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: case["bfloat16_kernels"])
    warn_of_costly_verification(device_type=case["device_type"], dtype=case["dtype"])
    assert ("Serve with --dtype float32" in caplog.text) is warned
