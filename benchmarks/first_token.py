"""Latency of the first token by prompt length, of a prompt sent again, and memory, with and without speculation.

    python -m benchmarks.first_token --target DIR --draft DIR --prompts spec_bench.jsonl --lengths 128 1024 8000
    --output FILE.json

Prefix caching is on. Every prompt is new to the server when it is sent first, and then sent again with some new words
after it, as a conversation goes on. Systems take turns. Memory is the proportional set size of the system's processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.engine_worker import sampling_fields
from benchmarks.prompts import load_prompts
from benchmarks.provenance import provenance, without_folders
from benchmarks.run import Engine
from benchmarks.systems import parse_system

FORMAT = 1
ADDED = 32
"""Tokens after a prompt that is sent again."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="their texts, one after the other, are the prompts")
    parser.add_argument("--systems", nargs="+", default=["none", "ours"], help="see benchmarks/systems.py")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024, 8000], help="tokens")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def cut_prompts(token_ids: Sequence[int], lengths: Sequence[int], *, repeats: int) -> list[tuple[int, list[int]]]:
    """(length, token ids with :data:`ADDED` more) pieces of one long text that do not overlap, lengths in turn.

    Raises:
        ValueError: the text is too short.
    """
    pieces, start = [], 0
    for length in list(lengths) * repeats:
        piece = list(token_ids[start : start + length + ADDED])
        if len(piece) < length + ADDED:
            raise ValueError(
                f"the prompts have {len(token_ids)} tokens, which is too few; lower --repeats or --lengths"
            )
        pieces.append((length, piece))
        start += length + ADDED
    return pieces


def memory_gib(pid: int) -> float:
    """Proportional set size of a process and all below it, GiB."""
    root = psutil.Process(pid)
    return sum(process.memory_full_info().pss for process in (root, *root.children(recursive=True))) / 2**30


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; returns the JSON document."""
    from transformers import AutoTokenizer

    texts = load_prompts(arguments.prompts, tasks=("summarization", "rag"), per_task=80)
    token_ids = AutoTokenizer.from_pretrained(arguments.target).encode("\n\n".join(prompt.text for prompt in texts))
    # The first ones are for warming up.
    pieces = cut_prompts(token_ids, arguments.lengths, repeats=arguments.repeats + 1)
    sampling = sampling_fields({}, temperature=0.0, max_tokens=arguments.max_tokens)
    shared = {
        "model": arguments.target,
        "dtype": arguments.dtype,
        "enforce_eager": arguments.enforce_eager,
        "max_model_len": max(arguments.lengths) + ADDED + arguments.max_tokens + arguments.num_speculative_tokens + 64,
        "max_num_seqs": 8,
        "disable_log_stats": False,
        "enable_prefix_caching": True,
    }
    engines, records, memory = [], [], {}
    try:
        for text in arguments.systems:
            system = parse_system(text, draft=arguments.draft, num_speculative_tokens=arguments.num_speculative_tokens)
            engines.append(Engine(system, shared, log=arguments.output.with_suffix(f".{len(engines)}.log")))
            memory[system.name] = {"started": memory_gib(engines[-1].pid)}
        for number, (length, ids) in enumerate(pieces):
            for place in range(len(engines)):
                engine = engines[(number + place) % len(engines)]
                for sent, prompt in (("first", ids[:length]), ("again", ids)):
                    answer = engine.ask({"prompt_token_ids": [prompt], "sampling": sampling})
                    if number >= len(arguments.lengths):
                        records.append({"system": engine.system.name, "length": length, "sent": sent, **answer})
        for engine in engines:
            memory[engine.system.name]["ended"] = memory_gib(engine.pid)
    finally:
        for engine in engines:
            engine.close()
    return {
        "format": FORMAT,
        "kind": "first_token",
        "provenance": provenance(),
        "settings": without_folders({**vars(arguments), **shared}),
        "memory_gib": memory,
        "records": records,
    }


def print_table(document: dict[str, Any]) -> None:
    """Medians and ranges of the first token's latency, as Markdown."""
    print("| tokens | sent | system | first token, s | range | whole request, s |\n|---|---|---|---|---|---|")
    for key in dict.fromkeys((r["length"], r["sent"], r["system"]) for r in document["records"]):
        chosen = [r for r in document["records"] if (r["length"], r["sent"], r["system"]) == key]
        first = [r["first_token_seconds"][0] for r in chosen]
        whole = statistics.median(r["seconds"] for r in chosen)
        print(
            f"| {key[0]} | {key[1]} | {key[2]} | {statistics.median(first):.3f} "
            f"| {min(first):.3f}–{max(first):.3f} | {whole:.2f} |"
        )
    for system, sizes in document["memory_gib"].items():
        print(f"\n{system}: {sizes['started']:.2f} GiB when started, {sizes['ended']:.2f} GiB in the end")


def main() -> None:
    """Measure, write the JSON, print a table."""
    arguments = parse_arguments()
    document = run(arguments)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print_table(document)


if __name__ == "__main__":
    main()
