"""Runs a test file once more in a process without numba's compiler."""

from __future__ import annotations

import os
import subprocess
import sys


def run_uncompiled(test_file: str) -> str:
    """What pytest says of the file; it must pass."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error::RuntimeWarning", test_file],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
