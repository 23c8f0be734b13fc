"""One system in a process of its own: builds ``vllm.LLM`` once, then answers one JSON line per measurement.

The parent (``benchmarks.run``) keeps one of these for each system and asks them in turn, so that drift of the machine
hits all alike.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}


def model_runner(llm: Any) -> Any:
    """The runner of an engine in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``)."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def speculation_counters(llm: Any) -> dict[str, Any]:
    """VLLM's own speculative counters, summed up to now."""
    values: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            values[COUNTERS[metric.name]] = metric.values if hasattr(metric, "values") else metric.value
    return values


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Counters of one measurement."""
    change: dict[str, Any] = {}
    for key, value in after.items():
        if isinstance(value, list):
            earlier = before.get(key) or [0] * len(value)
            change[key] = [a - b for a, b in zip(value, earlier, strict=False)]
        else:
            change[key] = value - before.get(key, 0)
    return change


class Step(NamedTuple):
    """What a step of the engine left: when it ended, all tokens so far, requests that have one, and that want more."""

    seconds: float
    tokens: int
    begun: int
    unfinished: int


def while_full(steps: Sequence[Step], *, slots: int) -> dict[str, float] | None:
    """Seconds and tokens of the time in which ``slots`` requests ran, as in a server that stays full.

    At the end of a batch the last requests run alone, and longer where they speculate, since some get more tokens
    accepted than others. None where there was no such time.
    """
    full = [step for step in steps if step.begun >= slots and step.unfinished >= slots]
    if len(full) < 2:
        return None
    first, last = full[0], full[-1]
    return {"seconds": last.seconds - first.seconds, "tokens": last.tokens - first.tokens}


def measure(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Run one batch of prompts to the end."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    outputs: dict[str, Any] = {}
    steps: list[Step] = []
    before = speculation_counters(llm)
    begun = time.perf_counter()
    for place, ids in enumerate(request["prompt_token_ids"]):
        engine.add_request(str(place), {"prompt_token_ids": ids}, SamplingParams(**request["sampling"]))
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs.values())
        unfinished = len(request["prompt_token_ids"]) - sum(output.finished for output in outputs.values())
        steps.append(Step(time.perf_counter() - begun, tokens, len(outputs), unfinished))
    seconds = time.perf_counter() - begun
    after = speculation_counters(llm)
    ordered = [outputs[str(place)] for place in range(len(outputs))]
    slots = min(len(ordered), llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)
    return {
        "seconds": seconds,
        "full": while_full(steps, slots=slots),
        "token_ids": [list(output.outputs[0].token_ids) for output in ordered],
        "first_token_seconds": [output.metrics.first_token_latency for output in ordered],
        "speculation": difference(after, before),
    }


def main() -> None:
    """Serve measurements until standard input ends."""
    # vLLM and its children write to standard output too; answers get a file descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    engine_args = json.loads(sys.argv[1])
    begun = time.perf_counter()
    llm = LLM(**engine_args)
    tokenizer = llm.get_tokenizer()
    print(json.dumps({"ready": True, "start_seconds": time.perf_counter() - begun}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "chat" in request:
            request["prompt_token_ids"] = [prompt_ids(tokenizer, text) for text in request.pop("chat")]
        print(json.dumps(measure(llm, request)), file=answers, flush=True)


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """A question as the target is asked it: through its chat template, where it has one."""
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode(text))
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(rendered, add_special_tokens=False))


if __name__ == "__main__":
    main()
