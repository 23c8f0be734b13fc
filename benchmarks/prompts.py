"""Which prompts a benchmark runs on: Spec-Bench's questions (Xia et al., arXiv 2401.07851), first turns, by task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Spec-Bench's eight MT-Bench categories are ten questions each; coding and writing are the two that speculative
# decoding papers quote.
TASKS: Mapping[str, frozenset[str]] = {
    "summarization": frozenset({"summarization"}),
    "translation": frozenset({"translation"}),
    "qa": frozenset({"qa"}),
    "math_reasoning": frozenset({"math_reasoning"}),
    "coding+writing": frozenset({"coding", "writing"}),
    "rag": frozenset({"rag"}),
}
FIVE_TASKS = ("summarization", "translation", "qa", "math_reasoning", "coding+writing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question."""

    task: str
    question_id: int
    text: str


def load_prompts(path: Path, *, tasks: Sequence[str], per_task: int, skip: int = 0) -> list[Prompt]:
    """Read ``per_task`` questions of each task, evenly spread over the file.

    Args:
        path: Spec-Bench's ``question.jsonl``.
        tasks: names out of :data:`TASKS`.
        per_task: questions of each.
        skip: how many of these to leave out at the front, for a run in several parts.

    Raises:
        ValueError: an unknown task, fewer questions than asked for, or all of them skipped.
    """
    if not 0 <= skip < per_task:
        raise ValueError(
            f"{skip} of {per_task} questions of each task are skipped. Required: at least one left, as --per-task "
            "counts those that are skipped too. Raise --per-task."
        )
    questions = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = []
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
        of_task = [q for q in questions if q["category"] in TASKS[task]]
        if len(of_task) < per_task:
            raise ValueError(f"{path} has {len(of_task)} questions of {task}, {per_task} are asked for")
        step = len(of_task) / per_task
        chosen = [of_task[int(i * step)] for i in range(per_task)]
        prompts += [Prompt(task=task, question_id=q["question_id"], text=q["turns"][0]) for q in chosen[skip:]]
    return prompts
