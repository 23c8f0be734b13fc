"""Penalties of seen tokens alone against vLLM's own, which write every logit: equal to the last bit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
layers = pytest.importorskip("vllm.model_executor.layers.utils")

from vllm_tokentiming.vllm_adapter.penalties import apply_penalties  # noqa: E402

ROWS, SIZE = 6, 97


def case(seed: int, *, prompt_length: int, output_length: int) -> tuple:
    """Rows with penalties of every kind, one of them without any; tokens come more than once; pads at the ends."""
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(ROWS, SIZE, generator=generator)
    logits[:, ::11] = -torch.inf
    logits[:, 1::13] = 0.0
    prompts, outputs = (
        torch.randint(SIZE // 3, (ROWS, length), generator=generator) for length in (prompt_length, output_length)
    )
    for row in range(ROWS):
        prompts[row, prompt_length - row :] = SIZE
        outputs[row, max(output_length - 2 * row, 0) :] = SIZE
    presence = torch.tensor([0.0, 0.7, 0.0, 0.0, -1.3, 0.4])
    frequency = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.9, -0.2])
    repetition = torch.tensor([1.0, 1.0, 1.0, 1.1, 1.3, 0.8])
    return logits, prompts, outputs, presence, frequency, repetition


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("prompt_length", "output_length"), [(40, 30), (7, 1), (12, 0)])
def test_equal_to_vllm(seed, prompt_length, output_length):
    logits, *rest = case(seed, prompt_length=prompt_length, output_length=output_length)
    expected = layers.apply_penalties(logits.clone(), *rest)
    unchanged = logits.clone()
    actual = apply_penalties(logits, *rest)
    assert actual.data_ptr() == logits.data_ptr()
    assert torch.equal(actual, expected)
    assert torch.equal(actual[0], unchanged[0])
    assert not torch.equal(actual[3:], unchanged[3:])
