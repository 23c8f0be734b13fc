"""Data flows one way: adapter → pipeline → rooms. Proved from the imports, wherever in a module they stand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_tokentiming

PACKAGE = "vllm_tokentiming"
ROOT = Path(vllm_tokentiming.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 450

ROOMS = frozenset({"engine", "vocabulary", "alignment", "transfer"})
CORE = ROOMS | {
    "errors",
    "compilation",
    "config",
    "pair",
    "policy",
    "draft_length",
    "adaptive_length",
    "cycle_costs",
    "repeats",
    "metrics",
    "proposal_modes",
    "requests",
}
# Part of the package → the other parts that it may import. A new part must be entered here, or the test fails.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "compilation": frozenset(),
    "config": frozenset({"errors"}),
    **dict.fromkeys(ROOMS, frozenset({"errors", "compilation"})),
    "engine": frozenset({"errors", "compilation", "config"}),  # built from the options; others get plain values
    "pair": ROOMS | {"errors", "config"},
    "metrics": frozenset({"errors", "config"}),
    "policy": frozenset({"errors", "config"}),
    "draft_length": frozenset({"engine"}),  # the stop rule that it may hand out
    "adaptive_length": frozenset({"draft_length", "cycle_costs"}),
    "cycle_costs": frozenset(),
    "repeats": frozenset({"errors", "config"}),
    "proposal_modes": ROOMS | {"errors", "config", "pair", "policy"},
    "requests": frozenset({"vocabulary", "pair", "policy", "draft_length", "repeats"}),
    "pipeline": CORE,
    "vllm_adapter": CORE | {"pipeline"},
    "proposer": CORE | {"pipeline", "vllm_adapter"},
    "plugin": CORE | {"pipeline", "vllm_adapter", "proposer"},
    "tiny_pair": frozenset({"errors"}),
    "cli": CORE | {"pipeline", "vllm_adapter", "proposer", "plugin", "tiny_pair"},
    "__init__": frozenset({"config", "errors", "proposer"}),
}
# Outside packages that only some parts may import.
RESTRICTED = {
    "vllm": frozenset({"vllm_adapter", "proposer", "plugin", "cli"}),  # and engine/vllm_*, see below
    "torch": frozenset({"engine", "pipeline", "vllm_adapter", "proposer", "cli"}),
}


def part_of(module: str) -> str:
    """``vllm_tokentiming.engine.sampler`` → ``engine``; the package itself → ``__init__``."""
    return module.split(".")[1] if "." in module else "__init__"


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, *, module: str, is_package: bool) -> Iterator[str]:
    """Yield the absolute dotted names that a module imports, at its top, inside functions, or by ``import_module``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + (1 if is_package else 0)]
                base = ".".join([*parents, base]) if base else ".".join(parents)
            # `from package import name`: the name may be a submodule, and only the whole says which part is meant.
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in {"import_module", "__import__"} and node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


def violations(source: str, *, module: str, is_package: bool = False) -> list[str]:
    part = part_of(module)
    if part not in MAY_IMPORT:
        return [f"{module}: {part!r} is no known part of the package; enter it in MAY_IMPORT"]
    found = []
    for name in imported(source, module=module, is_package=is_package):
        outer = name.split(".", maxsplit=1)[0]
        if outer == PACKAGE:
            other = name.split(".")[1] if "." in name else "__init__"
            if other not in MAY_IMPORT:  # `from vllm_tokentiming import __version__`: the package's own names
                other = "__init__"
            # The package's own names are the version, the options and the errors: for the parts above the rooms.
            allowed = MAY_IMPORT[part] | {part} | (set() if part in ROOMS | {"errors", "config"} else {"__init__"})
            if other not in allowed:
                found.append(f"{module} imports {name}")
        elif outer in RESTRICTED and part not in RESTRICTED[outer]:
            if outer == "vllm" and module.startswith(f"{PACKAGE}.engine.vllm_"):
                continue
            found.append(f"{module} imports {name}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_flow_one_way(path: Path) -> None:
    assert not violations(path.read_text(encoding="utf-8"), module=name_of(path), is_package=path.name == "__init__.py")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vllm_tokentiming.alignment.dtw", "from vllm_tokentiming.vocabulary import Vocabulary"),
        ("vllm_tokentiming.alignment.dtw", "from ..vocabulary import Vocabulary"),
        ("vllm_tokentiming.alignment.dtw", "from .. import vocabulary"),
        ("vllm_tokentiming.alignment.dtw", "def f():\n    import vllm_tokentiming.pipeline"),
        ("vllm_tokentiming.alignment.dtw", "import torch"),
        ("vllm_tokentiming.transfer.exact", "import importlib\nimportlib.import_module('vllm.config')"),
        ("vllm_tokentiming.transfer.exact", "from vllm_tokentiming.config import TokenTimingConfig"),
        ("vllm_tokentiming.transfer.exact", "from vllm_tokentiming import TokenTimingConfig"),
        ("vllm_tokentiming.engine.sampler", "from vllm.config import VllmConfig"),
        ("vllm_tokentiming.engine.vllm_engine", "from vllm_tokentiming.vllm_adapter import compat"),
        ("vllm_tokentiming.pipeline", "import vllm"),
        ("vllm_tokentiming.pipeline", "from vllm_tokentiming.vllm_adapter.rows import Row"),
        ("vllm_tokentiming.policy", "from vllm_tokentiming.pipeline import Pipeline"),
        ("vllm_tokentiming.vllm_adapter.rows", "from vllm_tokentiming.proposer import TokenTimingProposer"),
        ("vllm_tokentiming.vllm_adapter.rows", "from vllm_tokentiming import plugin"),
        ("vllm_tokentiming.helpers", "import os"),
    ],
)
def test_checker_sees_a_wrong_import(module: str, source: str) -> None:
    assert violations(source, module=module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vllm_tokentiming.alignment.dtw", "import numpy\nfrom .levenshtein import distance"),
        ("vllm_tokentiming.alignment.dtw", "from vllm_tokentiming.errors import ConfigError"),
        ("vllm_tokentiming.engine.vllm_engine", "from vllm.config import VllmConfig\nimport torch"),
        ("vllm_tokentiming.pipeline", "from vllm_tokentiming.alignment import Aligner"),
        ("vllm_tokentiming.vllm_adapter.rows", "import vllm\nfrom vllm_tokentiming.pipeline import Pipeline"),
        ("vllm_tokentiming.plugin", "from vllm_tokentiming import __version__"),
    ],
)
def test_checker_lets_a_right_import_pass(module: str, source: str) -> None:
    assert not violations(source, module=module)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_is_short_named_for_its_question_and_silent(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    assert source.count("\n") <= MAX_LINES, f"{path.name} has more than {MAX_LINES} lines: split it"
    assert path.stem not in {"utils", "util", "helpers", "common", "misc"}, "name the question that the module answers"
    assert not source.strip() or ast.get_docstring(tree), "a module says in its docstring what it answers"
    if "cli" not in path.relative_to(ROOT).parts:
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        assert not any(isinstance(f, ast.Name) and f.id == "print" for f in calls), "log instead of printing"


def test_every_room_is_there() -> None:
    assert {path.name for path in ROOT.iterdir() if path.is_dir()} >= ROOMS
