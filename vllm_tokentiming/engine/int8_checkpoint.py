"""Where are the draft's weights as int8? Made from any folder with safetensors, once, into a cache folder.

The format is compressed-tensors' ``int-quantized`` W8A8, which vLLM detects by itself: int8 weights [N, K] with one
float32 scale [N, 1] for each output channel, and activations that the kernel rounds to int8 token by token. vLLM cannot
make such weights itself on CPU. Owns the cache folder. Imports neither numba nor vLLM.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_tokentiming.errors import ConfigError

logger = logging.getLogger(__name__)

INT8: Final = "int8"
"""The value of ``draft_quantization`` that asks for this."""

AUTO: Final = "auto"
"""The value that asks for it where it is likely to make drafting faster, and can be had."""

CACHE_VARIABLE: Final = "VLLM_TOKENTIMING_CACHE"
"""Names the cache folder; default: ``vllm-tokentiming`` in ``XDG_CACHE_HOME``, else in ``~/.cache``."""

_FORMAT = 1
"""To be raised when the same source would give other files."""

_INDEX = "model.safetensors.index.json"
_MANIFEST = "complete.json"
_LINEAR = re.compile(r"\.(?:q|k|v|o|qkv|gate|up|down|gate_up)_proj\.weight$")
_EMBEDDING = re.compile(r"(?:^|\.)embed_tokens\.weight$")
_HEAD = "lm_head.weight"
_INT8_HEAD = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""vLLM gives their heads the scheme of a linear layer, also where the embedding was tied to it. Others keep theirs."""


def cache_folder() -> Path:
    """Where int8 checkpoints are kept."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser() / INT8
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm-tokentiming" / INT8


def int8_checkpoint(source: Path) -> Path:
    """The folder with the int8 weights of the model in ``source``; made if it is not there, or not whole.

    Safe against other processes doing the same: each writes a folder of its own, and the first to be done wins.

    Raises:
        ConfigError: the model is quantised already, has no safetensors, or linear layers of unknown names; or the
            cache cannot be written.
    """
    config = _read_config(source)
    shards = _shards(source)
    folder = cache_folder() / _identity(source, shards)
    if _is_whole(folder):
        logger.info("the draft's int8 weights are in %s", folder)
        return folder
    logger.info("making int8 weights of %s, once, in %s", source, folder)
    began = time.monotonic()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            _write(source, config, shards, made)
            _move(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"the draft's int8 weights cannot be written to {folder.parent}: {error}. Required: room for about "
            f"half the size of the draft. Name another folder with {CACHE_VARIABLE}, or leave draft_quantization out."
        ) from error
    logger.info("made the draft's int8 weights in %.1f s", time.monotonic() - began)
    return folder


def require_not_quantized(config: dict[str, Any], name: str) -> None:
    """Refuse a model whose weights are quantised already.

    Raises:
        ConfigError
    """
    present = config.get("quantization_config") or config.get("compression_config")
    if present:
        method = present.get("quant_method") if isinstance(present, dict) else present
        raise ConfigError(
            f"draft_quantization is 'int8', and the draft {name!r} is quantised already ({method}). Required: a draft "
            "with float weights. Leave draft_quantization out: vLLM detects the draft's own format."
        )


def _read_config(source: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the config.json of the draft in {source} cannot be read: {error}. Required with "
            "draft_quantization='int8': a model's folder."
        ) from error
    require_not_quantized(config, str(source))
    return config


def _shards(source: Path) -> list[Path]:
    """The files with weights: those of the index where there is one, as repositories hold other copies beside them."""
    index = source / _INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        found = [source / name for name in names]
    else:
        found = sorted(source.glob("*.safetensors"))
    if not found or not all(path.is_file() for path in found):
        raise ConfigError(
            f"draft_quantization='int8' needs a draft with .safetensors files; {source} has "
            f"{'not all that its index names' if found else 'none'}. Save the model anew, or leave the option out."
        )
    return found


def _identity(source: Path, shards: list[Path]) -> str:
    digest = hashlib.sha256(f"{_FORMAT}\n".encode())
    for path in (source / "config.json", *shards):
        resolved = path.resolve()
        stat = resolved.stat()
        digest.update(f"{resolved}\n{stat.st_size}\n{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _is_whole(folder: Path) -> bool:
    """Whether all files are there as they were written."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest) and all(_checksum(folder / name) == checksum for name, checksum in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            value = zlib.crc32(part, value)
    return value


