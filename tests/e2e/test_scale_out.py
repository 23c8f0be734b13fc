"""A target split over several processes, or served by several: answers are those of one, and drafts are accepted.

Each layout is one server with speculation, one after the other; the reference is one process without.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import pytest
from e2e.cases import PROMPTS, Case, client_of, create
from e2e.serving import serving

from vllm_tokentiming.tiny_pair import tiny_pair

pytestmark = pytest.mark.server

LAYOUTS = {
    "tensor parallel": ("--tensor-parallel-size", "2"),
    "data parallel": ("--data-parallel-size", "2"),
    "two API servers": ("--api-server-count", "2"),
}
SPECULATIVE = {
    "method": "tokentiming",
    "model": str(tiny_pair().draft),
    "num_speculative_tokens": 5,
    "adaptive_length": False,
    "repeats": False,
}
GREEDY = [Case(prompt, parameters={"max_tokens": 48, "extra_body": {"ignore_eos": True}}) for prompt in PROMPTS]
SEEDED = [
    Case(prompt, parameters={"temperature": 0.9, "seed": 5 + n, "max_tokens": 32, "extra_body": {"ignore_eos": True}})
    for n, prompt in enumerate(PROMPTS)
]


@dataclass(frozen=True)
class Run:
    """What one server said."""

    greedy: list[str]
    seeded: list[list[str]]
    counts: dict[str, float]
    log: str


async def _texts(url: str, cases: list[Case]) -> list[str]:
    async with client_of(url) as client:
        answers = await asyncio.gather(*(create(client, case) for case in cases))
    return [answer.choices[0].text for answer in answers]


def _run(folder: Any, *, speculative: dict[str, Any] | None, arguments: tuple[str, ...] = ()) -> Run:
    # vLLM's binding wants one list of cores for each worker.
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if arguments else {}
    with serving(folder, speculative=speculative, arguments=arguments, variables=variables) as server:
        greedy = asyncio.run(_texts(server.url, GREEDY))
        seeded = [asyncio.run(_texts(server.url, SEEDED)) for _ in range(2)]
        return Run(greedy, seeded, server.metrics(), server.log)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _run(tmp_path_factory.mktemp("reference"), speculative=None)


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request: pytest.FixtureRequest, reference: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    del reference  # first: a small machine has room for one server
    folder = tmp_path_factory.mktemp("scaled")
    return _run(folder, speculative=SPECULATIVE, arguments=LAYOUTS[request.param])


def test_greedy_answers_are_those_of_one_process_without_speculation(run, reference):
    assert run.greedy == reference.greedy


def test_seeds_give_the_same_answers_twice(run):
    first, second = run.seeded
    assert first == second
    assert len(set(first)) > 1


def test_drafts_are_accepted(run):
    accepted, drafted = (run.counts[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert 0.2 * drafted < accepted <= drafted


def test_nothing_failed(run):
    assert not [name for name, value in run.counts.items() if name.endswith("_failed") and value]
    assert not re.search(r"Traceback|without proposals: ", run.log)
