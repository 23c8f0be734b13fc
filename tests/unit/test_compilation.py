"""The kernels' cache: it notices changed callees, and does without where nothing can be written."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numba import types
from numba.core import caching
from numba.core.dispatcher import Dispatcher

import vllm_tokentiming
from vllm_tokentiming.alignment import kernel
from vllm_tokentiming.compilation import callback, compiled_and_cached

pytestmark = pytest.mark.skipif(not isinstance(kernel.align_batch, Dispatcher), reason="numba is switched off")

COST_AND_CACHE_HITS = """
import numpy as np
from vllm_tokentiming.alignment import Aligner, kernel
table = np.frombuffer(b"aaabbb", np.uint8), np.array([0, 3, 6], np.int32)
one = np.array([0, 1], np.int32)
cost = Aligner(*table, *table, window_radius=8).align(one[:1], one, one[1:], one).cost[0]
print(cost, sum(kernel.align_batch.stats.cache_hits.values()))
"""


def test_without_a_writable_folder_the_kernel_is_compiled_and_a_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    with caplog.at_level(logging.WARNING, logger="vllm_tokentiming"):
        doubled = compiled_and_cached(lambda number: 2 * number)
    assert doubled(21) == 42
    assert "NUMBA_CACHE_DIR" in caplog.text


def test_without_a_writable_folder_a_callback_is_compiled_too(monkeypatch, caplog):
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    def doubled(number):
        return 2 * number

    with caplog.at_level(logging.WARNING, logger="vllm_tokentiming"):
        function = callback(doubled, types.int64(types.int64))
    assert function.ctypes(21) == 42
    assert "The kernel doubled is compiled at every start" in caplog.text


def test_a_changed_callee_is_not_served_from_the_cache(tmp_path):
    package = tmp_path / "vllm_tokentiming"
    shutil.copytree(
        Path(vllm_tokentiming.__file__).parent / "alignment",
        package / "alignment",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("errors.py", "compilation.py"):
        shutil.copy(Path(vllm_tokentiming.__file__).with_name(name), package)
    (package / "__init__.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run() -> str:
        command = [sys.executable, "-c", COST_AND_CACHE_HITS]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
        ).stdout.strip()

    assert run() == "3 0"
    assert run() == "3 1"
    callee = package / "alignment" / "levenshtein.py"
    before = callee.read_text()
    after = before.replace("return distance\n", "return distance + 100\n")
    assert after != before
    callee.write_text(after)
    assert run() == "103 0"
