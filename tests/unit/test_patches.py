"""Each patch: the fault shows in stock vLLM, and is gone with the patch. In fresh processes: patches are for good."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the faults are those of vLLM on CPU")

WORKING = {
    "expand": [0.5, 1.0, 1.0],
    "top_k": [0, 8],
    "sorted_entries": [0, [[2, 3], [1, 2, 3]]],
    "rewind": {"discarded draw comes again": True, "other draw goes on": True, "rows": [0, 1]},
    "padding": [[2, -1]],
    "numbers": False,
    "bonus": [0, [[1, 2, -1]]],
    "draws": [[3, 60], [3, 60]],
    "counted": [0, [[4.0, 2.0, 0.0, 4.0]]],
    "budget": [[3, 3, 2], [3, 3, 3]],
    "inherited": [[0, 2], []],
}


@functools.cache
def outcomes(*arguments: str) -> dict[str, object]:
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("patch_cases.py")), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("case", WORKING)
def test_the_fault_shows_in_stock_vllm(case):
    assert outcomes()[case] != WORKING[case]


@pytest.mark.parametrize("case", WORKING)
def test_the_patch_mends_it(case):
    assert outcomes("patched")[case] == WORKING[case]


def test_every_fault_was_found_by_its_probe():
    assert outcomes("patched")["applied"] == [
        "expand_batch_to_tokens",
        "top-k and top-p of candidates",
        "generator rewind",
        "block verification",
        "direct verification",
        "drawing by one number",
        "penalties of seen tokens",
        "thinking budget without proposals",
        "thinking budget of finished requests",
    ]
