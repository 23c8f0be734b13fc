"""``vllm serve`` of the tiny pair, used as its users do: answers, metrics, aborts, Ctrl-C.

Two servers, one after the other: one without speculation, whose answers are compared with, and the one under test.
The tests run in the order of the file; the last one ends the server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from e2e.cases import (
    CASES,
    CHAT_ARGUMENTS,
    FORM,
    PROMPTS,
    STOPPING,
    THINKING,
    Answer,
    Case,
    ask,
    ask_all,
    client_of,
    create,
)
from e2e.serving import MAX_MODEL_LEN, Server, interrupt, serving

from vllm_tokentiming.tiny_pair import tiny_pair

pytestmark = pytest.mark.server

NUM_SPECULATIVE_TOKENS = 5
SEEDED = Case(PROMPTS[4], parameters={"temperature": 0.9, "n": 4, "seed": 11, "max_tokens": 24})
TRAFFIC = Case(PROMPTS[1], parameters={"max_tokens": 100, "extra_body": {"ignore_eos": True}})


@dataclass(frozen=True)
class Reference:
    """Answers without speculation."""

    answers: dict[str, Answer]
    log: str


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    with serving(tmp_path_factory.mktemp("reference"), speculative=None, arguments=CHAT_ARGUMENTS) as server:
        # One at a time: in a batch stock vLLM may put a request under the thinking budget of another.
        answers = asyncio.run(ask_all(server.url, stream=False, at_once=1))
    return Reference(answers, server.log)


@pytest.fixture(scope="module")
def server(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server under test; started after the other has ended, since a small machine has room for one."""
    speculative = {
        "method": "tokentiming",
        "model": str(tiny_pair().draft),
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
        "adaptive_length": False,
        "repeats": False,
    }
    with serving(tmp_path_factory.mktemp("server"), speculative=speculative, arguments=CHAT_ARGUMENTS) as server:
        yield server


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "streamed"])
def answers(request: pytest.FixtureRequest, server: Server) -> dict[str, Answer]:
    return asyncio.run(ask_all(server.url, stream=request.param))


@pytest.mark.parametrize("name", CASES)
def test_greedy_answers_are_those_without_speculation(answers, reference, name):
    found, expected = answers[name], reference.answers[name]
    assert dataclasses.replace(found, logprobs=()) == dataclasses.replace(expected, logprobs=())
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_the_cases_are_what_they_are_called(reference):
    expected = reference.answers
    for name in STOPPING:
        assert (expected[name].finish_reason, expected[name].stop_reason is None) == ("stop", False), name
    for tokens in range(1, 8):
        assert expected[f"max_tokens {tokens}"].usage["completion_tokens"] == tokens
    assert expected["to the longest length"].usage["total_tokens"] == MAX_MODEL_LEN
    assert len(expected["logprobs"].logprobs) == expected["logprobs"].usage["completion_tokens"] == 24
    assert expected["ignore_eos"].usage["completion_tokens"] == 40
    # What a tiny model fills in is no call that anybody would make, but it is one.
    assert expected["tool named"].text.startswith("set_mode")
    assert not expected["tool auto"].text.startswith("set_mode")
    thought = {name: expected[name] for name in THINKING if "most" not in name}
    thought = {name: answer for name, answer in thought.items() if answer.reasoning and answer.text}
    assert len(thought) > 4
    formed = [answer.text for name, answer in thought.items() if "form" in name and answer.finish_reason == "stop"]
    assert formed
    assert all(re.fullmatch(FORM, text) for text in formed), formed
    assert not expected["chat 0"].reasoning
    cut = 0
    for name in THINKING:
        whole = expected[f"thinking {name.split()[-1]}"].reasoning
        if "at most" in name:
            assert whole.startswith(expected[name].reasoning), name
            cut += len(expected[name].reasoning) < len(whole)
    assert cut > 20


async def test_many_at_once_that_end_at_different_times(server, reference):
    """Every answer is the beginning of the same longer one, whoever else is in the batch."""
    whole = [reference.answers[f"completion {number}"] for number in range(len(PROMPTS))]
    lengths = range(1, 41)
    async with client_of(server.url) as client:
        found = await asyncio.gather(
            *(
                ask(client, Case(PROMPTS[n % len(PROMPTS)], parameters={"max_tokens": n}), stream=n % 2 == 0)
                for n in lengths
            )
        )
    for n, answer in zip(lengths, found, strict=True):
        longer = whole[n % len(PROMPTS)]
        assert answer.usage["completion_tokens"] == min(n, longer.usage["completion_tokens"])
        # The text of a cut answer may end in half a character.
        assert longer.text.startswith(answer.text.rstrip("\ufffd"))


