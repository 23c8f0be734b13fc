"""Run in a process of its own: samples the tiny target many times and prints counts of the first tokens, as JSON.

Arguments: one JSON object with ``speculative`` (a ``--speculative-config``, or null), ``samples`` (for each law),
``laws`` (name → sampling parameters), ``depth`` (tokens counted), ``shift_rows`` (deliberately hands every request its
neighbour's rows), ``stops`` (drafts stop early, by rules that look at no clock, and texts repeat others), ``seed``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

PROMPTS = ("The json module", "def main():", "A list is", "Return the", "x = 1, y = 2, x = 1, y = 2, x =")


def shift_rows() -> None:
    """Sabotage: request i gets the rows of request i + 1."""
    from vllm_tokentiming.vllm_adapter.draft_rows import DraftRows, RaggedRows

    stock = DraftRows.fill

    def fill(self: DraftRows, proposals: Any) -> RaggedRows | None:
        rows = stock(self, proposals)
        if rows is not None and len(rows._starts) > 1:
            total = sum(rows._counts)
            starts = [*rows._starts[1:], 0]
            # Stay inside the buffer where the neighbour has fewer rows.
            rows._starts = [min(start, total - count) for start, count in zip(starts, rows._counts, strict=True)]
        return rows

    DraftRows.fill = fill


def proposer_of(llm: Any) -> Any:
    """The plugin's object in an engine of this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter


def stop_drafts_early(llm: Any) -> None:
    """Drafting never pays between models this small, so by the clock there would be nothing to test.

    All repeats that there are are appended to drafts, worth it or not.
    """
    from vllm_tokentiming.vllm_adapter.start_up import build_length

    proposer = proposer_of(llm)
    length = build_length(proposer._options, proposer._max_proposal, timed=False)
    length.least_chance = lambda _row: 0.0  # type: ignore[method-assign]
    proposer._pipeline._length = length


def repeat_other_texts(llm: Any) -> None:
    """Texts this short hardly ever repeat themselves: what follows a token in the target's greedy texts is taken."""
    from vllm import SamplingParams

    from vllm_tokentiming.repeats import Repeat, RequestRepeats

    greedy = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, detokenize=False)
    follows: dict[int, int] = {}
    for output in llm.generate(list(PROMPTS), greedy, use_tqdm=False):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        follows.update(pairwise(ids))

    def find(self: RequestRepeats, most: int, *, after: Sequence[int] = ()) -> Repeat | None:
        last = [*self._ids, *after][-1]
        ids = [last]
        while len(ids) <= most and ids[-1] in follows:
            ids.append(follows[ids[-1]])
        # Long matches are likely enough to be proposed instead of a draft, short ones are appended to it.
        return Repeat(ids[1:], 16 if last % 3 == 0 else 3) if len(ids) > 1 else None

    RequestRepeats.find = find


def main() -> None:
    """Sample and print."""
    job = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if job.get("shift_rows"):
        shift_rows()
    from vllm import LLM, SamplingParams

    from vllm_tokentiming.tiny_pair import tiny_pair

    llm = LLM(
        model=str(tiny_pair().target),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=256,
        speculative_config=job["speculative"],
        disable_log_stats=False,
        seed=job["seed"],
    )
    if job.get("stops"):
        repeat_other_texts(llm)
        stop_drafts_early(llm)
    dice = random.Random(job["seed"])
    requests: list[tuple[str, str, SamplingParams]] = []
    per_request = min(100, job["samples"])
    for name, parameters in job["laws"].items():
        for index in range(job["samples"] // per_request):
            # Requests that finish at different times, later than the tokens that are counted.
            tokens = job["depth"] + dice.randint(1, 6)
            params = SamplingParams(n=per_request, max_tokens=tokens, ignore_eos=True, detokenize=False, **parameters)
            requests.append((name, PROMPTS[index % len(PROMPTS)], params))
    dice.shuffle(requests)
    begun = time.perf_counter()
    outputs = llm.generate([prompt for _, prompt, _ in requests], [params for *_, params in requests], use_tqdm=False)
    seconds = time.perf_counter() - begun
    counts: dict[str, Counter[str]] = {name: Counter() for name in job["laws"]}
    for (name, prompt, _), output in zip(requests, outputs, strict=True):
        for sample in output.outputs:
            counts[name][f"{PROMPTS.index(prompt)}:" + ",".join(map(str, sample.token_ids[: job["depth"]]))] += 1
    speculation = {
        m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode") and hasattr(m, "value")
    }
    if job["speculative"]:
        speculation |= proposer_of(llm)._metrics.totals
    print(json.dumps({"counts": counts, "seconds": seconds, "speculation": speculation}), file=answers, flush=True)
    answers.close()
    # The engine's shutdown can hang at interpreter exit; everything is printed.
    os._exit(0)


if __name__ == "__main__":
    main()
