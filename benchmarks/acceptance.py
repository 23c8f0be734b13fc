"""How many proposed tokens are accepted, by transfer mode, policy and task: one engine, many configurations.

    python -m benchmarks.acceptance --target DIR --draft DIR --prompts spec_bench.jsonl --temperatures 0 0.5 1
        --configurations '{"transfer":"exact"}' '{"transfer":"point_mass"}' --output FILE.json

The engine runs in this process and only the proposal mode is exchanged between configurations, so all see the same
weights and the same draft. Times mean nothing here (large batches); ``benchmarks.run`` measures speed.

*accepted* is vLLM's own count. *expected* is its mean given the proposals, which is less noisy: the verifier computes
the target's law q at every proposed token t, so the chance a = min(1, q(t)/P(t)) that it accepts t is known, and a
proposal's expected count is a₁ + a₁a₂ + … (Leviathan et al., arXiv 2211.17192, section 3). *in blocks* is the mean
where the same proposals are judged in blocks (Sun et al., arXiv 2403.10444).
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine_worker import (
    difference,
    further_sampling,
    model_runner,
    prompt_ids,
    sampling_fields,
    speculation_counters,
)
from benchmarks.prompts import FIVE_TASKS, load_prompts
from benchmarks.provenance import provenance, without_folders
from vllm_tokentiming.vllm_adapter.verification import limits, residual_laws

if TYPE_CHECKING:
    import torch

FORMAT = 2


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(FIVE_TASKS))
    parser.add_argument("--per-task", type=int, default=12)
    parser.add_argument("--samples", type=int, default=1, help="generations of each prompt")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0])
    parser.add_argument("--sampling", type=further_sampling, default={}, metavar="JSON", help="as of benchmarks.run")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--draft-options", type=json.loads, default={}, help="plugin options of all configurations")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--configurations", nargs="+", required=True, help="JSON objects of plugin options")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def build(arguments: argparse.Namespace) -> Any:
    """The engine, in this process."""
    from vllm import LLM

    return LLM(
        model=arguments.target,
        dtype=arguments.dtype,
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=arguments.batch,
        seed=arguments.seed,
        disable_log_stats=False,
        speculative_config={
            "method": "tokentiming",
            "model": arguments.draft,
            "num_speculative_tokens": arguments.num_speculative_tokens,
            **arguments.draft_options,
        },
    )


class ExpectedAcceptance:
    """Sums what the verifier was to accept, by request; wraps vLLM's ``rejection_sample``.

    Args:
        request_ids: gives the ids of vLLM's batch, in order.
    """

    def __init__(self, request_ids: Callable[[], Sequence[str]]) -> None:
        from vllm.v1.sample import rejection_sampler

        self._stock = rejection_sampler.rejection_sample
        self._request_ids = request_ids
        # By request, for each draft: the chances that its first i tokens stand, judged one by one, and in blocks.
        self._reached: defaultdict[str, list[tuple[list[float], list[float]]]] = defaultdict(list)
        rejection_sampler.rejection_sample = self._observe

    def reset(self) -> None:
        """Begin a measurement."""
        self._reached.clear()

    def summary(self, requests: Collection[str], *, in_blocks: bool) -> dict[str, Any]:
        """The sums over some requests since :meth:`reset`; ``squares`` is for the standard error."""
        # vLLM's core appends "-" and random digits to a request's id.
        drafts = [
            reached[in_blocks]
            for request_id, of_request in self._reached.items()
            if request_id.rpartition("-")[0] in requests
            for reached in of_request
        ]
        longest = max(map(len, drafts), default=0)
        return {
            "drafts": len(drafts),
            "accepted_tokens": sum(map(sum, drafts)),
            "squares": sum(sum(reached) ** 2 for reached in drafts),
            "accepted_per_position": [
                sum(reached[position] for reached in drafts if len(reached) > position) for position in range(longest)
            ],
            "proposed_tokens": sum(map(len, drafts)),
        }

    def _observe(  # noqa: PLR0917 - vLLM passes them by position
        self,
        draft_token_ids: torch.Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_logits: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        sampling_metadata = args[1] if len(args) > 1 else kwargs["sampling_metadata"]
        # vLLM pads the step of a prompt that its prefix cache holds up to the last token with proposals of id -1.
        padding = draft_token_ids < 0
        proposed = draft_token_ids.long().clamp(min=0).unsqueeze(1)
        if sampling_metadata.all_greedy:
            chance = (target_logits.argmax(dim=-1, keepdim=True) == proposed).double()
        else:
            chance = (target_logits.gather(1, proposed) - target_logits.logsumexp(dim=-1, keepdim=True)).double().exp()
            if draft_probs is not None:
                chance /= draft_probs.gather(1, proposed)
        starts = list(accumulate(num_draft_tokens, initial=0))
        if sampling_metadata.all_greedy:
            masses, weights = [], []
        else:
            target_probs = target_logits.softmax(dim=-1)
            weights, residuals = residual_laws(draft_token_ids.tolist(), starts, draft_probs, target_probs)
            masses = residuals.sum(dim=-1).tolist()
        for row, (request_id, (start, end)) in enumerate(zip(self._request_ids(), pairwise(starts), strict=False)):
            if start == end or padding[start]:
                continue
            alone = list(accumulate(chance[start:end, 0].clamp(max=1.0).tolist(), operator.mul))
            blocks = alone
            if masses:
                fails = [1.0 - limit for limit in limits(weights[start + row : end + row + 1], masses[start:end])]
                blocks = [1.0 - math.prod(fails[i:]) for i in range(len(fails))]
            self._reached[request_id].append((alone, blocks))
        return self._stock(
            draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
            *args, **kwargs,
        )  # fmt: skip


def use_configuration(llm: Any, draft: str, configuration: dict[str, Any]) -> None:
    """Exchange the proposal mode of the running proposer."""
    from vllm_tokentiming import TokenTimingConfig
    from vllm_tokentiming.proposal_modes import ProposalMode
    from vllm_tokentiming.repeats import RepeatAcceptance
    from vllm_tokentiming.vllm_adapter.start_up import build_length

    proposer = model_runner(llm).drafter
    pipeline = proposer._pipeline
    # Modes are compared at the same number of draft steps, unless a configuration says otherwise.
    options = TokenTimingConfig.from_mapping(
        {"draft_model": draft, "adaptive_length": False, "repeats": False, **configuration}
    )
    pipeline._length = build_length(options, proposer._max_proposal)
    pipeline._repeats = RepeatAcceptance() if options.repeats else None
    pipeline._mode = ProposalMode(pipeline._mode._pair, options)
    if pipeline._mode.restricts_draft:
        pipeline._engine.restrict(pipeline._mode.shared_tokens())


def measure(
    llm: Any,
    arguments: argparse.Namespace,
    configuration: dict[str, Any],
    *,
    temperature: float,
    expected: ExpectedAcceptance,
) -> list[dict[str, Any]]:
    """Counts by task."""
    from vllm import SamplingParams

    use_configuration(llm, arguments.draft, configuration)
    tokenizer = llm.get_tokenizer()
    # All at once: a large batch makes the most of the machine.
    prompts = load_prompts(arguments.prompts, tasks=arguments.tasks, per_task=arguments.per_task)
    fields = sampling_fields(arguments.sampling, temperature=temperature, max_tokens=arguments.max_tokens)
    params = SamplingParams(**fields)
    inputs = [{"prompt_token_ids": prompt_ids(tokenizer, p.text)} for p in prompts for _ in range(arguments.samples)]
    tasks = [p.task for p in prompts for _ in range(arguments.samples)]
    before = speculation_counters(llm)
    expected.reset()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    counted = difference(speculation_counters(llm), before)
    return [
        {
            "configuration": configuration,
            "temperature": temperature,
            "task": task,
            "expected": expected.summary(of_task, in_blocks=False),
            "expected_in_blocks": expected.summary(of_task, in_blocks=True),
            "counted_over_all_tasks": counted,
        }
        for task in arguments.tasks
        for of_task in [{o.request_id for o, of in zip(outputs, tasks, strict=True) if of == task}]
    ]


def print_table(document: dict[str, Any]) -> None:
    """Expected accepted length by task, the mean of tasks, over all drafts, as vLLM counted it, and by position."""
    rows: dict[tuple[float, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for record in document["records"]:
        rows[record["temperature"], json.dumps(record["configuration"])][record["task"]] = record
    tasks = list(dict.fromkeys(record["task"] for record in document["records"]))
    heads = ["T", "options", *tasks, "mean", "in blocks", "all drafts", "counted", "by position"]
    print("\n| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for (temperature, name), by_task in rows.items():
        expected = [by_task[task]["expected"] for task in tasks if task in by_task]
        counted = next(iter(by_task.values()))["counted_over_all_tasks"]
        lengths = _lengths(expected)
        error = math.sqrt(sum(_squared_error(each) for each in expected)) / len(expected)
        drafts = sum(each["drafts"] for each in expected)
        positions = [
            sum(c) / drafts for c in zip_longest(*(each["accepted_per_position"] for each in expected), fillvalue=0.0)
        ]
        cells = [f"{length:.2f}" for length in lengths]
        cells.append(f"{statistics.mean(lengths):.3f} ± {error:.3f}")
        # Files of before blocks were judged lack the second count.
        blocks = [by_task[task].get("expected_in_blocks") for task in tasks if task in by_task]
        cells.append(f"{statistics.mean(_lengths(blocks)):.3f}" if all(blocks) else "")
        cells.append(f"{1 + sum(each['accepted_tokens'] for each in expected) / drafts:.3f}")
        cells.append(f"{1 + counted['accepted_tokens'] / max(1, counted['drafts']):.3f}")
        cells.append(" ".join(f"{value:.2f}" for value in positions))
        print(f"| {temperature} | {name} | " + " | ".join(cells) + " |")


def _lengths(expected: Sequence[dict[str, Any]]) -> list[float]:
    return [1 + each["accepted_tokens"] / max(1, each["drafts"]) for each in expected]


def _squared_error(expected: dict[str, Any]) -> float:
    drafts = max(1, expected["drafts"])
    return (expected["squares"] / drafts - (expected["accepted_tokens"] / drafts) ** 2) / drafts


def main() -> None:
    """Measure, write the JSON, print the table."""
    arguments = parse_arguments()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = build(arguments)
    batch = model_runner(llm).input_batch
    expected = ExpectedAcceptance(lambda: batch.req_ids)
    document: dict[str, Any] = {
        "format": FORMAT,
        "kind": "acceptance",
        "provenance": provenance(),
        "settings": without_folders(vars(arguments)),
        "records": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for temperature in arguments.temperatures:
        for text in arguments.configurations:
            document["records"] += measure(llm, arguments, json.loads(text), temperature=temperature, expected=expected)
            # Written as it goes: a run of many configurations takes long.
            arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print(f"done: T={temperature} {text}", flush=True)
    print_table(document)
    os._exit(0)


if __name__ == "__main__":
    main()