async def test_a_seed_gives_the_same_samples_alone_and_in_traffic(server):
    async with client_of(server.url) as client:
        alone = await create(client, SEEDED)
        traffic = [asyncio.create_task(create(client, TRAFFIC)) for _ in range(3)]
        crowded = await create(client, SEEDED)
        other = await create(client, dataclasses.replace(SEEDED, parameters={**SEEDED.parameters, "seed": 12}))
        await asyncio.gather(*traffic)
    texts = [[choice.text for choice in answer.choices] for answer in (alone, crowded, other)]
    assert [choice.index for choice in alone.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 1


async def test_a_stream_arrives_piece_by_piece(server):
    async with client_of(server.url) as client:
        sizes = [len(chunk.choices[0].text) async for chunk in await create(client, TRAFFIC, stream=True)]
    assert len(sizes) > 10
    assert max(sizes) < 200


async def test_metrics_of_one_request(server):
    before = server.metrics()
    case = Case(PROMPTS[2], parameters={"max_tokens": 60, "extra_body": {"ignore_eos": True}})
    async with client_of(server.url) as client:
        answer = await ask(client, case, stream=False)
    # At once: the server is idle, and no later step pushes what the last one counted.
    after = server.metrics()
    change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    drafts, drafted, accepted = (
        change[f"vllm:spec_decode_num_{what}"] for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    per_position = [
        change[f"vllm:spec_decode_num_accepted_tokens_per_pos/{position}"] for position in range(NUM_SPECULATIVE_TOKENS)
    ]
    assert change["vllm:generation_tokens"] == answer.usage["completion_tokens"] == 60
    assert 0 < accepted <= drafted <= NUM_SPECULATIVE_TOKENS * drafts
    assert per_position == sorted(per_position, reverse=True)
    assert sum(per_position) == accepted
    assert per_position[0] <= drafts
    # Each verified draft brings the accepted tokens and one more; so does each step without one.
    assert drafts + accepted < 60
    # Nobody aborted, so every proposal of ours was verified.
    assert change["vllm:tokentiming_proposals"] == drafts
    assert change["vllm:tokentiming_proxy_tokens"] == drafted
    assert change["vllm:tokentiming_draft_tokens"] == NUM_SPECULATIVE_TOKENS * drafts
    assert change["vllm:tokentiming_rows_dropped"] == 0
    silences = sum(value for name, value in change.items() if name.startswith("vllm:tokentiming_silences/"))
    assert drafts + accepted + 1 <= 60 <= drafts + accepted + 1 + silences
    assert all(change[f"vllm:tokentiming_seconds/{stage}"] > 0 for stage in ("context", "draft", "proposal", "rows"))


def test_metrics_of_everything_so_far(server):
    metrics = server.metrics()
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"]
    per_position = [
        metrics[f"vllm:spec_decode_num_accepted_tokens_per_pos/{position}"]
        for position in range(NUM_SPECULATIVE_TOKENS)
    ]
    assert per_position == sorted(per_position, reverse=True)
    assert sum(per_position) == accepted
    assert 0.4 * metrics["vllm:spec_decode_num_drafts"] < accepted < metrics["vllm:spec_decode_num_draft_tokens"]
    assert not [name for name in metrics if name.startswith("vllm:tokentiming_silences/") and name.endswith("_failed")]


async def test_requests_aborted_in_the_middle_harm_nobody(server, reference):
    case = CASES["completion 0"]
    async with client_of(server.url) as client:
        for _ in range(3):
            streams = [await create(client, TRAFFIC, stream=True) for _ in range(5)]
            kept = asyncio.create_task(ask(client, case, stream=True))
            for number, stream in enumerate(streams):
                chunks = aiter(stream)
                for _ in range(number + 1):
                    await anext(chunks)
                await stream.close()
            assert await kept == reference.answers["completion 0"]
        before = server.metrics()["vllm:tokentiming_proposals"]
        assert await ask(client, case, stream=False) == reference.answers["completion 0"]
    metrics = server.metrics()
    assert metrics["vllm:tokentiming_proposals"] > before
    assert metrics["vllm:num_requests_running"] == 0


async def test_bad_requests_are_refused_and_harm_nobody(server, reference):
    import openai

    async with client_of(server.url) as client:
        for parameters in ({"max_tokens": -1}, {"temperature": -1.0}, {"max_tokens": 100_000}):
            with pytest.raises(openai.BadRequestError):
                await create(client, Case("x", parameters=parameters))
        with pytest.raises(openai.BadRequestError):
            await create(client, Case("word " * 3 * MAX_MODEL_LEN, parameters={"max_tokens": 4}))
        answer = await ask(client, CASES["completion 0"], stream=False)
    assert answer == reference.answers["completion 0"]


def test_the_log_says_that_it_is_on(server):
    assert server.log.count("TokenTiming is on: ") == 1
    assert "TokenTiming: " in server.log, "no line about the proposals"
    assert "Traceback" not in server.log


def test_ctrl_c_ends_it_cleanly(server):
    """Also while a request is on its way."""
    before = len(server.log)

    async def interrupted() -> float:
        async with client_of(server.url) as client:
            stream = await create(client, TRAFFIC, stream=True)
            await anext(aiter(stream))
            ending = asyncio.create_task(asyncio.to_thread(interrupt, server, patience=60))
            await asyncio.sleep(2)
            # vLLM ends its engine first and may then wait for clients whose streams are open.
            await stream.close()
        return await ending

    assert asyncio.run(interrupted()) < 30
    assert server.process.returncode == 0
    # vLLM itself logs the end of its engine as an error where a request was running.
    assert "vllm_tokentiming" not in server.log[before:]