def _move(made: Path, folder: Path) -> None:
    for _ in range(3):
        try:
            made.rename(folder)
        except OSError:
            if _is_whole(folder):  # another process was first
                return
            # What is there is broken: out of the way, into our own folder, which is deleted at the end.
            broken = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
            try:
                if folder.exists():
                    folder.rename(broken / "broken")
            except FileNotFoundError:
                pass  # somebody else has moved it
            finally:
                shutil.rmtree(broken, ignore_errors=True)
        else:
            return
    made.rename(folder)


def _write(source: Path, config: dict[str, Any], shards: list[Path], made: Path) -> None:
    int8_head = bool(_INT8_HEAD.intersection(config.get("architectures") or ()))
    kept_linear: list[str] = []  # two-dimensional weights that stay float
    weight_map: dict[str, str] = {}
    embedding: tuple[str, torch.Tensor] | None = None
    num_quantized = 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        written: dict[str, torch.Tensor] = {}
        for key, tensor in _read(shard):
            if "experts" in key or tensor.ndim > 2:
                raise ConfigError(
                    f"draft_quantization='int8' takes dense drafts; {source} has {key} {tuple(tensor.shape)}. "
                    "Leave the option out."
                )
            if _LINEAR.search(key) or (key == _HEAD and int8_head):
                written |= _quantized(key, tensor)
                num_quantized += 1
                continue
            written[key] = tensor
            if _EMBEDDING.search(key):
                embedding = (name, tensor)
            elif tensor.ndim == 2 and key.endswith(".weight"):
                kept_linear.append(key.removesuffix(".weight"))
        weight_map |= dict.fromkeys(written, name)
        if number == len(shards) and int8_head and _HEAD not in weight_map and embedding is not None:
            # The head was the embedding; its own int8 copy is what the step reads, the embedding stays float.
            head = _quantized(_HEAD, embedding[1])
            written |= head
            weight_map |= dict.fromkeys(head, name)
        save_file(written, made / name, metadata={"format": "pt"})
    if not num_quantized:
        raise ConfigError(
            f"draft_quantization='int8' finds no linear layer that it knows (q_proj, gate_proj, …) in {source}. Leave "
            "the option out, or choose another draft."
        )
    untied = {"tie_word_embeddings": False} if _HEAD in weight_map else {}
    _write_json(made / "config.json", {**config, **untied, "quantization_config": _scheme(int8_head, kept_linear)})
    _write_json(made / _INDEX, {"metadata": {}, "weight_map": weight_map})
    for path in (*source.glob("generation_config.json"), *source.glob("*.py")):
        shutil.copyfile(path, made / path.name)
    _write_json(made / _MANIFEST, {path.name: _checksum(path) for path in sorted(made.iterdir())})


def _read(shard: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(shard, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                yield key, file.get_tensor(key)
    except SafetensorError as error:
        raise ConfigError(
            f"the draft's weights in {shard} cannot be read: {error}. Fetch or save the model anew."
        ) from error


def _quantized(key: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    wide = weight.float()
    scale = wide.abs().amax(dim=1, keepdim=True) / 127
    # A channel of zeros has no scale; any other than 0 gives its zeros back.
    scale = torch.where(scale > 0, scale, 1.0)
    return {key: (wide / scale).round().to(torch.int8), f"{key}_scale": scale}


def _scheme(int8_head: bool, kept: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": kept,
        "config_groups": {
            "group_0": {
                "targets": ["Linear", "re:.*lm_head"] if int8_head else ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
