"""What one call of the alignment costs, beside the same dynamic program in plain Python.

    python -m benchmarks.micro.alignment [--json FILE] [--seconds 1.0]

The texts are made up: English words cut at random into draft tokens and, on their own, into proxy tokens, k of each, so
that tokens are as long as real ones and the two sides spell the same beginning. Times are per call, whole batch, Python
overhead included, arrays ready; CPU time of the calling thread, so that waiting for other processes does not count. The
plain version is how research code writes it: strings, nested lists, a float infinity outside the band, one request at a
time. It returns the same costs, which is checked first.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

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


def plain_dtw(draft: list[str], proxy: list[str], window_radius: int) -> tuple[list[tuple[int, int]], float]:
    k, m = len(draft), len(proxy)
    window = max(window_radius, abs(k - m))
    cost = [[math.inf] * (m + 1) for _ in range(k + 1)]
    cost[0][0] = 0
    for i in range(1, k + 1):
        for j in range(max(1, i - window), min(m, i + window) + 1):
            local = plain_levenshtein(draft[i - 1], proxy[j - 1])
            cost[i][j] = local + min(cost[i - 1][j - 1], cost[i - 1][j], cost[i][j - 1])
    path, i, j = [], k, m
    while i > 0 and j > 0:
        path.append((i - 1, j - 1))
        best = min(cost[i - 1][j - 1], cost[i - 1][j], cost[i][j - 1])
        if best == cost[i - 1][j - 1]:
            i, j = i - 1, j - 1
        elif best == cost[i - 1][j]:
            i -= 1
        else:
            j -= 1
    return path[::-1], cost[k][m]


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


def run(seconds: float) -> list[dict[str, Any]]:
    results = []
    for length in LENGTHS:
        for batch in BATCHES:
            generator = random.Random(length * 1000 + batch)
            texts = [" ".join(generator.choices(WORDS, k=2 * length)) for _ in range(batch)]
            drafts = [cut(text, generator, length) for text in texts]
            proxies = [cut(text, generator, length) for text in texts]
            draft_words = sorted({token for tokens in drafts for token in tokens})
            target_words = sorted({token for tokens in proxies for token in tokens})
            aligner = Aligner(*table(draft_words), *table(target_words), window_radius=WINDOW_RADIUS)
            offsets = np.arange(0, batch * length + 1, length, dtype=np.int32)
            draft_ids = np.array([draft_words.index(t) for tokens in drafts for t in tokens], dtype=np.int32)
            proxy_ids = np.array([target_words.index(t) for tokens in proxies for t in tokens], dtype=np.int32)

            def compiled_call(aligner=aligner, draft_ids=draft_ids, proxy_ids=proxy_ids, offsets=offsets):
                return aligner.align(draft_ids, offsets, proxy_ids, offsets)

            def plain_call(drafts=drafts, proxies=proxies):
                return [plain_dtw(draft, proxy, WINDOW_RADIUS) for draft, proxy in zip(drafts, proxies, strict=True)]

            plain_costs = [cost for _, cost in plain_call()]
            if compiled_call().cost.tolist() != plain_costs:
                sys.exit(f"the two implementations disagree at k = m = {length}, batch {batch}")
            compiled, plain = measure(compiled_call, seconds), measure(plain_call, seconds)
            results.append(
                {
                    "tokens_per_side": length,
                    "batch": batch,
                    "compiled": compiled,
                    "plain_python": plain,
                    "speed_up": round(plain["median_us"] / compiled["median_us"], 1),
                }
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write results and provenance to this file")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    arguments = parser.parse_args()
    began = time.perf_counter()
    warm_up()
    start_up = time.perf_counter() - began
    results = run(arguments.seconds)
    print(f"kernel ready after {start_up:.2f} s; µs of CPU time per call, window radius {WINDOW_RADIUS}")
    print(f"{'k = m':>6} {'batch':>6} {'median':>9} {'p90':>9} {'plain median':>13} {'plain p90':>11} {'ratio':>7}")
    for row in results:
        compiled, plain = row["compiled"], row["plain_python"]
        print(
            f"{row['tokens_per_side']:6d} {row['batch']:6d} {compiled['median_us']:9.1f} {compiled['p90_us']:9.1f} "
            f"{plain['median_us']:13.1f} {plain['p90_us']:11.1f} {row['speed_up']:7.1f}"
        )
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
