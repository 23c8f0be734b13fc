"""What is played on an engine. A scenario takes the ``LLM``, and returns what JSON can carry.

Scenarios named ``break_…`` sabotage our own parts for a while; they are for engines with our proposer.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

PROMPTS = (
    "The json module provides",
    "def main():",
    "A tuple is",
    "Return the",
    "Raises ValueError if",
    "The naïve café — “quoted” 你好",
    "class Path:\n    def open(self,",
    "x",
)
REGEX = r"[a-c]{3}-[0-9]{2}"
GRAMMAR = 'root ::= ("up" | "down") (", " ("up" | "down"))*  "."'
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}


def drafter(llm: Any) -> Any:
    """Our proposer, or whatever the engine has instead; None without speculation."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return getattr(worker.model_runner, "drafter", None)


def _counters(llm: Any) -> dict[str, Counter[str]]:
    counts = {
        "vllm": Counter({m.name: m.value for m in llm.get_metrics() if isinstance(getattr(m, "value", 0.5), int)})
    }
    metrics = getattr(drafter(llm), "_metrics", None)
    if metrics is not None:
        counts |= {"silences": Counter(metrics.silences), "totals": Counter(metrics.totals)}
    return counts


@contextlib.contextmanager
def counted(llm: Any) -> Iterator[dict[str, dict[str, float]]]:
    """What was counted meanwhile, by vLLM and by us."""
    before, change = _counters(llm), {}
    yield change
    after = _counters(llm)
    change |= {kind: dict(values - before.get(kind, Counter())) for kind, values in after.items()}


def _generate(llm: Any, prompts: Any, **parameters: Any) -> list[list[int]]:
    given = [{"prompt_token_ids": p} if isinstance(p, list) else p for p in prompts]
    parameters = {"temperature": 0, "max_tokens": 48, "ignore_eos": True, **parameters}
    outputs = llm.generate(given, SamplingParams(**parameters), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def greedy(llm: Any) -> Any:
    return _generate(llm, PROMPTS)


def greedy_one_by_one(llm: Any) -> Any:
    return [_generate(llm, [prompt])[0] for prompt in PROMPTS[:3]]


def mixed(llm: Any) -> Any:
    """Greedy, sampled, filtered and seeded requests in one batch, twice."""
    laws = (
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.6},
        {"temperature": 1.0, "top_k": 20, "seed": 8},
        {"temperature": 0},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 9},
        {"temperature": 0},
    )
    parameters = [SamplingParams(max_tokens=24, ignore_eos=True, **law) for law in laws]
    runs = [
        [list(o.outputs[0].token_ids) for o in llm.generate(list(PROMPTS), parameters, use_tqdm=False)]
        for _ in range(2)
    ]
    return {
        "greedy": [[run[i] for i, law in enumerate(laws) if law["temperature"] == 0] for run in runs],
        "seeded": [[run[i] for i, law in enumerate(laws) if "seed" in law] for run in runs],
        "lengths": [len(ids) for run in runs for ids in run],
    }


def sampled(llm: Any) -> Any:
    return _generate(llm, PROMPTS, temperature=1.0)


def near_the_end(llm: Any) -> Any:
    """Prompts just below ``max_model_len``, and a short one beside them."""
    dice = random.Random(5)
    longest = llm.llm_engine.model_config.max_model_len
    lengths = (*range(longest - 9, longest), longest - 30, 4)
    return _generate(llm, [[dice.randrange(300, 4000) for _ in range(n)] for n in lengths], max_tokens=40)


def odd_prompts(llm: Any) -> Any:
    """Token ids that no text encodes to."""
    tokenizer = llm.get_tokenizer()
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "return"]
    half_character = tokenizer.convert_tokens_to_ids("â")  # byte 0xE2, as the byte-level alphabet writes it
    specials = [i for i in tokenizer.added_tokens_decoder if i < len(tokenizer)]
    dice = random.Random(6)
    prompts = [
        letters,
        [half_character],  # nothing that the draft could be shown
        [half_character, half_character, *letters],
        [*letters, half_character],
        [specials[0]],
        specials * 3,
        [*specials, *letters, specials[-1]],
        [len(tokenizer) + 3],  # a row of the model that is no token
        [*letters, llm.llm_engine.model_config.get_vocab_size() - 1, *letters],
        [dice.randrange(len(tokenizer)) for _ in range(90)],
    ]
    assert all(isinstance(i, int) for prompt in prompts for i in prompt)
    return _generate(llm, prompts, max_tokens=24)


ODD_TEXTS = (
    "東京は日本の首都です。人口は",
    "안녕하세요 세계. 오늘은",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ",
    "مرحبا بالعالم، هذا نص",
    "e\u0301a\u0308 combining: n\u0303o\u0302",
    "family: \U0001f468\u200d\U0001f469\u200d\U0001f467 flag: \U0001f1e9\U0001f1ea skin: \U0001f44d\U0001f3fd",
    "zero\u200bwidth\u2060and\ufeffbom",
    "a\x00b\x01c\x1b[31mred\x7f",
    "before" + " " * 150 + "after",
    "\t\tif x:\n\t\t\treturn\n\t",
    "line one\r\nline two\r\n\r\nline",
    "3.14159265358979323846264338327950288419716939937510",
    "serving" * 48,
    '!function(e,t){"use strict";for(var n=0;n<t.length;n++)e[t[n]]=function(){return n}}(window,["a","b"]);',
    "VGhlIHF1aWNrIGJyb3duIGZveCBqdW1wcyBvdmVyIHRoZSBsYXp5IGRvZy4gMDEyMzQ1Njc4OQ==",
    "<|im_start|>user\nhello<|im_end|>\n<s>[INST] hi [/INST]</s><start_of_turn>model\n",
    " leading",
    "\u2581sentencepiece\u2581mark",
    "\n",
)


