"""Top-k and top-p of candidates alone against a plain sort, and against vLLM's own function."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
stock = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")

from tests.reference.top_k_top_p import tokens_left  # noqa: E402
from vllm_tokentiming.vllm_adapter.top_k_top_p import apply_top_k_top_p  # noqa: E402

SIZES = (7, 64, 1003, 8 * 64 * 64 + 5)
LAWS = ("peaked", "flat", "bfloat16", "a grammar's", "one block")


def logits_of(law: str, *, rows: int, size: int, seed: int = 0):
    """Float32 [rows, size]: of a few likely tokens, of none, with many equals, with most impossible, or neighbours."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=generator)
    if law == "peaked":
        logits *= 4.0
    elif law == "bfloat16":
        logits = (3.0 * logits).bfloat16().float()
    elif law == "a grammar's":
        logits[:, torch.rand(size, generator=generator) < 0.9] = -torch.inf
        logits[:, -1] = 1.0
    elif law == "one block":
        logits[:, size // 2 : size // 2 + 50] += 9.0
    return logits


def left(logits) -> list[set[int]]:
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("k", "p"), [(1, 1.0), (5, 1.0), (20, 0.8), (5, 0.3), (None, 0.9), (None, 0.2), (None, 0.999)])
def test_what_is_left_is_what_a_plain_sort_leaves(size, law, k, p):
    logits = logits_of(law, rows=2, size=size)
    number = size if k is None else min(k, size)
    numbers = torch.full((2,), number, dtype=torch.int32) if k is not None else None
    actual = apply_top_k_top_p(logits.clone(), numbers, torch.full((2,), p))
    assert torch.equal(actual[actual.isfinite()], logits[actual.isfinite()])
    p = torch.tensor(p).item()  # as float32 has it
    for row, found in zip(logits.tolist(), left(actual), strict=True):
        possible = {token for token, logit in enumerate(row) if logit > -torch.inf}
        least, most = (tokens_left(row, k=number, p=mass) & possible for mass in (p - 1e-6, p + 1e-6))
        assert least <= found <= most
        assert found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("given", ["k", "p", "both"])
def test_equal_to_vllm(size, law, given):
    """Rows of every kind in one batch: with each limit, with both, with neither."""
    logits = logits_of(law, rows=5, size=size, seed=1)
    k = torch.tensor([3, size, 6, size, 1], dtype=torch.int32) if given != "p" else None
    p = torch.tensor([1.0, 0.9, 0.7, 1.0, 0.5]) if given != "k" else None
    expected = stock.apply_top_k_top_p_pytorch(logits.clone(), k, p, allow_cpu_sync=True)
    actual = apply_top_k_top_p(logits.clone(), k, p)
    if law == "bfloat16":  # which of the equals at top-p's edge stay is up to vLLM's sort, which is not stable
        actual, expected = actual.sort().values, expected.sort().values
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("law", LAWS)
def test_every_row_limited_is_equal_to_vllm_too(law):
    logits = logits_of(law, rows=3, size=1003, seed=2)
    k, p = torch.tensor([20, 4, 100], dtype=torch.int32), torch.tensor([0.8, 0.95, 1.0])
    expected = stock.apply_top_k_top_p_pytorch(logits.clone(), k, p, allow_cpu_sync=True)
    actual = apply_top_k_top_p(logits, k, p)
    assert actual.data_ptr() == logits.data_ptr()
    if law == "bfloat16":
        actual, expected = actual.sort().values, expected.sort().values
    assert torch.equal(actual, expected)


def test_equals_of_the_kth_stay_and_of_those_at_the_edge_of_top_p_the_earlier_ones_go():
    logits = torch.zeros(1, 200)
    logits[0, [10, 150]] = 2.0
    k = torch.tensor([1], dtype=torch.int32)
    assert left(apply_top_k_top_p(logits.clone(), k, None)) == [{10, 150}]
    assert left(apply_top_k_top_p(logits.clone(), k, torch.tensor([0.4]))) == [{150}]
    assert left(apply_top_k_top_p(torch.zeros(1, 200), None, torch.tensor([0.0525]))) == [set(range(189, 200))]


def test_without_rows_and_without_limits_nothing_changes():
    assert apply_top_k_top_p(torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None).shape == (0, 8)
    logits = logits_of("flat", rows=2, size=9)
    unlimited = apply_top_k_top_p(logits.clone(), torch.tensor([9, 9]), torch.tensor([1.0, 1.0]))
    assert torch.equal(unlimited, logits)
    assert torch.equal(apply_top_k_top_p(logits.clone(), None, None), logits)


def test_other_dtypes_and_strides():
    logits = logits_of("bfloat16", rows=3, size=500)
    k, p = torch.tensor([20, 4, 100], dtype=torch.int32), torch.tensor([0.8, 0.95, 1.0])
    expected = apply_top_k_top_p(logits.clone(), k, p)
    assert torch.equal(apply_top_k_top_p(logits.bfloat16(), k, p), expected.bfloat16())
    wider = torch.cat((logits, logits), dim=-1)[:, :500]
    assert not wider.is_contiguous()
    assert torch.equal(apply_top_k_top_p(wider, k, p), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_cannot_be_chosen_from_hurt_no_others(value):
    """A target that has gone astray: nothing is raised, and the other rows are what they are alone."""
    logits = logits_of("peaked", rows=3, size=1003)
    k, p = torch.tensor([1003, 4, 3], dtype=torch.int32), torch.tensor([0.8, 0.9, 0.5])
    expected = apply_top_k_top_p(logits.clone(), k, p)
    for row in (0, 1):
        astray = logits.clone()
        astray[row] = value
        actual = apply_top_k_top_p(astray, k, p)
        others = [other for other in range(3) if other != row]
        assert torch.equal(actual[others], expected[others])
        astray = logits.clone()
        astray[row, 77] = value
        assert torch.equal(apply_top_k_top_p(astray, k, p)[others], expected[others])
