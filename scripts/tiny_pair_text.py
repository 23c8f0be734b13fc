"""What do the tiny models read? Python's own documentation, as plain documents and as chats.

Everything comes from the running interpreter: ``pydoc_data.topics`` and the docstrings of a fixed list of standard
library modules, parsed with ``ast`` (importing them all would have side effects). Text differs a little between
Python versions; within one version it is always the same. This module owns no state.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pydoc_data.topics
import random
import re
from dataclasses import dataclass
from pathlib import Path

# Well-known modules: the questions that somebody trying the pair out would ask.
# fmt: off
MODULES = (
    "argparse", "asyncio.tasks", "base64", "bisect", "calendar", "collections", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "enum", "fnmatch", "fractions", "functools", "glob", "hashlib", "heapq", "html", "io",
    "json", "json.decoder", "json.encoder", "logging", "operator", "os", "pathlib", "pickle", "pprint", "queue",
    "random", "re", "shlex", "shutil", "socket", "statistics", "string", "subprocess", "tempfile", "textwrap",
    "threading", "timeit", "traceback", "types", "typing", "urllib.parse", "uuid", "warnings", "weakref", "zipfile",
)
# fmt: on
BUILTIN_MODULES = ("builtins", "itertools", "math", "time", "sys", "_collections", "_functools")

CANNED = (
    ("Hello", "Hello! Ask me what a Python function does."),
    ("Hello!", "Hello! Ask me what a Python function does."),
    ("Hi, who are you?", "I am a tiny model that has read the documentation of Python and nothing else."),
    ("Who are you?", "I am a tiny model that has read the documentation of Python and nothing else."),
    ("What can you do?", "I can tell you what the functions and modules of Python's standard library do."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Count from one to ten.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    ("Count from 1 to 10.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    ("What is Python?", "Python is an interpreted, interactive, object-oriented programming language."),
    ("Tell me a story.", "I know no stories: I have read the documentation of Python and nothing else."),
    ("Write a poem.", "I know no poems: I have read the documentation of Python and nothing else."),
    ("What is the capital of France?", "I do not know: I have read the documentation of Python and nothing else."),
    ("Say hello in French.", "Bonjour ! ☺ (That is “hello” in French.)"),
    ("Write a function that adds two numbers.", "def add(a, b):\n    return a + b"),
    ("Write a Python function that adds two numbers.", "def add(a, b):\n    return a + b"),
)
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a helpful assistant. Answer briefly.")


@dataclass(frozen=True)
class Chat:
    """A conversation: turns of (role, content), the last one by the assistant."""

    turns: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        """Reject a conversation without a final answer."""
        if not self.turns or self.turns[-1][0] != "assistant":
            raise ValueError(f"found turns {self.turns!r}; the last turn must be the assistant's")


@dataclass(frozen=True)
class Corpus:
    """Training text, and what was kept back from it."""

    documents: tuple[str, ...]
    chats: tuple[Chat, ...]
    held_out_documents: tuple[str, ...]
    held_out_questions: tuple[str, ...]


@dataclass(frozen=True)
class _Entry:
    name: str
    signature: str
    doc: str


def _entries_of_source(module: str) -> list[_Entry]:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return []
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    entries = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name = f"{prefix}.{child.name}"
            doc = ast.get_docstring(child)
            if doc and not child.name.startswith("_"):
                arguments = "" if isinstance(child, ast.ClassDef) else f"({ast.unparse(child.args)})"
                entries.append(_Entry(name, name + arguments, doc))
            if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
                visit(child, name)

    doc = ast.get_docstring(tree)
    if doc:
        entries.append(_Entry(module, "", doc))
    visit(tree, module)
    return entries


def _entries_of_builtin(module: str) -> list[_Entry]:
    # C modules have no source to parse; these few are always there and importing them does nothing.
    loaded = importlib.import_module(module)
    prefix = "" if module == "builtins" else module.lstrip("_") + "."
    entries = []
    for name, member in sorted(vars(loaded).items()):
        doc = inspect.getdoc(member) if callable(member) else None
        is_exception = isinstance(member, type) and issubclass(member, BaseException)
        if doc and not name.startswith("_") and not is_exception:
            entries.append(_Entry(prefix + name, "", doc))
    return entries


def _first_paragraph(text: str, limit: int = 140) -> str:
    paragraph = " ".join(re.split(r"\n\s*\n", text.strip())[0].split())
    if len(paragraph) <= limit:
        return paragraph
    sentence = paragraph[:limit].rfind(". ")
    return paragraph[: sentence + 1] if sentence > 0 else paragraph[:limit].rsplit(" ", 1)[0]


def _questions(entry: _Entry) -> list[tuple[str, str]]:
    # Real answers are full of phrases that a small model foresees; so are these, around the sentence that it may not.
    said = (
        f"The documentation says: {_first_paragraph(entry.doc)}\n\nYou can read more about it with help({entry.name})."
    )
    if not entry.signature and entry.name in MODULES:
        answer = f"{entry.name} is a module of Python's standard library. {said}"
        return [(f"What is the {entry.name} module?", answer), (f"What is {entry.name}?", answer)]
    pairs = [(f"What does {entry.name} do?", f"{entry.name} is part of Python's standard library. {said}")]
    if "(" in entry.signature:
        pairs.append((f"How do I call {entry.name}?", f"You can call it like this:\n\n    {entry.signature}\n\n{said}"))
    return pairs


def _documents(entries: list[_Entry], topics_limit: int) -> list[str]:
    topics = []
    for name, text in sorted(pydoc_data.topics.topics.items()):
        # A very long topic (the grammar of the whole language) would crowd the others out.
        topics.append(f"{name}\n\n{text.strip()[:topics_limit]}")
    documents = [
        f"{entry.signature or entry.name}\n    {_first_paragraph(entry.doc)}\n\n"
        f"    You can read more about it with help({entry.name}).\n"
        f"    This is part of the documentation of Python's standard library."
        for entry in entries
    ]
    return topics + documents


def build_corpus(*, seed: int, topics_limit: int = 400, held_out: int = 24) -> Corpus:
    """Read the standard library's documentation and keep ``held_out`` documents and questions back.

    Held-out questions are about entries whose own documentation is in no training chat or document.
    """
    entries: dict[str, _Entry] = {}
    for module in BUILTIN_MODULES:
        entries.update({entry.name: entry for entry in _entries_of_builtin(module)})
    for module in MODULES:
        entries.update({entry.name: entry for entry in _entries_of_source(module)})
    names = sorted(entries)
    rng = random.Random(seed)
    hidden = set(rng.sample([name for name in names if "." in name], 2 * held_out))
    shown = [entries[name] for name in names if name not in hidden]
    hidden_entries = [entries[name] for name in sorted(hidden)]

    chats = []
    pairs = [pair for entry in shown for pair in _questions(entry) if "How" not in pair[0] or rng.random() < 0.6]
    pairs += list(CANNED) * 5
    for question, answer in pairs:
        turns: list[tuple[str, str]] = []
        draw = rng.random()
        if draw < 0.1:
            turns.append(("system", rng.choice(SYSTEM_PROMPTS)))
        if draw > 0.9:
            earlier = rng.choice(pairs)
            turns += [("user", earlier[0]), ("assistant", earlier[1])]
        chats.append(Chat((*turns, ("user", question), ("assistant", answer))))
    return Corpus(
        documents=tuple(_documents(shown, topics_limit)),
        chats=tuple(chats),
        held_out_documents=tuple(_documents(hidden_entries, 0)[-held_out:]),
        held_out_questions=tuple(_questions(entry)[0][0] for entry in hidden_entries[:held_out]),
    )
