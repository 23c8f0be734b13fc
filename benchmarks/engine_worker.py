"""One system in a process of its own: builds ``vllm.LLM`` once, then answers one JSON line per measurement.

The parent (``benchmarks.run``) keeps one of these for each system and asks them in turn, so that drift of the machine
hits all alike.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

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


def measure(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Run one batch of prompts to the end."""
    from vllm import SamplingParams

    params = SamplingParams(**request["sampling"])
    prompts = [{"prompt_token_ids": ids} for ids in request["prompt_token_ids"]]
    before = speculation_counters(llm)
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    after = speculation_counters(llm)
    return {
        "seconds": seconds,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "first_token_seconds": [output.metrics.first_token_latency for output in outputs],
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
