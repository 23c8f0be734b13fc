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


def _folder_of(*places: tuple[str, str]) -> FolderOf:
    """The first of these that holds the folder: variables that name a place, and where that is without them."""
    roots = {
        variable: Path(os.environ.get(variable, Path.home() / ".cache" / "tokentiming" / default))
        for variable, default in places
    }

    def folder(name: str) -> Path:
        for root in roots.values():
            if (root / name).is_dir():
                return root / name
        looked = " or ".join(f"{root} ({variable})" for variable, root in roots.items())
        pytest.skip(f"{name} is not in {looked}; CONTRIBUTING.md says what to put there")

    return folder


MODELS = ("TOKENTIMING_MODELS", "models")


@pytest.fixture(scope="session")
def tokenizer_folder() -> FolderOf:
    return _folder_of(("TOKENTIMING_TOKENIZERS", "tokenizers"), MODELS)


@pytest.fixture(scope="session")
def model_folder() -> FolderOf:
    return _folder_of(MODELS)
