"""Requests whose answers must not depend on speculation: greedy ones, through the ``openai`` client, in every shape."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from e2e.serving import MODEL
from openai import AsyncOpenAI

PROMPTS = (
    "The json module provides",
    "def main():",
    "A tuple is",
    "Return the",
    "Raises ValueError if",
    "The naïve café — “quoted” 你好",
    "x",
)
CHAT_ARGUMENTS = [
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--reasoning-parser", "comma", "--reasoning-parser-plugin", str(Path(__file__).with_name("thinking_parser.py")),
    "--reasoning-config", '{"reasoning_start_str": "<|im_start|>", "reasoning_end_str": ","}',
]  # fmt: skip
"""What a server needs for the cases with tools and with thinking."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "set_mode",
        "description": "Set the mode of the machine.",
        "parameters": {
            "type": "object",
            "properties": {"mode": {"enum": ["slow", "fast"]}, "safe": {"type": "boolean"}},
            "required": ["mode", "safe"],
            "additionalProperties": False,
        },
    },
}
FORM = r" ?(yes|no): [a-z ]{8,30}\."
LONG_PROMPT = "Return a list of the names in the archive. " * 24


@dataclass(frozen=True)
class Case:
    """One request: ``ask`` is the prompt of a completion, or what the user says in a chat."""

    ask: str
    chat: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """Something to stop at that comes from the answer to the first prompt: characters of it, or its n-th token."""

    where: slice | int

    def resolve(self, text: str, ids: list[int]) -> list[Any]:
        return [text[self.where]] if isinstance(self.where, slice) else [ids[self.where]]


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for number, prompt in enumerate(PROMPTS):
        cases[f"completion {number}"] = Case(prompt, parameters={"max_tokens": 48})
        cases[f"chat {number}"] = Case(prompt, chat=True, parameters={"max_tokens": 48})
    for tokens in range(1, 8):
        cases[f"max_tokens {tokens}"] = Case(PROMPTS[0], parameters={"max_tokens": tokens})
    cases["long prompt"] = Case(LONG_PROMPT, parameters={"max_tokens": 32})
    cases["ignore_eos"] = Case("A", chat=True, parameters={"max_tokens": 40, "extra_body": {"ignore_eos": True}})
    cases["to the longest length"] = Case(LONG_PROMPT, chat=True, parameters={"extra_body": {"ignore_eos": True}})
    cases["logprobs"] = Case(PROMPTS[2], parameters={"max_tokens": 24, "logprobs": 3})
    cases["chat logprobs"] = Case(
        PROMPTS[3], chat=True, parameters={"max_tokens": 24, "logprobs": True, "top_logprobs": 3}
    )
    for name, key, value in (
        ("stop string", "stop", Found(slice(12, 15))),
        ("stop over tokens", "stop", Found(slice(9, 20))),
        ("stop token", "stop_token_ids", Found(10)),
        ("stop token, eos ignored", "stop_token_ids", Found(12)),
    ):
        further: dict[str, Any] = {"ignore_eos": "ignored" in name, key: value}
        cases[name] = Case(PROMPTS[0], parameters={"max_tokens": 48, "extra_body": further})
    cases["chat stop"] = Case(PROMPTS[4], chat=True, parameters={"max_tokens": 48, "stop": ["e", "zzz"]})
    cases["penalties"] = Case(
        PROMPTS[0],
        parameters={
            "max_tokens": 40,
            "frequency_penalty": 0.7,
            "presence_penalty": 0.4,
            "extra_body": {"repetition_penalty": 1.2},
        },
    )
    choices = {"auto": "auto", "required": "required", "named": {"type": "function", "function": {"name": "set_mode"}}}
    for name, choice in choices.items():
        cases[f"tool {name}"] = Case(
            PROMPTS[3], chat=True, parameters={"max_tokens": 64, "tools": [TOOL], "tool_choice": choice}
        )
    form = {"structured_outputs": {"regex": FORM}}
    kinds: dict[str, dict[str, Any]] = {"thinking": {}, "thinking, then a form": form}
    for budget in (0, 4, 8, 13):
        kinds[f"thinking at most {budget}"] = {"thinking_token_budget": budget}
    kinds["thinking at most 6, then a form"] = {"thinking_token_budget": 6, **form}
    for number, ask in enumerate((*PROMPTS, "Why?", "List the names.")):
        for name, further in kinds.items():
            body = {"chat_template_kwargs": {"thinking": True}, **further}
            parameters = {"max_tokens": 40 if "most" in name else 100, "extra_body": body}
            cases[f"{name} {number}"] = Case(ask, chat=True, parameters=parameters)
    return cases


