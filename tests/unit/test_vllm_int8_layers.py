"""Weights that vLLM packed and weights of a checkpoint give the same regions; what does not fit is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")

from vllm_tokentiming.engine import vllm_int8_layers as int8_layers
from vllm_tokentiming.engine.int8_weights import Int8File, pack

pytestmark = pytest.mark.skipif(int8_layers.why_unfit_place() is not None, reason=str(int8_layers.why_unfit_place()))

WIDTH, QUERIES, KEYS, MLP, VOCAB, LAYERS, ROWS = 64, 64, 32, 96, 70, 2, 3
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
SHAPES = {
    "q_proj": (QUERIES, WIDTH), "k_proj": (KEYS, WIDTH), "v_proj": (KEYS, WIDTH), "o_proj": (WIDTH, QUERIES),
    "gate_proj": (MLP, WIDTH), "up_proj": (MLP, WIDTH), "down_proj": (WIDTH, MLP),
}  # fmt: skip


def _norm() -> Any:
    return SimpleNamespace(weight=torch.nn.Parameter(torch.rand(WIDTH) + 0.5), variance_epsilon=1e-5)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Layers as vLLM leaves them after packing, and a folder with the checkpoint that they came from."""
    torch.manual_seed(0)
    monkeypatch.setattr(int8_layers, "is_packed_int8", lambda _product: True)
    tensors, layers = {}, []
    for number in range(LAYERS):
        products = {}
        for fused in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            weights, scales = [], []
            for part in PARTS.get(fused, (fused,)):
                weights.append(torch.randint(-127, 128, SHAPES[part], dtype=torch.int8))
                scales.append(1e-3 * torch.rand(SHAPES[part][0], 1))
                block = "self_attn" if part in {"q_proj", "k_proj", "v_proj", "o_proj"} else "mlp"
                tensors[f"model.layers.{number}.{block}.{part}.weight"] = weights[-1]
                tensors[f"model.layers.{number}.{block}.{part}.weight_scale"] = scales[-1]
            bias = torch.randn(sum(map(len, weights))).bfloat16() if fused == "qkv_proj" else None
            products[fused] = SimpleNamespace(
                weight=torch.nn.Parameter(pack(torch.cat(weights)), requires_grad=False),
                weight_scale=torch.nn.Parameter(torch.cat(scales), requires_grad=False),
                bias=None if bias is None else torch.nn.Parameter(bias),
                skip_bias_add=False,
                bias_fp32=None if bias is None else torch.nn.Parameter(bias.float()),
            )
        layers.append(
            SimpleNamespace(
                self_attn=SimpleNamespace(qkv_proj=products["qkv_proj"], o_proj=products["o_proj"]),
                mlp=SimpleNamespace(gate_up_proj=products["gate_up_proj"], down_proj=products["down_proj"]),
                input_layernorm=_norm(),
                post_attention_layernorm=_norm(),
            )
        )
    tensors["lm_head.weight"] = torch.randint(-127, 128, (VOCAB, WIDTH), dtype=torch.int8)
    tensors["lm_head.weight_scale"] = 1e-3 * torch.rand(VOCAB, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    embedding = SimpleNamespace(weight=torch.nn.Parameter(torch.randn(VOCAB, WIDTH).bfloat16()))
    return SimpleNamespace(
        model=SimpleNamespace(layers=layers, embed_tokens=embedding, norm=_norm()),
        logits_processor=SimpleNamespace(scale=1.0, soft_cap=None, org_vocab_size=VOCAB),
        lm_head=SimpleNamespace(),
        folder=tmp_path,
    )


def _run(layers: Any) -> list[torch.Tensor]:
    """Queries, keys and values of both layers, and the hidden states, for the same tokens and attention."""
    qkv, normed = torch.zeros(ROWS, QUERIES + 2 * KEYS).bfloat16(), torch.zeros(ROWS, WIDTH).bfloat16()
    attended = torch.randn(ROWS, QUERIES, generator=torch.Generator().manual_seed(1)).bfloat16()
    layers.prepare(qkv=qkv, attended=attended, normed=normed)
    found = []
    regions = layers.before_layers(torch.tensor([5, 69, 0]))
    for region in regions:
        found.append(qkv.clone())
        layers.after_attention(region)
    return [*found, normed.clone()]


def test_both_sources_give_the_same(model: Any) -> None:
    assert int8_layers.why_unfit(model.model) is None
    by_vllm = int8_layers.of_packed_model(model.model)
    by_us = int8_layers.of_checkpoint(model.model, Int8File(model.folder))
    for one, other in zip(_run(by_vllm), _run(by_us), strict=True):
        assert one.float().std() > 0
        assert torch.equal(one, other)


def test_a_head(model: Any) -> None:
    head = int8_layers.head_of_checkpoint(model, Int8File(model.folder))
    assert head is not None
    hidden = torch.randn(2, WIDTH)
    logits = head.logits(hidden)
    assert logits.shape == (2, VOCAB)
    assert torch.equal(logits[1:], head.logits(hidden[1:]))
    tensors = load_file(model.folder / "model.safetensors")
    expected = hidden @ (tensors["lm_head.weight"].float() * tensors["lm_head.weight_scale"]).T
    assert (logits - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("change", [{"scale": 2.0}, {"soft_cap": 30.0}, {"org_vocab_size": VOCAB - 6}])
def test_a_head_that_does_more_stays_vllms(model: Any, change: dict[str, Any]) -> None:
    vars(model.logits_processor).update(change)
    assert int8_layers.head_of_checkpoint(model, Int8File(model.folder)) is None


def _coarse_scales(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight_scale = torch.ones(1)


def _half(model: Any) -> None:
    model.model.embed_tokens.weight = torch.zeros(VOCAB, WIDTH, dtype=torch.float16)


def _narrow(model: Any) -> None:
    product = model.model.layers[0].self_attn.o_proj
    product.weight = torch.zeros(16, QUERIES + 4, dtype=torch.int8)
    product.weight_scale = torch.ones(16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_coarse_scales, "not one float32 scale for each output channel"),
        (_half, "activations are torch.float16"),
        (_narrow, "16 output channels of 64 inputs do not divide into blocks"),
    ],
)
def test_what_does_not_fit_is_said(model: Any, change: Callable[[Any], None], said: str) -> None:
    change(model)
    assert said in str(int8_layers.why_unfit(model.model))
