"""Starts and ends ``vllm serve`` for the tests. Owns the server's process group and its folder of metrics."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_tokentiming.tiny_pair import tiny_pair

MODEL = "tiny"
MAX_MODEL_LEN = 512
START_SECONDS = 400.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers, or did."""

    url: str
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def group_is_alive(self) -> bool:
        self.process.poll()  # reaps it, else the group lives on as a zombie
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def metrics(self) -> dict[str, float]:
        """What /metrics says now: name, or name/value of the label that tells series apart, → sum over engines."""
        with OPENER.open(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line.startswith("vllm:"):
                series, value = line.rsplit(" ", 1)
                name, _, labels = series.partition("{")
                for label in ("position", "reason", "stage"):
                    _, there, rest = labels.partition(f'{label}="')
                    if there:
                        name += "/" + rest.partition('"')[0]
                name = name.replace("_total", "")
                found[name] = found.get(name, 0.0) + float(value)
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    speculative: dict[str, Any] | None,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Server]:
    """Serve the tiny target until the block ends, and leave nothing of it behind.

    Args:
        folder: for logs and metrics.
        speculative: ``--speculative-config``.
        arguments: further ones of ``vllm serve``.
        variables: further environment variables, which win.
    """
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(tiny_pair().target), "--host", "127.0.0.1",
        "--port", str(port), "--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager",
        "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16", *arguments,
    ]  # fmt: skip
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PROMETHEUS_MULTIPROC_DIR": tempfile.mkdtemp(dir=folder),
        **variables,
    }
    log_file = folder / f"server-{port}.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    server = Server(url=f"http://127.0.0.1:{port}", process=process, log_file=log_file)
    try:
        _wait_until_up(server)
        yield server
    finally:
        stop(server)


def _wait_until_up(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"vllm serve ended with status {server.process.returncode}:\n{server.log[-6000:]}")
        with contextlib.suppress(OSError), OPENER.open(f"{server.url}/health", timeout=5):
            return
        time.sleep(0.3)
    raise RuntimeError(f"vllm serve did not answer within {START_SECONDS:.0f} s:\n{server.log[-6000:]}")


def interrupt(server: Server, *, patience: float) -> float:
    """Ctrl-C, as a shell gives it to the server alone; the seconds until nothing of its group was left, or infinity."""
    begun = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    while time.monotonic() - begun < patience:
        if not server.group_is_alive():
            return time.monotonic() - begun
        time.sleep(0.1)
    return float("inf")


def stop(server: Server) -> None:
    """End what is left."""
    if server.process.poll() is None:
        interrupt(server, patience=30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(timeout=30)
