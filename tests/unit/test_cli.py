"""What a shell sees of ``tokentiming``: stdout, stderr, exit status, and how fast it starts."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import vllm_tokentiming
from vllm_tokentiming.cli import main as cli
from vllm_tokentiming.cli import tiny_pair as tiny_pair_command
from vllm_tokentiming.errors import ConfigError
from vllm_tokentiming.tiny_pair import TinyPair


def test_tiny_pair_prints_target_then_draft_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tiny-pair"]) == 0
    captured = capsys.readouterr()
    target, draft = captured.out.splitlines()
    assert Path(target).is_absolute()
    assert Path(target).name == "target"
    assert Path(draft).name == "draft"
    assert (Path(target) / "config.json").is_file()
    assert (Path(draft) / "config.json").is_file()
    assert captured.err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"tokentiming {vllm_tokentiming.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["no-such"], ["tiny-pair", "extra"], ["tiny-pair", "--no-such"], ["--vers"]])
def test_bad_use_exits_2_with_usage_on_stderr(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: tokentiming" in captured.err


def test_expected_error_is_one_line_without_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_data() -> TinyPair:
        return TinyPair(target=tmp_path / "target", draft=tmp_path / "draft")

    monkeypatch.setattr(tiny_pair_command, "tiny_pair", without_data)
    assert cli.main(["tiny-pair"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tokentiming: error: found no model in ")
    assert len(captured.err.splitlines()) == 1


def test_pair_without_data_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reinstall"):
        TinyPair(target=tmp_path, draft=tmp_path)


def test_unexpected_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> TinyPair:
        raise RuntimeError("a defect")

    monkeypatch.setattr(tiny_pair_command, "tiny_pair", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["tiny-pair"])


def test_command_imports_nothing_heavy() -> None:
    heavy = ("torch", "vllm", "transformers", "numba", "tokenizers")
    code = (
        "import sys; from vllm_tokentiming.cli.main import main; main(['tiny-pair']); "
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_console_script_is_this_function() -> None:
    (script,) = entry_points(group="console_scripts", name="tokentiming")
    assert script.load() is cli.main
