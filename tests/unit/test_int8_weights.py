"""The int8 weights that steps read beside a model that keeps its own: packed as the kernels take them, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from reference.int8_layers import packed
from safetensors.torch import save_file

from vllm_tokentiming.engine.int8_weights import Int8File, Int8Weights, LayerWeights, pack


def _int8(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("channels", "depth"), [(32, 4), (96, 40), (64, 576)])
def test_packing_is_the_references(channels: int, depth: int) -> None:
    weights = _int8(channels, depth)
    found = pack(weights)
    assert found.is_contiguous()
    assert np.array_equal(found.numpy(), packed(weights.numpy()))


@pytest.mark.parametrize("shape", [(31, 8), (48, 8), (32, 6)])
def test_what_does_not_divide_into_blocks_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{shape[0]} output channels of {shape[1]} inputs do not divide"):
        pack(_int8(*shape))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"packed": torch.zeros(32, 12)}, "not contiguous int8"),
        ({"packed": torch.zeros(12, 32, dtype=torch.int8).t()}, "not contiguous int8"),
        ({"scales": torch.zeros(31)}, r"scales are torch.float32 \(31,\), not float32 \[32\]"),
        ({"scales": torch.zeros(32, dtype=torch.bfloat16)}, "scales are torch.bfloat16"),
        ({"biases": torch.zeros(33)}, "biases are"),
    ],
)
def test_weights_are_what_the_kernels_read(change: dict[str, torch.Tensor], said: str) -> None:
    good = {"packed": torch.zeros(32, 12, dtype=torch.int8), "scales": torch.zeros(32), "biases": torch.zeros(32)}
    Int8Weights(**good)
    with pytest.raises(ValueError, match=said):
        Int8Weights(**{**good, **change})


SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
NO_BIASES = dict.fromkeys(("qkv", "output", "gate_up", "down"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One layer and a head of 70 tokens, in two files."""
    tensors = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        tensors[f"model.layers.0.{name}.weight"] = _int8(*shape, seed=seed)
        tensors[f"model.layers.0.{name}.weight_scale"] = torch.full((shape[0], 1), 1.0 + seed)
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    head = {"lm_head.weight": _int8(70, 64), "lm_head.weight_scale": torch.ones(70, 1)}
    save_file(head, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def test_a_layers_projections_are_fused_in_vllms_order(folder: Path) -> None:
    bias = torch.arange(128, dtype=torch.bfloat16)
    layer = Int8File(folder).layer(0, {**NO_BIASES, "qkv": bias})
    assert isinstance(layer, LayerWeights)
    assert layer.why_unfit() is None
    parts = [_int8(*shape, seed=seed) for seed, shape in enumerate(SHAPES.values())]
    assert torch.equal(layer.qkv.packed, pack(torch.cat(parts[:3])))
    assert layer.qkv.scales.tolist() == [1.0] * 64 + [2.0] * 32 + [3.0] * 32
    assert layer.qkv.biases is not None
    assert torch.equal(layer.qkv.biases, bias.float())
    assert torch.equal(layer.gate_up.packed, pack(torch.cat(parts[4:6])))
    assert torch.equal(layer.output.packed, pack(parts[3]))
    assert torch.equal(layer.down.packed, pack(parts[6]))
    assert layer.down.biases is None


def test_a_head_is_filled_up_with_zeros(folder: Path) -> None:
    head = Int8File(folder).head(70)
    assert head is not None
    filled = torch.cat([_int8(70, 64), torch.zeros(26, 64, dtype=torch.int8)])
    assert torch.equal(head.packed, pack(filled))
    assert head.scales.tolist() == [1.0] * 70 + [0.0] * 26


def test_a_head_of_another_size_or_none_is_not_taken(folder: Path) -> None:
    assert Int8File(folder).head(64) is None
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert Int8File(folder).head(70) is None
