"""Are int8 weights made once, whole, and right?"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_tokentiming.engine import int8_checkpoint as module
from vllm_tokentiming.engine.int8_checkpoint import cache_folder, int8_checkpoint
from vllm_tokentiming.errors import ConfigError
from vllm_tokentiming.tiny_pair import tiny_pair

SOURCE = tiny_pair().draft


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_TOKENTIMING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "int8"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the tiny pair's draft, to be changed."""
    return Path(shutil.copytree(SOURCE, tmp_path / "draft"))


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        # Copies: the file may be cut while its pages are in use.
        tensors |= {name: tensor.clone() for name, tensor in load_file(path).items()}
    return tensors


def _change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_weights_are_rounded_to_the_nearest_of_255_steps_of_their_channel() -> None:
    made, original = _weights(int8_checkpoint(SOURCE)), _weights(SOURCE)
    scales = {name.removesuffix("_scale") for name in made if name.endswith("_scale")}
    linear = {name for name in original if name.endswith("_proj.weight")}
    assert scales == linear | {"lm_head.weight"}
    original["lm_head.weight"] = original["model.embed_tokens.weight"]  # the tied head gets its own
    for name in scales:
        weight, scale = original[name].float(), made[f"{name}_scale"]
        assert made[name].dtype == torch.int8
        assert scale.dtype == torch.float32
        assert scale.shape == (len(weight), 1)
        torch.testing.assert_close(scale, weight.abs().amax(1, keepdim=True) / 127)
        error = (made[name].float() * scale - weight).abs()
        assert (error <= scale * 0.5001).all()
        assert (made[name].abs().amax(1) == 127).all()
    for name in original.keys() - scales:
        assert torch.equal(made[name], original[name]), name


def test_the_config_says_how_to_read_them() -> None:
    folder = int8_checkpoint(SOURCE)
    config, index = (
        json.loads((folder / name).read_text()) for name in ("config.json", "model.safetensors.index.json")
    )
    original = json.loads((SOURCE / "config.json").read_text())
    scheme = config.pop("quantization_config")
    assert config == original | {"tie_word_embeddings": False}
    assert (scheme["quant_method"], scheme["format"]) == ("compressed-tensors", "int-quantized")
    assert scheme["config_groups"]["group_0"]["targets"] == ["Linear", "re:.*lm_head"]
    assert set(index["weight_map"]) == set(_weights(folder))


def test_it_is_made_once_and_again_when_the_source_changes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = int8_checkpoint(source)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", None)  # making it again would fail
        assert int8_checkpoint(source) == first
    stat = (source / "model.safetensors").stat()
    os.utime(source / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert int8_checkpoint(source) != first
    with monkeypatch.context() as patch:
        patch.setattr(module, "_FORMAT", module._FORMAT + 1)
        assert int8_checkpoint(source) != first


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing weights", "missing manifest", "empty folder", "a file"])
def test_what_is_broken_is_made_anew(source: Path, cache: Path, damage: str) -> None:
    folder = int8_checkpoint(source)
    expected = _weights(folder)
    (weights,) = folder.glob("*.safetensors")
    if damage == "cut":
        os.truncate(weights, weights.stat().st_size // 2)
    elif damage == "flipped":
        content = bytearray(weights.read_bytes())
        content[-5] ^= 1
        weights.write_bytes(content)
    elif damage == "missing weights":
        weights.unlink()
    elif damage == "missing manifest":
        (folder / "complete.json").unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir() if damage == "empty folder" else folder.write_text("?")
    assert int8_checkpoint(source) == folder
    again = _weights(folder)
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    assert [path.name for path in cache.iterdir()] == [folder.name], "something was left behind"


def test_a_failure_leaves_nothing_behind(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **rest: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(ConfigError, match=r"No space left.*VLLM_TOKENTIMING_CACHE"):
        int8_checkpoint(source)
    assert list(cache.iterdir()) == []


def _make(results: Any) -> None:
    results.put(str(int8_checkpoint(SOURCE)))


def test_two_processes_at_once_get_the_same_whole_folder(cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    both = [context.Process(target=_make, args=(results,)) for _ in range(2)]
    for process in both:
        process.start()
    folders = {results.get(timeout=120) for _ in both}
    for process in both:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert {Path(folder) for folder in folders} == set(cache.iterdir())
    assert module._is_whole(Path(folders.pop()))


def test_the_one_that_is_second_takes_the_firsts(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = module._write

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(module, "_write", write)
        int8_checkpoint(source)  # another process makes it in the meantime
        write(*arguments)

    monkeypatch.setattr(module, "_write", overtaken)
    assert module._is_whole(int8_checkpoint(source))


def test_several_files_and_an_untied_head(source: Path) -> None:
    weights = _weights(source)
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"], dtype=torch.float32)
    weights["model.layers.0.self_attn.q_proj.weight"][3] = 0  # a channel that is never on
    names = sorted(weights)
    parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, keys in parts.items():
        save_file({key: weights[key] for key in keys}, source / file)
    index = {key: file for file, keys in parts.items() for key in keys}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    _change_config(source, tie_word_embeddings=False)
    folder = int8_checkpoint(source)
    made = _weights(folder)
    assert len(list(folder.glob("*.safetensors"))) == 2, "model.safetensors is not in the index"
    head = weights["lm_head.weight"]
    assert ((made["lm_head.weight"].float() * made["lm_head.weight_scale"] - head).abs() < head.abs().max() / 200).all()
    assert not made["model.layers.0.self_attn.q_proj.weight"][3].any()
    assert torch.isfinite(made["model.layers.0.self_attn.q_proj.weight_scale"]).all()


def test_the_head_of_an_architecture_that_was_not_tried_stays_float(source: Path) -> None:
    _change_config(source, architectures=["Gemma3ForCausalLM"])
    folder = int8_checkpoint(source)
    assert "lm_head.weight" not in _weights(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["quantization_config"]["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TOKENTIMING_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_folder() == Path("/one/int8")
    monkeypatch.delenv("VLLM_TOKENTIMING_CACHE")
    assert cache_folder() == Path("/two/vllm-tokentiming/int8")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/vllm-tokentiming/int8"


def _no_weights(source: Path) -> None:
    (source / "model.safetensors").unlink()


def _broken_weights(source: Path) -> None:
    os.truncate(source / "model.safetensors", 100)


def _quantized(source: Path) -> None:
    _change_config(source, quantization_config={"quant_method": "gptq", "bits": 4})


def _experts(source: Path) -> None:
    weights = _weights(source)
    weights["model.layers.0.mlp.experts.0.up_proj.weight"] = torch.zeros(4, 4)
    save_file(weights, source / "model.safetensors")


def _other_names(source: Path) -> None:
    save_file({"transformer.h.0.c_attn.weight": torch.zeros(4, 4)}, source / "model.safetensors")


def _no_config(source: Path) -> None:
    (source / "config.json").unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_no_weights, "safetensors"),
        (_broken_weights, "cannot be read"),
        (_quantized, r"quantised already \(gptq\)"),
        (_experts, "dense"),
        (_other_names, "no linear layer"),
        (_no_config, "config.json"),
    ],
)
def test_what_cannot_be_made_int8_is_refused(source: Path, cache: Path, change: Any, said: str) -> None:
    change(source)
    with pytest.raises(ConfigError, match=said):
        int8_checkpoint(source)
    assert not cache.exists() or list(cache.iterdir()) == []
