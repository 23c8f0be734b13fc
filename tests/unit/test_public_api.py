"""The public names and the tree of errors, pinned: changing them is a decision, not an accident."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import vllm_tokentiming
from vllm_tokentiming import errors

TREE = {
    "TokenTimingError": {"Exception"},
    "ConfigError": {"TokenTimingError", "ValueError"},
    "UnsupportedVLLMError": {"ConfigError"},
    "UnsupportedModelError": {"ConfigError"},
    "VocabularyError": {"TokenTimingError", "ValueError"},
    "UnencodableTextError": {"VocabularyError"},
    "DraftEngineError": {"TokenTimingError", "RuntimeError"},
    "DraftCacheExhaustedError": {"DraftEngineError"},
}


def test_public_names() -> None:
    assert sorted(vllm_tokentiming.__all__) == [
        "ConfigError",
        "TokenTimingConfig",
        "TokenTimingError",
        "TokenTimingProposer",
        "__version__",
    ]


def test_tree_of_errors() -> None:
    classes = dict(inspect.getmembers(errors, inspect.isclass))
    found = {name: {b.__name__ for b in c.__bases__} for name, c in classes.items() if c.__module__ == errors.__name__}
    assert found == TREE
    assert all(inspect.getdoc(classes[name]) for name in TREE)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'TokenTimer'"):
        vllm_tokentiming.TokenTimer  # noqa: B018


def test_import_is_light() -> None:
    # vLLM imports every plugin's package in every process, before it has chosen how to start its workers.
    check = "import sys, vllm_tokentiming; print(sorted({'torch', 'vllm', 'transformers', 'numba'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_every_public_name_resolves() -> None:
    for name in vllm_tokentiming.__all__:
        assert getattr(vllm_tokentiming, name) is not None
    assert inspect.isclass(vllm_tokentiming.TokenTimingProposer)
