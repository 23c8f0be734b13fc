"""Tables from result files: ``python -m benchmarks.compare FILE.json [PART2.json ...] [--baseline NAME]``.

Several files are the parts of one run: other prompts (``benchmarks.run --skip``), or other systems on the same prompts,
where the machine has no room for all at once. Systems that did not run side by side saw the machine at different times.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.systems import BASELINE


def merge(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One document with the records of all parts of a run.

    Raises:
        ValueError: parts that ran with other settings, or other prompts through other systems.
    """

    def setting(document: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in document["settings"].items() if k not in ("output", "skip", "systems")}

    first, *others = documents
    systems = {system["name"]: system for document in documents for system in document["systems"]}
    for other in others:
        differing = [k for k in setting(first) if setting(first)[k] != setting(other).get(k)]
        other_systems = {system["name"] for system in other["systems"]} != systems.keys()
        if other_systems and first["settings"].get("skip") != other["settings"].get("skip"):
            differing.append("skip")
        if differing:
            raise ValueError(
                f"these are no parts of one run, they differ in {', '.join(differing)}; compare them one by one"
            )
    records = [record for document in documents for record in document["records"]]
    return {**first, "systems": list(systems.values()), "records": records}


class Part(Enum):
    """Of which part of a record's time tokens per second are taken."""

    WHOLE = "whole"
    WHILE_FULL = "while as many requests ran as can run at once"
    AFTER_FIRST_TOKEN = "after the first token"


def rate(record: dict[str, Any], part: Part = Part.WHOLE) -> float | None:
    """Tokens per second; None where that part was not measured, or is not defined."""
    tokens = sum(map(len, record["token_ids"]))
    if part is Part.WHOLE:
        return float(tokens / record["seconds"])
    if part is Part.WHILE_FULL:
        full = record.get("full") if record.get("batch", 1) > 1 else None
        return full["tokens"] / full["seconds"] if full else None
    first = record.get("first_token_seconds") or []
    return (tokens - 1) / (record["seconds"] - first[0]) if len(first) == 1 and tokens > 1 else None


def speed_ups(
    document: dict[str, Any], *, baseline: str, part: Part = Part.WHOLE
) -> dict[tuple[float, str], dict[str, list[float]]]:
    """Ratio of tokens per second to the baseline's on the same prompts, by (temperature, system) and task.

    Where the baseline was measured at one temperature only, that serves all.
    """
    rates: dict[tuple[str, str], dict[tuple[float, str], float]] = defaultdict(dict)
    for record in document["records"]:
        if found := rate(record, part):
            rates[record["task"], str(record["question_ids"])][record["temperature"], record["system"]] = found
    ratios: dict[tuple[float, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (task, _), by_system in rates.items():
        of_baseline = {temperature: found for (temperature, system), found in by_system.items() if system == baseline}
        for (temperature, system), found in by_system.items():
            reference = of_baseline.get(temperature) or next(iter(of_baseline.values()), None)
            if reference is not None:
                ratios[temperature, system][task].append(found / reference)
    return ratios


def acceptance(document: dict[str, Any]) -> dict[tuple[float, str], dict[str, Any]]:
    """Counters by (temperature, system): share of draft tokens accepted, tokens per verify pass, by position."""
    sums: dict[tuple[float, str], dict[str, Any]] = defaultdict(dict)
    for record in document["records"]:
        total = sums[record["temperature"], record["system"]]
        for key, value in record["speculation"].items():
            if isinstance(value, list):
                total[key] = [a + b for a, b in zip(total.get(key) or [0] * len(value), value, strict=False)]
            else:
                total[key] = total.get(key, 0) + value
    table = {}
    for key, total in sums.items():
        if total.get("drafts"):
            table[key] = {
                "accepted share": total["accepted_tokens"] / total["draft_tokens"],
                "accepted length": 1 + total["accepted_tokens"] / total["drafts"],
                "by position": [n / total["drafts"] for n in total["accepted_per_position"]],
            }
    return table


def outputs_equal(document: dict[str, Any], *, baseline: str) -> dict[str, tuple[int, int]]:
    """By system: (generations equal to the baseline's token for token, generations), at temperature 0."""
    reference = {
        str(r["question_ids"]): r["token_ids"]
        for r in document["records"]
        if r["system"] == baseline and r["temperature"] == 0
    }
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for record in document["records"]:
        expected = reference.get(str(record["question_ids"]))
        if record["temperature"] == 0 and record["system"] != baseline and expected is not None:
            pairs = list(zip(record["token_ids"], expected, strict=True))
            counts[record["system"]][0] += sum(a == b for a, b in pairs)
            counts[record["system"]][1] += len(pairs)
    return {system: (equal, total) for system, (equal, total) in counts.items()}


def print_tables(document: dict[str, Any], *, baseline: str = BASELINE) -> None:
    """Print speed-ups (geometric mean by task), acceptance and output equality as Markdown, for each concurrency."""
    sizes = sorted({record.get("batch", 1) for record in document["records"]})
    for size in sizes:
        of_size = [record for record in document["records"] if record.get("batch", 1) == size]
        if len(sizes) > 1:
            print(f"\n## {size} at once")
        _print_tables({**document, "records": of_size}, baseline=baseline)


def _print_tables(document: dict[str, Any], *, baseline: str) -> None:
    tasks = list(dict.fromkeys(record["task"] for record in document["records"]))
    print(f"\nSpeed-up over {baseline} (geometric mean; quartiles over prompts)\n")
    _print_speed_ups(speed_ups(document, baseline=baseline), tasks=tasks)
    for part in (Part.WHILE_FULL, Part.AFTER_FIRST_TOKEN):
        if found := speed_ups(document, baseline=baseline, part=part):
            print(f"\nThe same {part.value}\n")
            _print_speed_ups(found, tasks=tasks)
    print("\n| T | system | accepted share | tokens per verify pass | accepted by position |")
    print("|---|---|---|---|---|")
    for (temperature, system), row in sorted(acceptance(document).items()):
        positions = " ".join(f"{value:.2f}" for value in row["by position"])
        print(
            f"| {temperature} | {system} | {row['accepted share']:.3f} | {row['accepted length']:.2f} | {positions} |"
        )
    for system, (equal, total) in outputs_equal(document, baseline=baseline).items():
        print(f"\n{system}: {equal} of {total} outputs at T=0 equal {baseline}'s token for token")


def _print_speed_ups(found: dict[tuple[float, str], dict[str, list[float]]], *, tasks: Sequence[str]) -> None:
    print("| T | system | " + " | ".join(tasks) + " | mean of tasks | quartiles |")
    print("|---" * (len(tasks) + 4) + "|")
    for (temperature, system), by_task in sorted(found.items()):
        means = [statistics.geometric_mean(by_task[task]) for task in tasks if task in by_task]
        all_ratios = [ratio for task in tasks for ratio in by_task.get(task, [])]
        low, _, high = statistics.quantiles(all_ratios, n=4) if len(all_ratios) > 1 else (all_ratios * 3)
        row = " | ".join(f"{mean:.2f}" for mean in means)
        print(f"| {temperature} | {system} | {row} | {statistics.mean(means):.2f} | {low:.2f}–{high:.2f} |")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--baseline", default=BASELINE)
    arguments = parser.parse_args()
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in arguments.files]
    print_tables(merge(documents), baseline=arguments.baseline)


if __name__ == "__main__":
    main()