CASES = _cases()
STOPPING = tuple(name for name in CASES if "stop" in name)
THINKING = tuple(name for name in CASES if "thinking" in name)


@dataclass(frozen=True)
class Answer:
    """What a client sees of one answer, streamed or not."""

    text: str
    finish_reason: str | None
    stop_reason: object
    usage: dict[str, int]
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    reasoning: str = ""


def client_of(url: str) -> AsyncOpenAI:
    import httpx

    return AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300, http_client=httpx.AsyncClient(trust_env=False)
    )


async def create(client: AsyncOpenAI, case: Case, **further: Any) -> Any:
    """Send one request."""
    parameters = {"model": MODEL, "temperature": 0, **case.parameters, **further}
    if case.chat:
        return await client.chat.completions.create(messages=[{"role": "user", "content": case.ask}], **parameters)
    return await client.completions.create(prompt=case.ask, **parameters)


async def ask(client: AsyncOpenAI, case: Case, *, stream: bool) -> Answer:
    """One answer, put together from its chunks where it is streamed."""
    if not stream:
        answer = await create(client, case)
        return _answer([answer.choices[0]], answer.usage, chat=case.chat)
    choices, usage = [], None
    async for chunk in await create(client, case, stream=True, stream_options={"include_usage": True}):
        choices += chunk.choices
        usage = chunk.usage or usage
    return _answer(choices, usage, chat=case.chat)


async def ask_all(url: str, *, stream: bool, at_once: int = 8) -> dict[str, Answer]:
    """Every case, several at once."""
    limit = asyncio.Semaphore(at_once)
    async with client_of(url) as client:
        first = await create(client, CASES["completion 0"], extra_body={"return_token_ids": True})
        text, ids = first.choices[0].text, first.choices[0].token_ids

        async def one(case: Case) -> Answer:
            body = case.parameters.get("extra_body", {})
            body = {k: v.resolve(text, ids) if isinstance(v, Found) else v for k, v in body.items()}
            async with limit:
                return await ask(
                    client, replace(case, parameters={**case.parameters, "extra_body": body}), stream=stream
                )

        answers = await asyncio.gather(*map(one, CASES.values()))
    return dict(zip(CASES, answers, strict=True))


def _answer(choices: list[Any], usage: Any, *, chat: bool) -> Answer:
    texts, reasoning, tokens, logprobs, finish, stop = [], [], [], [], None, None
    for choice in choices:
        if not chat:
            texts.append(choice.text)
        else:
            message = choice.message if hasattr(choice, "message") else choice.delta
            texts.append(message.content or "")
            reasoning.append(getattr(message, "reasoning", None) or "")
            # In a stream the name comes first and the arguments piece by piece.
            texts += [(call.function.name or "") + (call.function.arguments or "") for call in message.tool_calls or ()]
        if choice.logprobs is not None and chat:
            tokens += [entry.token for entry in choice.logprobs.content or []]
            logprobs += [entry.logprob for entry in choice.logprobs.content or []]
        elif choice.logprobs is not None:
            tokens += choice.logprobs.tokens
            logprobs += choice.logprobs.token_logprobs
        finish = choice.finish_reason or finish
        stop = getattr(choice, "stop_reason", None) or stop
    counts = {key: getattr(usage, key) for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return Answer("".join(texts), finish, stop, counts, tuple(tokens), tuple(logprobs), "".join(reasoning))
