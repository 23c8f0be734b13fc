"""End-to-end speed: the same prompts through several systems, interleaved, with vLLM's own acceptance counts.

    python -m benchmarks.run --target DIR --draft DIR --prompts spec_bench.jsonl --systems none ours tli --output
    FILE.json

Every system gets every prompt, in turn and in an order that rotates, so that drift of the machine hits all alike. With
``--alternate`` the turns are not whole batches but about so many seconds, and a system's time is that of its own turns:
where a machine's speed changes from one minute to the next, systems that differ by little cannot be told apart
otherwise. Idle systems hold memory but no core. The JSON keeps one record per prompt, system and temperature, and where
it was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_worker import SAMPLING_EXAMPLE, further_sampling, sampling_fields
from benchmarks.prompts import FIVE_TASKS, Prompt, load_prompts
from benchmarks.provenance import provenance, without_folders
from benchmarks.systems import BASELINE, VLLM_WORKER, System, parse_system
from scripts.cpu_env import cpu_environment, one_process_environment

FORMAT = 2
ROOT = Path(__file__).resolve().parent.parent


class Engine:
    """The process of one system."""

    def __init__(self, system: System, shared_args: dict[str, Any], *, log: Path, takes_turns: bool = False) -> None:
        self.system = system
        # To take turns, an engine must not run ahead of who asks it: all of it in one process.
        environment = {
            **(one_process_environment(len(os.sched_getaffinity(0))) if takes_turns else cpu_environment(os.environ)),
            **system.environment,
        }
        self._log = log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", system.worker, json.dumps({**shared_args, **system.engine_args})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self.start_seconds = float(self._answer()["start_seconds"])

    @property
    def pid(self) -> int:
        """Of the process whose children run the models."""
        return self._process.pid

    def measure(self, texts: Sequence[str], sampling: dict[str, Any]) -> dict[str, Any]:
        """Generate for one batch."""
        return self.ask({"chat": list(texts), "sampling": sampling})

    def begin(self, texts: Sequence[str], sampling: dict[str, Any]) -> None:
        """Take in one batch, for :meth:`advance`."""
        self.ask({"begin": True, "chat": list(texts), "sampling": sampling})

    def advance(self, seconds: float) -> bool:
        """Generate for about so long; whether the batch is finished."""
        return bool(self.ask({"advance": seconds})["finished"])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have one request of the worker's protocol answered."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the system {self.system.name!r} ended; its log is {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--systems", nargs="+", default=["none", "ours"], help="see benchmarks/systems.py")
    parser.add_argument("--tasks", nargs="+", default=list(FIVE_TASKS))
    parser.add_argument("--per-task", type=int, default=12)
    parser.add_argument(
        "--skip", type=int, default=0, help="how many of --per-task to leave out at the front, which another run had"
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument(
        "--sampling",
        type=further_sampling,
        default={},
        metavar="JSON",
        help=f"further fields of vLLM's SamplingParams, such as {SAMPLING_EXAMPLE}",
    )
    parser.add_argument(
        "--baseline-temperature",
        type=float,
        help="measure the system without speculation at this temperature only, to save time; sampled, its passes are a "
        "little longer",
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="prompts at once; several: one by one")
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        help="requests that run at once, where a batch has more; default: all of them, in which case the last of those "
        "that end at different times run alone, unlike in a server that stays full",
    )
    parser.add_argument("--alternate", type=float, metavar="SECONDS", help="turns of so long instead of whole batches")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    """Prompts of one task, ``size`` at once; task by task in turn, so that a run that is cut short has seen all."""
    tasks = dict.fromkeys(prompt.task for prompt in prompts)
    of_tasks = {task: [prompt for prompt in prompts if prompt.task == task] for task in tasks}
    for start in range(0, max(map(len, of_tasks.values()), default=0), size):
        for of_task in of_tasks.values():
            if batch := of_task[start : start + size]:
                yield batch


def measure(
    engines: Sequence[Engine], texts: Sequence[str], sampling: dict[str, Any], *, alternate: float | None
) -> Iterator[dict[str, Any]]:
    """The same batch through all engines, one after the other or, for so many seconds each, in turn; their answers."""
    if alternate is None:
        yield from (engine.measure(texts, sampling) for engine in engines)
        return
    for engine in engines:
        engine.begin(texts, sampling)
    running = list(engines)
    while running:
        running = [engine for engine in running if not engine.advance(alternate)]
    yield from (engine.ask({"result": True}) for engine in engines)


def parse_systems(arguments: argparse.Namespace) -> list[System]:
    """The systems of the command line.

    Raises:
        ValueError: one of them is none, or cannot take turns or the settings of sampling.
    """
    systems = [
        parse_system(text, draft=arguments.draft, num_speculative_tokens=arguments.num_speculative_tokens)
        for text in arguments.systems
    ]
    if any(system.worker != VLLM_WORKER for system in systems):
        if arguments.alternate is not None:
            raise ValueError("--alternate: only systems of vLLM take turns; Hugging Face's generate whole batches")
        if arguments.sampling:
            raise ValueError("--sampling: only systems of vLLM take these fields; measure Hugging Face's without")
    return systems


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, writing the JSON document as it grows; returns it."""
    systems = parse_systems(arguments)
    prompts = load_prompts(arguments.prompts, tasks=arguments.tasks, per_task=arguments.per_task, skip=arguments.skip)
    shared = {
        "model": arguments.target,
        "dtype": arguments.dtype,
        "enforce_eager": arguments.enforce_eager,
        "max_model_len": arguments.max_model_len,
        "max_num_seqs": arguments.max_num_seqs or max(8, *arguments.batch),
        "disable_log_stats": False,
        # Every system prefills every prompt itself, each time.
        "enable_prefix_caching": False,
    }
    engines: list[Engine] = []
    records: list[dict[str, Any]] = []
    where = provenance()

    def document() -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": "end_to_end",
            "provenance": where,
            "settings": without_folders({**vars(arguments), **shared}),
            "systems": [
                {**without_folders(dataclasses.asdict(e.system)), "start_seconds": e.start_seconds} for e in engines
            ],
            "records": records,
        }

    try:
        for system in systems:
            log = arguments.output.with_suffix(f".{system.name.replace(' ', '-').replace('/', '-')}.log")
            engines.append(Engine(system, shared, log=log, takes_turns=arguments.alternate is not None))
            print(f"{system.name}: ready after {engines[-1].start_seconds:.0f} s", flush=True)
        for engine in engines:
            # Long enough that every kernel shape of the run has been seen.
            for size, temperature in itertools.product(arguments.batch, arguments.temperatures):
                engine.measure(
                    [prompts[0].text] * size,
                    sampling_fields(arguments.sampling, temperature=temperature, max_tokens=32),
                )
        turns = [(size, batch) for size in arguments.batch for batch in batches(prompts, size)]
        for turn, (size, batch) in enumerate(turns):
            for temperature in arguments.temperatures:
                in_order = [engines[(turn + place) % len(engines)] for place in range(len(engines))]
                if arguments.baseline_temperature not in (None, temperature):
                    in_order = [engine for engine in in_order if engine.system.name != BASELINE]
                texts = [prompt.text for prompt in batch]
                sampling = sampling_fields(arguments.sampling, temperature=temperature, max_tokens=arguments.max_tokens)
                answers = measure(in_order, texts, sampling, alternate=arguments.alternate)
                for engine, answer in zip(in_order, answers, strict=True):
                    records.append(
                        {
                            "system": engine.system.name,
                            "temperature": temperature,
                            "batch": size,
                            "task": batch[0].task,
                            "question_ids": [prompt.question_id for prompt in batch],
                            **answer,
                        }
                    )
            print(f"{turn + 1} of {len(turns)}: {batch[0].task}", flush=True)
            # Written as it goes: a run takes long.
            arguments.output.write_text(json.dumps(document(), indent=1) + "\n", encoding="utf-8")
    finally:
        for engine in engines:
            engine.close()
    return document()


def main() -> None:
    """Run, write the JSON, print the tables."""
    from benchmarks.compare import print_tables

    arguments = parse_arguments()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    print_tables(run(arguments))


if __name__ == "__main__":
    main()
