"""Through vLLM: the law of the first tokens is the same with speculation and without, and the test can tell."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from statistical.two_samples import Comparison, compare

from vllm_tokentiming.tiny_pair import tiny_pair

pytestmark = pytest.mark.engine

DEPTH = 3
DEFAULT_SAMPLES, LONG_SAMPLES = 20_000, 34_000
"""Of each law; the long tier's six laws make 204,000."""
ONE_LAW = {"T1": {"temperature": 1.0}}
# One batch of mixed temperatures and truncations, in the proportions of a server with many kinds of users.
MIXED_LAWS = {
    "T0.3": {"temperature": 0.3},
    "T0.7": {"temperature": 0.7},
    "T1": {"temperature": 1.0},
    "T1.5": {"temperature": 1.5},
    "T1 top_p": {"temperature": 1.0, "top_p": 0.9},
    "T1 top_k": {"temperature": 1.0, "top_k": 20},
}


def speculation(transfer: str, **options: Any) -> dict[str, Any]:
    return {
        "method": "tokentiming",
        "model": str(tiny_pair().draft),
        "num_speculative_tokens": 4,
        "adaptive_length": False,
        "repeats": False,
        "transfer": transfer,
        **options,
    }


@functools.cache
def sampled(job: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sample_worker.py")), job],
        capture_output=True,
        text=True,
        timeout=4 * 3600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


def run(
    speculative: dict[str, Any] | None,
    *,
    laws: dict[str, Any],
    samples: int,
    seed: int,
    shift_rows: bool = False,
    stops: bool = False,
) -> dict[str, Any]:
    job = {
        "speculative": speculative,
        "laws": laws,
        "samples": samples,
        "depth": DEPTH,
        "seed": seed,
        "shift_rows": shift_rows,
        "stops": stops,
    }
    return sampled(json.dumps(job, sort_keys=True))


def comparisons(speculative: dict[str, Any], *, laws: dict[str, Any], samples: int, **options: Any) -> list[Comparison]:
    without = run(None, laws=laws, samples=samples, seed=1)
    with_speculation = run(speculative, laws=laws, samples=samples, seed=2, **options)
    assert with_speculation["speculation"]["vllm:spec_decode_num_accepted_tokens"] > samples * len(laws) / 20
    return [compare(without["counts"][name], with_speculation["counts"][name]) for name in laws]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transfer", ["point_mass", "exact"])
def test_the_law_of_the_first_tokens_is_the_targets(transfer):
    (result,) = comparisons(speculation(transfer), laws=ONE_LAW, samples=DEFAULT_SAMPLES)
    assert result.cells > 100
    assert result.p > 0.01, result
    assert result.total_variation < result.noise, result


@pytest.mark.timeout(1800)
def test_the_law_is_the_targets_where_drafts_stop_early_and_texts_repeat():
    adaptive = speculation("exact", repeats=True)
    (result,) = comparisons(adaptive, laws=ONE_LAW, samples=DEFAULT_SAMPLES, stops=True)
    counted = run(adaptive, laws=ONE_LAW, samples=DEFAULT_SAMPLES, seed=2, stops=True)["speculation"]
    assert counted["appended_tokens"] > DEFAULT_SAMPLES / 20
    # They are found out not to pay before long.
    assert counted["repeats"] > DEFAULT_SAMPLES / 100
    assert result.p > 0.01, result
    assert result.total_variation < result.noise, result


@pytest.mark.timeout(1800)
def test_rows_shifted_by_one_request_are_noticed():
    # The fault is a small one: DEFAULT_SAMPLES may see it at 2e-6 only, and another draw at less.
    shifted = speculation("exact", draft_temperature=1.0)
    (result,) = comparisons(shifted, laws=ONE_LAW, samples=LONG_SAMPLES, shift_rows=True)
    assert result.p < 1e-6, result


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("transfer", ["exact", "exact, adaptive", "point_mass", "tli", "slem"])
def test_every_law_of_a_mixed_batch_is_the_targets(transfer):
    transfer, _, adaptive = transfer.partition(", ")
    options = {"stops": True} if adaptive else {}
    speculative = speculation(transfer, repeats=bool(adaptive))
    results = comparisons(speculative, laws=MIXED_LAWS, samples=LONG_SAMPLES, **options)
    # Bonferroni: one test of six may not be the one that fails by chance.
    assert min(result.p for result in results) > 0.01 / len(results), results
    assert all(result.total_variation < result.noise for result in results), results


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_the_papers_transfer_is_noticed():
    lossy = speculation("paper", allow_lossy=True)
    (result,) = comparisons(lossy, laws=ONE_LAW, samples=LONG_SAMPLES)
    assert result.p < 1e-6, result
