"""What one call of the alignment costs, beside the same dynamic program in plain Python, in libraries and as published.

    python -m benchmarks.micro.alignment [--json FILE] [--seconds 1.0] [--authors candidate_generator.py]

The texts are made up: English words cut at random into draft tokens and, on their own, into proxy tokens, k of each, so
that tokens are as long as real ones and the two sides spell the same beginning. Times are per call, whole batch, Python
overhead included, arrays ready; CPU time of the calling thread, so that waiting for other processes does not count. The
plain version is how research code writes it: strings, nested lists, a float infinity outside the band, one request at a
time. The others are ``benchmarks.micro.alignment_peers``. That all find paths of the same cost is checked first.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.micro.alignment_peers import dynamic_program, peers
from benchmarks.provenance import provenance
from vllm_tokentiming.alignment import Aligner, warm_up

WINDOW_RADIUS = 8
LENGTHS = (5, 10, 20)
BATCHES = (1, 32)
TEXT = (
    "the speculative decoder proposes several tokens and the larger model verifies them in one forward pass although "
    "their vocabularies differ so that New York may be one token here but two tokens there whereas "
    "internationalisation is never a single one and def main(argv): return 0 stands for programs"
)
WORDS = TEXT.split()


def plain_levenshtein(left: str, right: str) -> int:
    previous = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        current = [i]
        for j, b in enumerate(right, 1):
            current.append(min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (a != b)))
        previous = current
    return previous[-1]


def plain_dtw(draft: list[str], proxy: list[str]) -> list[tuple[int, int]]:
    return dynamic_program(plain_levenshtein, draft, proxy, WINDOW_RADIUS)[0]


def cut(text: str, generator: random.Random, count: int) -> list[str]:
    """The first ``count`` tokens of a tokenizer that keeps most words whole."""
    tokens: list[str] = []
    for word in text.split(" "):
        place = generator.randrange(1, len(word)) if len(word) > 3 and generator.random() < 0.35 else None
        tokens += [" " + word] if place is None else [" " + word[:place], word[place:]]
        if len(tokens) >= count:
            break
    return tokens[:count]


def table(tokens: list[str]) -> tuple[np.ndarray, np.ndarray]:
    encoded = [token.encode() for token in tokens]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets


def measure(call: Callable[[], object], seconds: float) -> dict[str, float]:
    """Microseconds per call, from samples taken for about this many seconds."""
    began = time.perf_counter()
    call()
    once = time.perf_counter() - began
    # Short calls are timed in groups of about 200 µs, or reading the clock (up to 1 µs) would be in the numbers.
    group = max(1, int(200e-6 / max(once, 1e-7)))
    samples = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(samples) < 20:
        began = time.thread_time()
        for _ in range(group):
            call()
        samples.append((time.thread_time() - began) / group * 1e6)
    return {
        "median_us": round(statistics.median(samples), 3),
        "p90_us": round(statistics.quantiles(samples, n=10)[-1], 3),
        "calls": group * len(samples),
    }


def run(seconds: float, *, authors: Path | None) -> list[dict[str, Any]]:
    others = {"plain Python": plain_dtw, **dict(peers(window_radius=WINDOW_RADIUS, authors=authors))}
    results = []
    for length in LENGTHS:
        for batch in BATCHES:
            generator = random.Random(length * 1000 + batch)
            texts = [" ".join(generator.choices(WORDS, k=2 * length)) for _ in range(batch)]
            pairs = [(cut(text, generator, length), cut(text, generator, length)) for text in texts]
            compiled_call = compiled(pairs)
            costs = compiled_call().cost.tolist()
            row: dict[str, Any] = {"tokens_per_side": length, "batch": batch}
            row["compiled"] = measure(compiled_call, seconds)
            for name, align in others.items():
                paths = [align(*pair) for pair in pairs]
                if [path_cost(path, *pair) for path, pair in zip(paths, pairs, strict=True)] != costs:
                    sys.exit(f"{name} finds other costs at k = m = {length}, batch {batch}")
                row[name] = measure(lambda align=align, pairs=pairs: [align(*pair) for pair in pairs], seconds)
            results.append(row)
    return results


def compiled(pairs: Sequence[tuple[list[str], list[str]]]) -> Callable[[], Any]:
    """A call that aligns all pairs of this batch, arrays ready."""
    draft_words = sorted({token for draft, _ in pairs for token in draft})
    target_words = sorted({token for _, proxy in pairs for token in proxy})
    aligner = Aligner(*table(draft_words), *table(target_words), window_radius=WINDOW_RADIUS)
    draft_offsets = np.cumsum([0, *(len(draft) for draft, _ in pairs)]).astype(np.int32)
    proxy_offsets = np.cumsum([0, *(len(proxy) for _, proxy in pairs)]).astype(np.int32)
    draft_ids = np.array([draft_words.index(token) for draft, _ in pairs for token in draft], dtype=np.int32)
    proxy_ids = np.array([target_words.index(token) for _, proxy in pairs for token in proxy], dtype=np.int32)
    return lambda: aligner.align(draft_ids, draft_offsets, proxy_ids, proxy_offsets)


def path_cost(path: Sequence[tuple[int, int]], draft: list[str], proxy: list[str]) -> float:
    """Sum of the edit distances along a path."""
    return float(sum(plain_levenshtein(draft[i], proxy[j]) for i, j in path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write results and provenance to this file")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    parser.add_argument("--authors", type=Path, help="candidate_generator.py of the paper's code, to run its DTW too")
    arguments = parser.parse_args()
    began = time.perf_counter()
    warm_up()
    start_up = time.perf_counter() - began
    results = run(arguments.seconds, authors=arguments.authors)
    names = [name for name in results[0] if isinstance(results[0][name], dict)]
    print(f"kernel ready after {start_up:.2f} s; median µs of CPU time per call, window radius {WINDOW_RADIUS}\n")
    print("| k = m | batch | " + " | ".join(names) + " |\n" + "|---" * (2 + len(names)) + "|")
    for row in results:
        medians = " | ".join(f"{row[name]['median_us']:.1f}" for name in names)
        print(f"| {row['tokens_per_side']} | {row['batch']} | {medians} |")
    if arguments.json:
        report = {
            "benchmark": "micro.alignment",
            "window_radius": WINDOW_RADIUS,
            "clock": "CPU time of the calling thread",
            "kernel_start_up_seconds": round(start_up, 3),
            "results": results,
            "provenance": provenance(),
        }
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
