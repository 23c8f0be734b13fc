"""How many proposed tokens are accepted, by transfer mode, policy and task: one engine, many configurations.

    python -m benchmarks.acceptance --target DIR --draft DIR --prompts spec_bench.jsonl --temperatures 0 0.5 1
        --configurations '{"transfer":"exact"}' '{"transfer":"point_mass"}' --output FILE.json

The engine runs in this process and only the proposal mode is exchanged between configurations, so all see the same
weights and the same draft. Times mean nothing here (large batches); ``benchmarks.run`` measures speed. Counts are
vLLM's own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.prompts import FIVE_TASKS, load_prompts
from benchmarks.provenance import provenance, without_folders

FORMAT = 1


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(FIVE_TASKS))
    parser.add_argument("--per-task", type=int, default=12)
    parser.add_argument("--samples", type=int, default=1, help="generations of each prompt")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0])
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--configurations", nargs="+", required=True, help="JSON objects of plugin options")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def build(arguments: argparse.Namespace) -> Any:
    """The engine, in this process."""
    from vllm import LLM

    return LLM(
        model=arguments.target,
        dtype=arguments.dtype,
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=arguments.batch,
        seed=arguments.seed,
        disable_log_stats=False,
        speculative_config={
            "method": "tokentiming",
            "model": arguments.draft,
            "num_speculative_tokens": arguments.num_speculative_tokens,
        },
    )


def use_configuration(llm: Any, draft: str, configuration: dict[str, Any]) -> None:
    """Exchange the proposal mode of the running proposer."""
    from vllm_tokentiming import TokenTimingConfig
    from vllm_tokentiming.proposal_modes import ProposalMode

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    pipeline = worker.model_runner.drafter._pipeline
    options = TokenTimingConfig.from_mapping({"draft_model": draft, **configuration})
    pipeline._mode = ProposalMode(pipeline._mode._pair, options)
    if pipeline._mode.restricts_draft:
        pipeline._engine.restrict(pipeline._mode.shared_tokens())


def measure(llm: Any, arguments: argparse.Namespace, configuration: dict[str, Any], temperature: float) -> list[dict]:
    """Counts by task."""
    from vllm import SamplingParams

    from benchmarks.engine_worker import difference, prompt_ids, speculation_counters

    use_configuration(llm, arguments.draft, configuration)
    tokenizer = llm.get_tokenizer()
    records = []
    for task in arguments.tasks:
        prompts = load_prompts(arguments.prompts, tasks=[task], per_task=arguments.per_task)
        params = SamplingParams(
            n=arguments.samples, temperature=temperature, max_tokens=arguments.max_tokens, ignore_eos=True
        )
        before = speculation_counters(llm)
        inputs = [{"prompt_token_ids": prompt_ids(tokenizer, prompt.text)} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        records.append(
            {
                "configuration": configuration,
                "temperature": temperature,
                "task": task,
                "tokens": sum(len(sample.token_ids) for output in outputs for sample in output.outputs),
                "speculation": difference(speculation_counters(llm), before),
            }
        )
    return records


def print_table(document: dict[str, Any]) -> None:
    """Mean accepted length by task, and acceptance by position."""
    rows: dict[tuple[float, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for record in document["records"]:
        rows[record["temperature"], json.dumps(record["configuration"])][record["task"]] = record["speculation"]
    tasks = list(dict.fromkeys(record["task"] for record in document["records"]))
    print("\n| T | options | " + " | ".join(tasks) + " | mean | by position |\n" + "|---" * (len(tasks) + 4) + "|")
    for (temperature, name), by_task in rows.items():
        lengths = [1 + by_task[t]["accepted_tokens"] / max(1, by_task[t]["drafts"]) for t in tasks]
        drafts = sum(by_task[t]["drafts"] for t in tasks)
        positions = [sum(c) / drafts for c in zip(*(by_task[t]["accepted_per_position"] for t in tasks), strict=True)]
        error = 1.3 / math.sqrt(drafts)
        cells = " | ".join(f"{length:.2f}" for length in lengths)
        by_position = " ".join(f"{value:.2f}" for value in positions)
        print(f"| {temperature} | {name} | {cells} | {statistics.mean(lengths):.3f} ± {error:.3f} | {by_position} |")


def main() -> None:
    """Measure, write the JSON, print the table."""
    arguments = parse_arguments()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = build(arguments)
    document: dict[str, Any] = {
        "format": FORMAT,
        "kind": "acceptance",
        "provenance": provenance(),
        "settings": without_folders(vars(arguments)),
        "records": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for temperature in arguments.temperatures:
        for text in arguments.configurations:
            document["records"] += measure(llm, arguments, json.loads(text), temperature)
            # Written as it goes: a run of many configurations takes long.
            arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print(f"done: T={temperature} {text}", flush=True)
    print_table(document)
    os._exit(0)


if __name__ == "__main__":
    main()