def odd_texts(llm: Any) -> Any:
    """Scripts, marks, white space and look-alikes that tokenizers treat each in their own way."""
    return _generate(llm, ODD_TEXTS, max_tokens=24)


def crowded(llm: Any) -> Any:
    """More tokens than the KV cache holds."""
    dice = random.Random(7)
    prompts = [[dice.randrange(300, 4000) for _ in range(20 + 11 * n)] for n in range(8)]
    return _generate(llm, prompts, max_tokens=100)


def structured(llm: Any) -> Any:
    """Regex, JSON, choice and grammar at temperature 1, beside a request without a grammar."""
    outputs = {}
    kinds = {
        "regex": {"regex": REGEX},
        "json": {"json": SCHEMA},
        "choice": {"choice": ["alpha", "beta"]},
        "grammar": {"grammar": GRAMMAR},
    }
    prompts, parameters = [PROMPTS[0]], [SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)]
    for given in kinds.values():
        grammar = StructuredOutputsParams(**given)
        for seed in (None, 3):
            prompts.append("Answer: ")
            parameters.append(
                SamplingParams(temperature=1.0, n=4, seed=seed, max_tokens=64, structured_outputs=grammar)
            )
    found = llm.generate(prompts, parameters, use_tqdm=False)
    for place, kind in enumerate(kinds):
        outputs[kind] = [sample.text for o in found[1 + 2 * place : 3 + 2 * place] for sample in o.outputs]
    return {**outputs, "greedy": list(found[0].outputs[0].token_ids)}


def _step_until_done(llm: Any) -> dict[str, list[int]]:
    done = {}
    while llm.llm_engine.has_unfinished_requests():
        done |= {o.request_id: list(o.outputs[0].token_ids) for o in llm.llm_engine.step() if o.finished}
    return done


def abort_and_reuse(llm: Any) -> Any:
    """An id is aborted in the middle and comes back at once with another prompt; what is kept is looked at."""
    engine, ours = llm.llm_engine, drafter(llm)
    greedy_48 = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    engine.add_request("same", PROMPTS[3], greedy_48)
    engine.add_request("other", PROMPTS[0], greedy_48)
    for _ in range(5):
        engine.step()
    kept_before = [ours._pipeline.num_requests, ours._pipeline._engine.num_requests]
    engine.abort_request(["same"])
    engine.add_request("same", PROMPTS[2], greedy_48)
    done = _step_until_done(llm)
    engine.add_request("last", PROMPTS[1], greedy_48)
    for _ in range(3):
        engine.step()
    kept_after = [ours._pipeline.num_requests, ours._pipeline._engine.num_requests]
    done |= _step_until_done(llm)
    return {"done": done, "kept before": kept_before, "kept after": kept_after}


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _on_calls(stock: Callable[..., Any], numbers: set[int], instead: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return instead(*args, **kwargs) if calls in numbers else stock(*args, **kwargs)

    return call


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("sabotage")


def break_draft(llm: Any) -> Any:
    """The draft engine raises what it does not promise to raise."""
    engine = drafter(llm)._pipeline._engine
    with _replaced(engine, "draft", _on_calls(engine.draft, {1, 3, 4}, _fail)):
        return greedy(llm)


def break_forward(llm: Any) -> Any:
    """The draft model raises in the middle of a step, and in a prefill."""
    forward = drafter(llm)._pipeline._engine._forward
    with (
        _replaced(forward, "decode_step", _on_calls(forward.decode_step, {3, 9}, _fail)),
        _replaced(forward, "prefill", _on_calls(forward.prefill, {2}, _fail)),
    ):
        return greedy(llm)


def break_logits(llm: Any) -> Any:
    """The draft's logits are not numbers, for one request of the batch and then for all."""
    forward = drafter(llm)._pipeline._engine._forward
    stock_prefill, stock_step = forward.prefill, forward.decode_step

    def one_row(*args: Any, **kwargs: Any) -> Any:
        logits = stock_prefill(*args, **kwargs)
        logits[0] = float("nan")
        return logits

    def all_rows(*args: Any, **kwargs: Any) -> Any:
        return stock_step(*args, **kwargs) * float("nan")

    with (
        _replaced(forward, "prefill", _on_calls(stock_prefill, {2, 3}, one_row)),
        _replaced(forward, "decode_step", _on_calls(stock_step, {18}, all_rows)),
    ):
        return greedy(llm)


def break_context(llm: Any) -> Any:
    """A request's draft context fails once; that request goes on without proposals, the others with."""
    from vllm_tokentiming.vocabulary import DraftContext

    with _replaced(DraftContext, "commit", _on_calls(DraftContext.commit, {11}, _fail)):
        return greedy(llm)


def break_proposal(llm: Any) -> Any:
    """Drafts cannot be made proposals, and then the proposer itself fails."""
    ours = drafter(llm)
    mode = ours._pipeline._mode
    with (
        _replaced(mode, "proposals", _on_calls(mode.proposals, {2, 3, 6}, _fail)),
        _replaced(ours._reader, "read", _on_calls(ours._reader.read, {6}, _fail)),
    ):
        return greedy(llm)
