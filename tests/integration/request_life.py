"""Scenarios of how requests come, end and go. A scenario takes the ``LLM``, and returns what JSON can carry."""

from __future__ import annotations

import random
from typing import Any

from scenarios import PROMPTS, drafter
from vllm import SamplingParams

PROPOSAL = 5
"""``num_speculative_tokens`` of the engines that these are played on."""


def _outputs(llm: Any, prompts: Any, parameters: Any) -> list[dict[str, Any]]:
    given = [{"prompt_token_ids": p} if isinstance(p, list) else p for p in prompts]
    return [
        {"ids": list(sample.token_ids), "text": sample.text, "why": sample.finish_reason, "at": sample.stop_reason}
        for output in llm.generate(given, parameters, use_tqdm=False)
        for sample in output.outputs
    ]


def _greedy(**parameters: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 48, "ignore_eos": True, **parameters})


def stop_strings(llm: Any) -> Any:
    """Stop strings of one to nine characters, beginning anywhere: inside tokens, across tokens, across proposals."""
    whole = _outputs(llm, PROMPTS, _greedy())
    prompts, parameters = [], []
    for number, (prompt, output) in enumerate(zip(PROMPTS, whole, strict=True)):
        for at in range(9 + number, min(60, len(output["text"]) - 9), 7):
            stop = output["text"][at : at + 1 + at % 9]
            prompts.append(prompt)
            parameters.append(_greedy(stop=[stop], include_stop_str_in_output=bool(at % 2)))
    return _outputs(llm, prompts, parameters)


def stop_tokens(llm: Any) -> Any:
    """Stop tokens at every place of a cycle, and ones that ``min_tokens`` forbids at first."""
    whole = _outputs(llm, PROMPTS, _greedy())
    prompts, parameters = [], []
    for prompt, output in zip(PROMPTS, whole, strict=True):
        for at in range(1, 2 * PROPOSAL + 3):
            prompts.append(prompt)
            parameters.append(_greedy(stop_token_ids=[output["ids"][at]], min_tokens=at // 4))
    return _outputs(llm, prompts, parameters)


def lengths(llm: Any) -> Any:
    """Every ``max_tokens`` around a proposal's length."""
    few = range(1, PROPOSAL + 3)
    return _outputs(llm, [p for p in PROMPTS for _ in few], [_greedy(max_tokens=n) for _ in PROMPTS for n in few])


def own_ends(llm: Any) -> Any:
    """Requests that end with their own end token, or must not yet."""
    return _outputs(llm, PROMPTS, _greedy(ignore_eos=False, max_tokens=120)) + _outputs(
        llm, PROMPTS, _greedy(ignore_eos=False, max_tokens=120, min_tokens=30)
    )


def several_samples(llm: Any) -> Any:
    """``n`` > 1: seeded samples come again."""
    seeded = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
    return [_outputs(llm, PROMPTS[:3], seeded) for _ in range(2)]


def arrivals(llm: Any) -> Any:
    """Two hundred requests that come, end and are aborted at different times; ids are used again."""
    dice, engine = random.Random(3), llm.llm_engine
    done: dict[str, list[int]] = {}
    aborted: set[str] = set()
    waiting = [
        (f"request-{number}", dice.choice(PROMPTS), dice.randrange(1, 40), dice.random() < 0.1) for number in range(200)
    ]
    running: list[str] = []
    ends_early: dict[str, int] = {}
    while waiting or engine.has_unfinished_requests():
        for _ in range(dice.randrange(4)):
            if waiting:
                request_id, prompt, most, leaves = waiting.pop()
                engine.add_request(request_id, prompt, _greedy(max_tokens=most))
                running.append(request_id)
                if leaves:
                    ends_early[request_id] = dice.randrange(1, 6)
        for output in engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        for request_id in list(ends_early):
            ends_early[request_id] -= 1
            if ends_early[request_id] == 0:
                del ends_early[request_id]
                if request_id not in done:
                    engine.abort_request([request_id])
                    aborted.add(request_id)
                    waiting.append((request_id, dice.choice(PROMPTS), dice.randrange(1, 40), False))
    # State of the last ones is freed when the next step shows that they are gone.
    _outputs(llm, PROMPTS[:1], _greedy(max_tokens=4))
    ours = drafter(llm)
    kept = [] if ours is None else [ours._pipeline.num_requests, ours._pipeline._engine.num_requests]
    return {"done": done, "aborted": len(aborted), "kept": kept}


def cached_prompts(llm: Any) -> Any:
    """Prompts that the prefix cache holds up to their last token, whose first step vLLM pads with ids of -1."""
    dice = random.Random(9)
    size = llm.llm_engine.vllm_config.cache_config.block_size
    prompt = [dice.randrange(300, 4000) for _ in range(size + 1)]
    penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    first = _outputs(llm, [prompt], _greedy())
    again = _outputs(llm, [prompt] * 3, [_greedy(), _greedy(**penalties), _greedy(bad_words=["the"])])
    sampled = _outputs(
        llm, [prompt] * 8, SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, repetition_penalty=1.05)
    )
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    return {
        "first": first,
        "again": again,
        "sampled in range": all(0 <= token < vocab_size for output in sampled for token in output["ids"]),
    }


def one_token_beside_others(llm: Any) -> Any:
    """A seeded prompt of one token that comes alone, and that comes while others run."""
    engine = llm.llm_engine
    seeded = SamplingParams(temperature=1.0, seed=21, max_tokens=12, ignore_eos=True)

    def answer_of(others: int) -> list[int]:
        for number in range(others):
            engine.add_request(f"other-{number}", PROMPTS[number], _greedy())
            engine.step()
        engine.add_request("one token", {"prompt_token_ids": [300]}, seeded)
        found: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.request_id == "one token" and output.finished:
                    found = list(output.outputs[0].token_ids)
        return found

    return [answer_of(others) for others in (0, 1, 3, 0)]


def _long_prompts() -> list[list[int]]:
    dice = random.Random(13)
    return [[dice.randrange(300, 4000) for _ in range(n)] for n in (180, 5, 130, 64, 65, 3, 150)]


def long_prompts(llm: Any) -> Any:
    """Prompts that are read in several steps, beside short ones that already answer."""
    return _outputs(llm, _long_prompts(), _greedy(max_tokens=20))


def seeded_long_prompts(llm: Any) -> Any:
    """The same with seeds, twice. Kills stock vLLM on CPU (see ``vllm_adapter/patches.py``)."""
    prompts = _long_prompts()
    parameters = [
        SamplingParams(temperature=0.8, seed=n, max_tokens=12, ignore_eos=True) for n, _ in enumerate(prompts)
    ]
    return [_outputs(llm, prompts, parameters) for _ in range(2)]
