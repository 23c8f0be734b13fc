"""Serve a pair of models through ``vllm serve`` until Ctrl-C, and print a curl line once it answers.

Without ``--model`` and ``--draft`` it serves the tiny pair that the package brings. Owns the server's process group:
when this process ends, however it ends, no process of the server is left.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cpu_env import cpu_environment, is_cpu_build

TINY_NAME = "tiny"
GRACE_SECONDS = 30.0
PR_SET_PDEATHSIG = 1
PARALLEL_OPTIONS = ("-tp", "-pp", "-dp", "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
# A proxy that the user's environment names must not see requests to this machine.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServeError(Exception):
    """It cannot be served as asked; the message says why, and what to do."""


def say(text: str) -> None:
    """Print one line at once, also into a pipe."""
    print(f"[serve] {text}", flush=True)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run and where it will answer."""

    command: list[str]
    environment: dict[str, str]
    url: str


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; what is not known here goes to ``vllm serve`` as it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="", help="target: folder or Hub id; default: the tiny pair's")
    parser.add_argument(
        "--draft", default="", help="draft: folder or Hub id; default: the tiny one, under the tiny target"
    )
    parser.add_argument("--method", default="tokentiming", help="speculative method; none serves without")
    parser.add_argument("--tokens", type=int, default=5, help="num_speculative_tokens")
    parser.add_argument("--options", default="", help="JSON object with further keys of --speculative-config")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_known_args()


def tiny_pair() -> tuple[str, str]:
    """Folders of the tiny target and the tiny draft.

    Raises:
        ServeError: the package does not say where they are.
    """
    tool = Path(sys.executable).parent / "tokentiming"
    answer = subprocess.run([tool, "tiny-pair"], capture_output=True, text=True, check=False)
    folders = answer.stdout.split("\n")
    if answer.returncode or len(folders) < 2 or not all(Path(folder).is_dir() for folder in folders[:2]):
        raise ServeError(f"'tokentiming tiny-pair' named no two folders, but:\n{answer.stdout}{answer.stderr}")
    return folders[0], folders[1]


def speculative_config(options: argparse.Namespace, draft: str) -> dict[str, object] | None:
    """Build ``--speculative-config``, or None to serve without speculation.

    Raises:
        ServeError: the further options are not a JSON object.
    """
    if options.method == "none":
        return None
    if options.method == "tokentiming" and not draft:
        say("no DRAFT is named: serving without speculation")
        return None
    config: dict[str, object] = {"method": options.method, "num_speculative_tokens": options.tokens}
    if draft and options.method != "ngram":
        config["model"] = draft
    if options.options:
        try:
            config |= json.loads(options.options)
        except (ValueError, TypeError) as error:
            raise ServeError(
                f'OPTIONS is {options.options!r}; it must be a JSON object such as {{"window_radius": 8}} ({error}).'
            ) from error
    return config


def plan_of(options: argparse.Namespace, further: list[str]) -> Plan:
    """Decide the whole command from the options.

    Raises:
        ServeError: they do not fit together.
    """
    arguments: list[str] = []
    target, draft = options.model, options.draft
    if not target:
        target, tiny_draft = tiny_pair()
        draft = draft or tiny_draft
        # Compiling takes a minute and gains nothing on models this small.
        arguments += ["--enforce-eager", "--served-model-name", TINY_NAME]
    config = speculative_config(options, draft)
    if config is not None and not options.model and options.method == "tokentiming":
        # A draft as large as the target never pays, and would soon be left out: there would be nothing to see.
        config.setdefault("adaptive_length", False)
    if config is not None:
        arguments += ["--speculative-config", json.dumps(config)]
    vllm = Path(sys.executable).parent / "vllm"
    environment = cpu_environment(
        os.environ,
        kv_cache_gib=4 if options.model else 1,
        bind_threads=not any(argument.split("=")[0] in PARALLEL_OPTIONS for argument in further),
    )
    if all(Path(folder).is_dir() for folder in (target, draft) if folder):
        environment.setdefault("HF_HUB_OFFLINE", "1")
    command = [str(vllm), "serve", target, "--host", options.host, "--port", str(options.port), *arguments, *further]
    reachable = "127.0.0.1" if options.host in {"0.0.0.0", "::", ""} else options.host
    return Plan(command=command, environment=environment, url=f"http://{reachable}:{options.port}")


def require_free_port(host: str, port: int) -> None:
    """Fail before the models are loaded.

    Raises:
        ServeError: something listens there already.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServeError(
                f"cannot listen on {host}:{port} ({error.strerror}). Choose another port: make serve PORT={port + 1}"
            ) from error


def die_with_parent() -> None:
    """Have the kernel end the server if this process is killed outright (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def group_is_alive(group: int) -> bool:
    """Whether any process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server: as Ctrl-C would, then harder, until nothing of its process group is left."""
    for number, patience in ((signal.SIGINT, GRACE_SECONDS), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        if number is signal.SIGINT:
            if server.poll() is None:
                server.send_signal(number)  # to the API server alone, which ends its workers in order
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            server.poll()  # reaps it, else the group lives on as a zombie
            if not group_is_alive(server.pid):
                return
            if number is signal.SIGINT and server.returncode is not None:
                deadline = min(deadline, time.monotonic() + 5.0)
            time.sleep(0.1)


@contextlib.contextmanager
def running(plan: Plan) -> Iterator[subprocess.Popen[bytes]]:
    """Run the server, and leave nothing of it behind."""
    # Its own session: the terminal's Ctrl-C would otherwise reach every worker at once.
    server = subprocess.Popen(
        plan.command,
        env=plan.environment,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
    )
    try:
        yield server
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave workers behind
        stop(server)


def answers(url: str) -> bool:
    """Whether a GET of ``url`` succeeds."""
    try:
        with OPENER.open(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def curl_line(url: str) -> str:
    """One command that asks the served model something."""
    with OPENER.open(f"{url}/v1/models", timeout=30) as answer:
        name = json.load(answer)["data"][0]["id"]
    messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
    body = shlex.quote(json.dumps({"model": name, "messages": messages, "max_tokens": 64, "temperature": 0}))
    return f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d {body}"


def raise_interrupt(_number: int, _frame: FrameType | None) -> None:
    """Take every polite request to end as Ctrl-C."""
    raise KeyboardInterrupt


def main() -> int:
    """Serve until told to end.

    Raises:
        ServeError: it cannot be served as asked.
    """
    options, further = parse_arguments()
    plan = plan_of(options, further)
    require_free_port(options.host, options.port)
    signal.signal(signal.SIGTERM, raise_interrupt)
    signal.signal(signal.SIGHUP, raise_interrupt)
    say(f"vLLM's {'CPU' if is_cpu_build() else 'CUDA'} build; starting (the tiny pair takes about a minute):")
    settings = {k: v for k, v in plan.environment.items() if os.environ.get(k) != v}
    say(" ".join([*(f"{k}={shlex.quote(v)}" for k, v in settings.items()), shlex.join(plan.command)]))
    try:
        with running(plan) as server:
            while not answers(f"{plan.url}/health"):
                if server.poll() is not None:
                    raise ServeError(f"vllm serve ended with status {server.returncode} before it was up: see its log.")
                time.sleep(0.5)
            say("up. Try this from another terminal; Ctrl-C here ends the server.")
            print(f"\n{curl_line(plan.url)}\n", flush=True)
            status = server.wait()
            say(f"vllm serve ended by itself with status {status}")
            return status or 1
    except KeyboardInterrupt:
        say("ended; nothing is left running")
        return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServeError as serve_error:
        sys.exit(f"[serve] {serve_error}")
