"""A server under mixed load for an hour: memory does not grow, nothing is kept, acceptance does not decay.

``TOKENTIMING_SOAK_MINUTES`` shortens it; ``TOKENTIMING_SOAK_JSON`` names a file for what was seen minute by minute.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from e2e.cases import PROMPTS, Case, client_of, create
from e2e.serving import Server, serving

from benchmarks.provenance import provenance
from vllm_tokentiming.tiny_pair import tiny_pair

MINUTES = float(os.environ.get("TOKENTIMING_SOAK_MINUTES", "60"))
SAMPLE_SECONDS = 15.0
AT_ONCE = 10

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(MINUTES * 60 + 900)]


def resident_bytes(server: Server) -> int:
    """Memory of every process of the server."""
    import psutil

    parent = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in (parent, *parent.children(recursive=True)))


def random_case(dice: random.Random) -> Case:
    """A request of any kind that the server knows."""
    parameters: dict[str, Any] = {"max_tokens": dice.randrange(1, 120), "temperature": dice.choice([0, 0, 0.5, 1.0])}
    body: dict[str, Any] = {}
    if dice.random() < 0.2:
        parameters["seed"] = dice.randrange(100)
    if dice.random() < 0.2:
        parameters["presence_penalty"] = 0.5
    if dice.random() < 0.2:
        parameters["logprobs"] = 2
    if dice.random() < 0.2:
        parameters["stop"] = [dice.choice(["\n\n", "e ", ".", "import"])]
    if dice.random() < 0.1:
        body["structured_outputs"] = {"regex": r"[a-z ]{5,30}"}
    if dice.random() < 0.3:
        body["top_k"] = 20
    prompt = " ".join(dice.choices(PROMPTS, k=dice.randrange(1, 12)))
    return Case(prompt, parameters={**parameters, "extra_body": body})


async def load(server: Server, *, until: float, seen: list[dict[str, float]]) -> list[str]:
    """Keep :data:`AT_ONCE` requests running, some of which are given up in the middle; what went wrong."""
    dice, failures = random.Random(1), []

    async def user(client: Any) -> None:
        while time.monotonic() < until:
            case, gives_up = random_case(dice), dice.random() < 0.1
            try:
                if gives_up:
                    async with asyncio.timeout(0.3):
                        await create(client, case)
                else:
                    await create(client, case)
            except TimeoutError:
                pass  # given up on purpose
            except Exception as error:  # noqa: BLE001 - whatever it is, the server did not answer
                failures.append(f"{error!r}, caused by {error.__cause__!r}; given up: {gives_up}; {case}")

    async def watch() -> None:
        while time.monotonic() < until:
            await asyncio.sleep(SAMPLE_SECONDS)
            counts = await asyncio.to_thread(server.metrics)
            seen.append(
                {
                    "seconds": time.monotonic(),
                    "resident_bytes": resident_bytes(server),
                    "drafted": counts["vllm:spec_decode_num_draft_tokens"],
                    "accepted": counts["vllm:spec_decode_num_accepted_tokens"],
                    "requests": sum(v for name, v in counts.items() if name.startswith("vllm:request_success")),
                    "failures": sum(v for name, v in counts.items() if name.endswith("_failed")),
                }
            )

    async with client_of(server.url) as client:
        await asyncio.gather(watch(), *(user(client) for _ in range(AT_ONCE)))
    return failures


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], list[str], str]:
    speculative = {"method": "tokentiming", "model": str(tiny_pair().draft), "num_speculative_tokens": 5}
    seen: list[dict[str, float]] = []
    with serving(tmp_path_factory.mktemp("soak"), speculative=speculative) as server:
        failures = asyncio.run(load(server, until=time.monotonic() + 60 * MINUTES, seen=seen))
        log = server.log
    if file := os.environ.get("TOKENTIMING_SOAK_JSON"):
        document = {"kind": "soak", "minutes": MINUTES, "provenance": provenance(), "samples": seen}
        Path(file).write_text(json.dumps(document, indent=1) + "\n")
    return seen, failures, log


def test_every_request_was_answered(soaked):
    seen, failures, log = soaked
    assert failures == []
    assert seen[-1]["failures"] == 0
    assert seen[-1]["requests"] > 20 * MINUTES
    assert "Traceback" not in log


def test_memory_is_flat(soaked):
    """From the end of the first fifth on: until then caches fill, which are bounded."""
    seen, _, _ = soaked
    settled = [sample["resident_bytes"] for sample in seen[len(seen) // 5 :]]
    tenth = max(1, len(settled) // 10)
    first, last = sum(settled[:tenth]) / tenth, sum(settled[-tenth:]) / tenth
    assert last < 1.02 * first, f"{first / 1e6:.0f} MB at first, {last / 1e6:.0f} MB at last"


def test_acceptance_does_not_decay(soaked):
    seen, _, _ = soaked
    start, middle, end = seen[len(seen) // 5], seen[3 * len(seen) // 5], seen[-1]

    def share(a: dict[str, float], b: dict[str, float]) -> float:
        return (b["accepted"] - a["accepted"]) / max(1.0, b["drafted"] - a["drafted"])

    assert share(middle, end) > 0.9 * share(start, middle)
