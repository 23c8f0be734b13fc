"""One system in a process of its own: builds ``vllm.LLM`` once, then answers one JSON line per measurement.

The parent (``benchmarks.run``) keeps one of these for each system and asks them in turn, so that drift of the machine
hits all alike.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}

SAMPLING_EXAMPLE = '{"top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}'

SET_ELSEWHERE = {
    "temperature": "give --temperatures",
    "max_tokens": "give --max-tokens",
    "ignore_eos": "every system generates as many tokens, so that their seconds compare",
}
"""Fields of ``SamplingParams`` that ``--sampling`` may not hold, and why."""


def model_runner(llm: Any) -> Any:
    """The runner of an engine in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``)."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def further_sampling(text: str) -> dict[str, Any]:
    """What ``--sampling`` takes.

    Raises:
        ArgumentTypeError: it is no JSON object, or has a field that another option or the benchmark sets.
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not JSON: {error}; write for example {SAMPLING_EXAMPLE}"
        ) from error
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object; write for example {SAMPLING_EXAMPLE}")
    if taken := sorted(fields.keys() & SET_ELSEWHERE.keys()):
        raise argparse.ArgumentTypeError(
            "; ".join(f"{field!r} does not belong here: {SET_ELSEWHERE[field]}" for field in taken)
        )
    return fields


def sampling_fields(further: Mapping[str, Any], *, temperature: float, max_tokens: int) -> dict[str, Any]:
    """Fields of vLLM's ``SamplingParams``, under which every system generates as many tokens: seconds compare."""
    return {**further, "temperature": temperature, "max_tokens": max_tokens, "ignore_eos": True}


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


class WorkClock:
    """``time.perf_counter`` without the time in which this process waited for its turn.

    It takes that function's place: our policy, which times cycles, must not take a wait for a slow pass.
    """

    def __init__(self) -> None:
        self._now = time.perf_counter
        self._waited = 0.0

    def __call__(self) -> float:
        """Seconds of work, since whenever."""
        return self._now() - self._waited

    def waiting(self, lines: Iterator[str]) -> Iterator[str]:
        """The same lines; what it takes them to come is left out."""
        while True:
            begun = self._now()
            line = next(lines, None)
            self._waited += self._now() - begun
            if line is None:
                return
            yield line


class Measurement:
    """One batch of prompts, run to the end at once or a turn at a time."""

    def __init__(self, llm: Any, request: dict[str, Any]) -> None:
        from vllm import SamplingParams

        self._llm = llm
        self._outputs: dict[str, Any] = {}
        self._first_tokens: dict[str, float] = {}
        self._steps: list[Step] = []
        self._number = len(request["prompt_token_ids"])
        self._before = speculation_counters(llm)
        self._begun = time.perf_counter()
        for place, ids in enumerate(request["prompt_token_ids"]):
            llm.llm_engine.add_request(str(place), {"prompt_token_ids": ids}, SamplingParams(**request["sampling"]))
        self._turns = 0

    def advance(self, at_least: float = math.inf) -> bool:
        """Run for so many seconds, to the end of a step; whether it is finished."""
        engine = self._llm.llm_engine
        begun = time.perf_counter()
        self._turns += 1
        while engine.has_unfinished_requests() and time.perf_counter() - begun < at_least:
            for output in engine.step():
                self._outputs[output.request_id] = output
                self._first_tokens.setdefault(output.request_id, time.perf_counter() - self._begun)
            tokens = sum(len(output.outputs[0].token_ids) for output in self._outputs.values())
            unfinished = self._number - sum(output.finished for output in self._outputs.values())
            self._steps.append(Step(time.perf_counter() - self._begun, tokens, len(self._outputs), unfinished))
        return not engine.has_unfinished_requests()

    def result(self) -> dict[str, Any]:
        """What came of it."""
        places = [str(place) for place in range(len(self._outputs))]
        slots = min(len(places), self._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)
        return {
            "seconds": self._steps[-1].seconds,
            "turns": self._turns,
            "full": while_full(self._steps, slots=slots),
            "token_ids": [list(self._outputs[place].outputs[0].token_ids) for place in places],
            "first_token_seconds": [self._first_tokens[place] for place in places],
            "speculation": difference(speculation_counters(self._llm), self._before),
        }


def answer(llm: Any, request: dict[str, Any], measurements: list[Measurement]) -> dict[str, Any]:
    """Follow one request: a whole batch, or the beginning of one, a turn of it, or what came of it.

    Args:
        llm: the engine.
        request: ``prompt_token_ids`` and ``sampling``, with ``begin`` where it is to be run turn by turn; or
            ``advance``, the seconds of a turn; or ``result``.
        measurements: the one that was begun, if any; changed.
    """
    if "advance" in request:
        return {"finished": measurements[0].advance(request["advance"])}
    if "result" in request:
        return measurements.pop().result()
    measurement = Measurement(llm, request)
    if "begin" in request:
        measurements.append(measurement)
        return {"finished": False}
    measurement.advance()
    return measurement.result()


def main() -> None:
    """Serve measurements until standard input ends."""
    # vLLM and its children write to standard output too; answers get a file descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    clock = time.perf_counter = WorkClock()
    from vllm import LLM

    engine_args = json.loads(sys.argv[1])
    begun = time.perf_counter()
    llm = LLM(**engine_args)
    tokenizer = llm.get_tokenizer()
    print(json.dumps({"ready": True, "start_seconds": time.perf_counter() - begun}), file=answers, flush=True)
    measurements: list[Measurement] = []
    for line in clock.waiting(iter(sys.stdin)):
        request = json.loads(line)
        if "chat" in request:
            request["prompt_token_ids"] = [prompt_ids(tokenizer, text) for text in request.pop("chat")]
        print(json.dumps(answer(llm, request, measurements)), file=answers, flush=True)


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
