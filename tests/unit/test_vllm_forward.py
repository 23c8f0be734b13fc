"""How a draft with weights of its own reads what it has to, some tokens a pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_tokentiming.engine.vllm_forward import _SHORT_PASS, DraftForward


class _Recorded:
    """A step whose hidden states are the ids, and whose logits are what it is asked about."""

    takes_every_pass = True

    def __init__(self) -> None:
        self.passes: list[list[tuple[int, int, int]]] = []

    def __call__(self, ids: torch.Tensor, **of_pass: Any) -> torch.Tensor:
        edges = of_pass["query_start"].tolist()
        rows = torch.repeat_interleave(of_pass["block_table"][:, 0], of_pass["query_start"].diff()).tolist()
        positions = of_pass["positions"].tolist()
        assert len(ids) == len(of_pass["slots"]) == edges[-1] <= _SHORT_PASS
        assert of_pass["seq_lens"].tolist() == [positions[edge - 1] + 1 for edge in edges[1:]]
        self.passes.append(list(zip(rows, positions, ids.tolist(), strict=True)))
        return ids.unsqueeze(1).clone()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [([0], [1]), ([0], [100]), ([31, 5, 64], [34, 1, 32]), ([0] * 40, [3] * 40), ([200, 0], [3, 500]), ([7], [32])],
)
def test_every_token_once_and_in_order(starts: list[int], lengths: list[int]) -> None:
    step, block_size = _Recorded(), 16
    cache: Any = SimpleNamespace(block_size=block_size, layer_names=list)
    config: Any = SimpleNamespace(model_config=SimpleNamespace(max_model_len=1024))
    forward = DraftForward(
        model=None, config=config, cache=cache, device=torch.device("cpu"), max_tokens=1000, max_requests=40
    )
    forward.hand_step = step
    ids = [[1000 * row + i for i in range(length)] for row, length in enumerate(lengths)]
    blocks = [[100 + row] + [0] * 63 for row in range(len(lengths))]
    last = forward.prefill(ids=ids, starts=starts, block_ids=blocks)
    assert last[:, 0].tolist() == [row[-1] for row in ids]
    taken = [token for one_pass in step.passes for token in one_pass]
    assert taken == [
        (100 + row, start + i, 1000 * row + i)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
        for i in range(length)
    ]
    assert len(step.passes) == -(-sum(lengths) // _SHORT_PASS)
