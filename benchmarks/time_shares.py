"""Where a decoding cycle's time goes: the target's pass, the draft's steps, and everything besides the two models.

    python -m benchmarks.time_shares --target DIR --draft DIR --prompts spec_bench.jsonl --output FILE.json

One engine in this process, batch 1; prefill is left out. Each part is timed where it runs, and what is left of a step
is vLLM's scheduler and output processing.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.engine_worker import further_sampling, model_runner, prompt_ids, sampling_fields
from benchmarks.prompts import FIVE_TASKS, load_prompts
from benchmarks.provenance import provenance, without_folders

FORMAT = 1
OURS = ("context", "proposal", "rows")
PARTS = ("target pass", "target sampling", "draft", *OURS, "rest of the plugin", "rest of vLLM")
"""In the order of a cycle. All but the first and the draft are overhead."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(FIVE_TASKS))
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--sampling", type=further_sampling, default={}, metavar="JSON", help="as of benchmarks.run")
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--draft-options", type=json.loads, default={}, help="further plugin options")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


class StepClock:
    """Seconds by part, of the steps that :meth:`step` takes.

    Args:
        llm: a ``vllm.LLM`` whose engine is in this process.
    """

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._runner = model_runner(llm)
        self._metrics = self._runner.drafter._metrics
        self._spent: Counter[str] = Counter()
        for name in ("execute_model", "sample_tokens", "propose_draft_token_ids"):
            setattr(self._runner, name, self._timed(name, getattr(self._runner, name)))

    def step(self) -> tuple[Any, dict[str, float]]:
        """One step of the engine, and the seconds of each of :data:`PARTS`."""
        self._spent.clear()
        before = dict(self._metrics.totals)
        begun = time.perf_counter()
        outputs = self._engine.step()
        wall = time.perf_counter() - begun
        stages = {s: self._metrics.totals[f"seconds/{s}"] - before[f"seconds/{s}"] for s in ("draft", *OURS)}
        sampled, proposed = self._spent["sample_tokens"], self._spent["propose_draft_token_ids"]
        return outputs, {
            "target pass": self._spent["execute_model"],
            "target sampling": sampled - proposed,
            **stages,
            "rest of the plugin": proposed - sum(stages.values()),
            "rest of vLLM": wall - self._spent["execute_model"] - sampled,
        }

    def _timed(self, name: str, stock: Any) -> Any:
        @functools.wraps(stock)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return stock(*args, **kwargs)
            finally:
                self._spent[name] += time.perf_counter() - begun

        return timed


def measure(llm: Any, clock: StepClock, prompt_ids: list[int], sampling: dict[str, Any]) -> Counter[str]:
    """Seconds by part of one request's decoding, with its cycles and tokens."""
    from vllm import SamplingParams

    llm.llm_engine.add_request("measured", {"prompt_token_ids": prompt_ids}, SamplingParams(**sampling))
    sums: Counter[str] = Counter()
    tokens = 0
    while llm.llm_engine.has_unfinished_requests():
        outputs, parts = clock.step()
        if tokens:
            sums.update(parts)
            sums["cycles"] += 1
        if outputs:
            sums["tokens"] += len(outputs[0].outputs[0].token_ids) - tokens if tokens else 0
            tokens = len(outputs[0].outputs[0].token_ids)
    return sums


def main() -> None:
    """Measure, write the JSON, print a table."""
    arguments = parse_arguments()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm = LLM(
        model=arguments.target,
        dtype="bfloat16",
        enforce_eager=arguments.enforce_eager,
        max_model_len=4096,
        max_num_seqs=8,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "tokentiming",
            "model": arguments.draft,
            "num_speculative_tokens": arguments.num_speculative_tokens,
            **arguments.draft_options,
        },
    )
    clock, tokenizer = StepClock(llm), llm.get_tokenizer()
    prompts = load_prompts(arguments.prompts, tasks=arguments.tasks, per_task=arguments.per_task)
    records = []
    warm_up = sampling_fields(arguments.sampling, temperature=0.0, max_tokens=32)
    measure(llm, clock, prompt_ids(tokenizer, prompts[0].text), warm_up)
    for temperature in arguments.temperatures:
        sampling = sampling_fields(arguments.sampling, temperature=temperature, max_tokens=arguments.max_tokens)
        for prompt in prompts:
            ids = prompt_ids(tokenizer, prompt.text)
            sums = measure(llm, clock, ids, sampling)
            records.append({"temperature": temperature, "task": prompt.task, "question_id": prompt.question_id, **sums})
    document = {
        "format": FORMAT,
        "kind": "time_shares",
        "provenance": provenance(),
        "settings": without_folders(vars(arguments)),
        "records": records,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print_table(document)
    os._exit(0)


def shares(document: dict[str, Any]) -> dict[float, Counter[str]]:
    """Sums over all prompts, by temperature."""
    sums: dict[float, Counter[str]] = {}
    for record in document["records"]:
        total = sums.setdefault(record["temperature"], Counter())
        total.update({key: record.get(key, 0) for key in (*PARTS, "cycles", "tokens")})
    return sums


def print_table(document: dict[str, Any]) -> None:
    """Milliseconds a cycle and shares, as Markdown."""
    for temperature, sums in shares(document).items():
        whole = sum(sums[part] for part in PARTS)
        print(
            f"\nT={temperature}: {sums['cycles']:.0f} cycles, {sums['tokens'] / sums['cycles']:.2f} tokens each\n\n"
            "| part | ms a cycle | share |\n|---|---|---|"
        )
        for part in PARTS:
            print(f"| {part} | {1e3 * sums[part] / sums['cycles']:.2f} | {100 * sums[part] / whole:.2f} % |")


if __name__ == "__main__":
    main()
