"""Plots of result files: ``python -m benchmarks.plots FILE.json OUT.svg`` (or ``.png``), by what the file holds.

Needs matplotlib (``pip install '.[plots]'``).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.compare import speed_ups
from benchmarks.systems import BASELINE
from benchmarks.time_shares import PARTS, shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def end_to_end(document: dict[str, Any], axes: Axes) -> None:
    """Speed-up by task: geometric means, and the quartiles over prompts."""
    ratios = speed_ups(document, baseline=BASELINE)
    series = sorted(key for key in ratios if key[1] != BASELINE)
    tasks = list(dict.fromkeys(record["task"] for record in document["records"]))
    width = 0.8 / max(1, len(series))
    for place, (temperature, system) in enumerate(series):
        by_task = ratios[temperature, system]
        means = [statistics.geometric_mean(by_task[task]) for task in tasks]
        quartiles = [statistics.quantiles(by_task[task], n=4, method="inclusive") if len(by_task[task]) > 1 else [m] * 3
                     for task, m in zip(tasks, means, strict=True)]  # fmt: skip
        errors = [
            [max(0.0, mean - low) for mean, (low, _, _) in zip(means, quartiles, strict=True)],
            [max(0.0, high - mean) for mean, (_, _, high) in zip(means, quartiles, strict=True)],
        ]
        at = [number + (place - (len(series) - 1) / 2) * width for number in range(len(tasks))]
        axes.bar(at, means, width, yerr=errors, capsize=2, label=f"{system}, T={temperature:g}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), [task.replace("_", " ") for task in tasks])
    axes.set_ylabel("× no speculation")
    axes.legend(frameon=False)


def time_shares(document: dict[str, Any], axes: Axes) -> None:
    """Milliseconds of a cycle, stacked by part; what is too small to see is summed up."""
    sums = shares(document)
    models = ("target pass", "draft")
    rest = [part for part in PARTS if part not in models]
    left = [0.0] * len(sums)
    for name, parts in (*((model, [model]) for model in models), ("everything else", rest)):
        values = [1e3 * sum(total[part] for part in parts) / total["cycles"] for total in sums.values()]
        axes.barh(range(len(sums)), values, left=left, label=f"{name}: " + ", ".join(f"{v:.1f} ms" for v in values))
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(sums)), [f"T={temperature:g}" for temperature in sums])
    axes.set_xlabel("ms a cycle")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.35), ncols=3)


def soak(document: dict[str, Any], axes: Axes) -> None:
    """Memory of all processes, and the share of drafted tokens that was accepted between two samples, over time."""
    samples = document["samples"]
    minutes = [(sample["seconds"] - samples[0]["seconds"]) / 60 for sample in samples]
    memory = [sample["resident_bytes"] / 2**20 for sample in samples]
    axes.plot(minutes, memory, label="resident memory")
    axes.set_ylim(0, 1.2 * max(memory))
    axes.set_xlabel("minutes of mixed load")
    axes.set_ylabel("MiB")
    step = max(1, len(samples) // 30)
    pairs = [(samples[i - step], samples[i]) for i in range(step, len(samples), step)]
    shares_accepted = [
        (after["accepted"] - before["accepted"]) / max(1.0, after["drafted"] - before["drafted"])
        for before, after in pairs
    ]
    right = axes.twinx()
    right.plot(
        [(after["seconds"] - samples[0]["seconds"]) / 60 for _, after in pairs],
        shares_accepted,
        color="tab:orange",
        label="accepted share",
    )
    right.set_ylim(0, 1)
    right.set_ylabel("accepted of drafted")
    axes.figure.legend(frameon=False, loc="upper center", ncols=2)


KINDS = {"end_to_end": end_to_end, "time_shares": time_shares, "soak": soak}


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw one result file.

    Raises:
        ValueError: there is no plot of its kind.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "tokentiming"  # the same file from the same figures
    from matplotlib import pyplot as plt

    if document.get("kind") not in KINDS:
        raise ValueError(f"no plot of {document.get('kind')!r}; there are plots of {', '.join(KINDS)}")
    figure, axes = plt.subplots(figsize=(8, 3.2 if document["kind"] == "end_to_end" else 2.2))
    KINDS[document["kind"]](document, axes)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight", dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    draw(json.loads(arguments.file.read_text(encoding="utf-8")), arguments.output)


if __name__ == "__main__":
    main()
