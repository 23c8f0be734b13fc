"""Folders of real models and tokenizers, where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# A deadline fails on a machine that is busy, whatever the code does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

FolderOf = Callable[[str], Path]


def _folder_of(variable: str, default: str) -> FolderOf:
    root = Path(os.environ.get(variable, Path.home() / ".cache" / "tokentiming" / default))

    def folder(name: str) -> Path:
        path = root / name
        if not path.is_dir():
            pytest.skip(f"{name} is not in {root}; set {variable} to a folder that holds it (see CONTRIBUTING.md)")
        return path

    return folder


@pytest.fixture(scope="session")
def tokenizer_folder() -> FolderOf:
    return _folder_of("TOKENTIMING_TOKENIZERS", "tokenizers")


@pytest.fixture(scope="session")
def model_folder() -> FolderOf:
    return _folder_of("TOKENTIMING_MODELS", "models")
