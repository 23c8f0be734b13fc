"""All jobs of the engine tests, run once, one engine after the other in one process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_tokentiming.tiny_pair import tiny_pair

COMMON = ("greedy", "mixed", "odd_prompts", "odd_texts", "near_the_end")
BREAKS = ("break_draft", "break_forward", "break_logits", "break_context", "break_proposal")
LIFE = (
    "stop_strings",
    "stop_tokens",
    "lengths",
    "own_ends",
    "several_samples",
    "arrivals",
    "cached_prompts",
    "one_token_beside_others",
)
FEATURES = ("constraints", "not_with_speculation", "logprobs", "seeds")
CHUNKED = {"max_num_batched_tokens": 48}
ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
SMALL_CACHE = {"num_gpu_blocks_override": 6}
# A tiny model at temperature 1 would fill its tokens with the white space that JSON permits.
COMPACT = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}

Answer = Callable[[str, str], dict[str, Any]]


def speculative(**options: Any) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": "tokentiming",
            "model": str(tiny_pair().draft),
            "num_speculative_tokens": 5,
            # Between models this small drafting never pays, and what is never drafted tests nothing.
            "adaptive_length": False,
            "repeats": False,
            **options,
        }
    }


def plain_form(**options: Any) -> dict[str, Any]:
    proposer = "vllm_tokentiming.TokenTimingProposer"
    return {
        "speculative_config": {"method": "custom_class", "model": proposer, "num_speculative_tokens": 4},
        "additional_config": {
            "tokentiming": {
                "draft_model": str(tiny_pair().draft),
                "adaptive_length": False,
                "repeats": False,
                **options,
            }
        },
    }


def jobs() -> list[dict[str, Any]]:
    def job(name: str, engine: dict[str, Any], *scenarios: str) -> dict[str, Any]:
        return {"name": name, "engine": engine, "scenarios": scenarios}

    return [
        job("none", {}, *COMMON, "crowded", *LIFE, *FEATURES),
        job("none, chunked", CHUNKED, "long_prompts"),
        job("none, adapters", ADAPTERS, "adapters"),
        job("adapters", {**speculative(), **ADAPTERS}, "adapters"),
        job(
            "exact",
            {**speculative(transfer="exact"), **COMPACT},
            *COMMON,
            "greedy_one_by_one",
            "structured",
            "abort_and_reuse",
            *LIFE,
            *FEATURES,
            *BREAKS,
            "greedy",
        ),
        job("adaptive", speculative(adaptive_length=True, repeats=True), *COMMON, *LIFE, *FEATURES, "greedy"),
        job("chunked", {**speculative(), **CHUNKED}, "long_prompts", "seeded_long_prompts"),
        job("short draft", speculative(draft_max_model_len=64), "long_prompts", "seeded_long_prompts", "near_the_end"),
        # Fewer drafted tokens than may be proposed leave room for repeats after them.
        job(
            "repeats",
            {**speculative(repeats=True, num_draft_tokens=2), **COMPACT},
            *COMMON,
            "structured",
            "abort_and_reuse",
        ),
        job("point_mass", speculative(transfer="point_mass"), "greedy", "mixed"),
        job("tli", {**speculative(transfer="tli"), **COMPACT}, "greedy", "mixed", "structured"),
        job("slem", speculative(transfer="slem"), "greedy", "mixed"),
        job("paper", speculative(transfer="paper", allow_lossy=True), "greedy", "sampled"),
        job("transformers", plain_form(engine="transformers", transfer="exact"), *COMMON),
        job("crowded", {**speculative(transfer="exact"), **SMALL_CACHE}, "crowded"),
    ]


@pytest.fixture(scope="session")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """``answer(job, scenario)``: what the scenario returned (``value``), and what was counted meanwhile."""
    file = tmp_path_factory.mktemp("engines") / "answers.jsonl"
    worker = Path(__file__).with_name("engine_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(file), json.dumps(jobs())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    found = {line["name"]: line for line in map(json.loads, file.read_text().splitlines())} if file.exists() else {}

    def look_up(job: str, scenario: str) -> dict[str, Any]:
        if job not in found:
            pytest.fail(f"the engine of {job!r} gave no answers (status {done.returncode}):\n{done.stdout[-6000:]}")
        value = found[job]["answers"][scenario]
        if isinstance(value["value"], dict) and "error" in value["value"]:
            pytest.fail(f"{job} / {scenario}:\n{value['value']['error']}")
        return {**value, "log": found[job]["log"]}

    return look_up
