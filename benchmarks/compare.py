"""Tables from one result file: ``python -m benchmarks.compare FILE.json`` [--baseline NAME]."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.systems import BASELINE


def speed_ups(document: dict[str, Any], *, baseline: str) -> dict[tuple[float, str], dict[str, list[float]]]:
    """Ratio of tokens per second to the baseline's on the same prompts, by (temperature, system) and task.

    Where the baseline was measured at one temperature only, that serves all.
    """
    rates: dict[tuple[str, str], dict[tuple[float, str], float]] = defaultdict(dict)
    for record in document["records"]:
        rate = sum(map(len, record["token_ids"])) / record["seconds"]
        rates[record["task"], str(record["question_ids"])][record["temperature"], record["system"]] = rate
    ratios: dict[tuple[float, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (task, _), by_system in rates.items():
        of_baseline = {temperature: rate for (temperature, system), rate in by_system.items() if system == baseline}
        for (temperature, system), rate in by_system.items():
            reference = of_baseline.get(temperature) or next(iter(of_baseline.values()), None)
            if reference is not None:
                ratios[temperature, system][task].append(rate / reference)
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
    print("| T | system | " + " | ".join(tasks) + " | mean of tasks | quartiles |")
    print("|---" * (len(tasks) + 4) + "|")
    for (temperature, system), by_task in sorted(speed_ups(document, baseline=baseline).items()):
        means = [statistics.geometric_mean(by_task[task]) for task in tasks if task in by_task]
        all_ratios = [ratio for task in tasks for ratio in by_task.get(task, [])]
        low, _, high = statistics.quantiles(all_ratios, n=4) if len(all_ratios) > 1 else (all_ratios * 3)
        row = " | ".join(f"{mean:.2f}" for mean in means)
        print(f"| {temperature} | {system} | {row} | {statistics.mean(means):.2f} | {low:.2f}–{high:.2f} |")
    print("\n| T | system | accepted share | tokens per verify pass | accepted by position |")
    print("|---|---|---|---|---|")
    for (temperature, system), row in sorted(acceptance(document).items()):
        positions = " ".join(f"{value:.2f}" for value in row["by position"])
        print(
            f"| {temperature} | {system} | {row['accepted share']:.3f} | {row['accepted length']:.2f} | {positions} |"
        )
    for system, (equal, total) in outputs_equal(document, baseline=baseline).items():
        print(f"\n{system}: {equal} of {total} outputs at T=0 equal {baseline}'s token for token")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--baseline", default=BASELINE)
    arguments = parser.parse_args()
    print_tables(json.loads(arguments.file.read_text(encoding="utf-8")), baseline=arguments.baseline)


if __name__ == "__main__":
    main()
