"""Would another vLLM fit? Runs the tests of the seam on its source, without installing it.

    make seam VLLM=0.33.0

Takes the wheel from the package index (or a file, ``--wheel``), unpacks its Python files into a temporary folder, and
runs ``tests/unit/test_vllm_seam.py`` with that folder in front of the installed vLLM. Nothing is run but imports, so a
version that passes has the names and signatures that the package uses; what they do is for the whole suite to show.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "unit" / "test_vllm_seam.py"


def download(version: str, folder: Path) -> Path:
    """The wheel of one version of vLLM; raises CalledProcessError where pip finds none."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
         "--dest", str(folder), f"vllm=={version}"],
        check=True,
    )  # fmt: skip
    return next(folder.glob("*.whl"))


def unpack_source(wheel: Path, folder: Path) -> None:
    """Python files and what stands beside them as text; the compiled parts stay out."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith((".py", ".json")) or ".dist-info/" in name]
        archive.extractall(folder, members=names)


def main() -> int:
    """Read the command line; the status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--version", help="of vLLM, such as 0.33.0")
    which.add_argument("--wheel", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vllm-source-") as name:
        folder = Path(name)
        (folder / "wheel").mkdir()
        wheel = arguments.wheel or download(arguments.version, folder / "wheel")
        unpack_source(wheel, folder / "source")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(folder / "source"), "PYTHONDONTWRITEBYTECODE": "1"},
            check=False,
        )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
