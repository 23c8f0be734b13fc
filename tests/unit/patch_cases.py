"""Run by test_patches in a fresh process: what vLLM does in each case, as JSON. With the argument ``patched``, after
our patches."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from types import SimpleNamespace

import numpy as np
import torch
from vllm.platforms import current_platform

current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()

from vllm import SamplingParams  # noqa: E402
from vllm.model_executor.layers import utils as layers  # noqa: E402
from vllm.v1.sample import rejection_sampler  # noqa: E402 - binds the kernels registered above
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors, MoveDirectionality  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.sample.ops import penalties, topk_topp_sampler  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder  # noqa: E402
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402


class _Allocator:
    """A tensor whose new_empty hands out memory that holds something else, as a used allocator does."""

    @staticmethod
    def poison(monkeyed: torch.Tensor) -> torch.Tensor:
        class Poisoned(torch.Tensor):
            def new_empty(self, *size, **kwargs):
                return torch.full(size, -7.0, dtype=self.dtype)

        return monkeyed.as_subclass(Poisoned)


def expand() -> object:
    temperature = _Allocator.poison(torch.tensor([0.5, 0.0]))
    cumulative = torch.tensor([1, 3], dtype=torch.int32)
    return rejection_sampler.expand_batch_to_tokens(temperature, cumulative, 3, replace_from=0, replace_to=1).tolist()


def top_k() -> object:
    metadata = SimpleNamespace(
        all_greedy=False, temperature=torch.tensor([1.0]), top_k=torch.tensor([4], dtype=torch.int32), top_p=None
    )
    nothing = torch.empty(0, 8)
    return list(
        rejection_sampler.apply_sampling_constraints(nothing, torch.tensor([0], dtype=torch.int32), metadata).shape
    )


def sorted_entries() -> object:
    """Whether top-p sorts every entry of the vocabulary; and what it leaves, with top-k and without."""
    stock, calls = torch.Tensor.sort, []

    def sort(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        calls.append(tensor.shape)
        return stock(tensor, *args, **kwargs)

    torch.Tensor.sort = sort
    p = torch.tensor([0.9])
    try:
        left = [
            topk_topp_sampler.apply_top_k_top_p(torch.tensor([[0.0, 4.0, 4.5, 5.0]]), k, p).isfinite().nonzero()[:, 1]
            for k in (torch.tensor([2], dtype=torch.int32), None)
        ]
    finally:
        torch.Tensor.sort = stock
    return [len(calls), [tokens.tolist() for tokens in left]]


def draw(runner: GPUModelRunner, *_args: object) -> list[float]:
    """Stands for ``GPUModelRunner._sample``: takes one random number for each seeded row."""
    generators = runner.input_batch.generators
    return [torch.rand(1, generator=generators[row]).item() for row in sorted(generators)]


def rewind() -> object:
    """Two seeded requests; the first one's prefill is unfinished in the first step, so its sample is thrown away."""
    runner = GPUModelRunner.__new__(GPUModelRunner)
    generators = {row: torch.Generator().manual_seed(row) for row in (0, 1)}
    runner.input_batch = SimpleNamespace(
        num_reqs=2, generators=generators, req_ids=["a", "b"], req_id_to_index={"a": 0, "b": 1}
    )
    runner.discard_request_mask = SimpleNamespace(np=np.array([True, False, False]))
    runner.use_async_scheduling = False
    first = runner._sample()
    with contextlib.suppress(AttributeError):  # what follows the rewind needs a whole runner
        runner._bookkeeping_sync(None, None, None, None, 1)
    runner.discard_request_mask.np[0] = False
    second = runner._sample()
    return {
        "discarded draw comes again": second[0] == first[0],
        "other draw goes on": second[1] != first[1],
        "rows": sorted(runner.input_batch.generators),
    }


def padding() -> object:
    """A padded proposal behind memory that holds a one, whose law is all on token 2."""
    memory = torch.zeros(2, 4)
    memory[0, -1] = 1.0
    target_logits = memory[1:]
    target_logits[0] = torch.tensor([-torch.inf, -torch.inf, 0.0, -torch.inf])
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(1), generators={})
    soft_max = torch.Tensor.softmax
    torch.Tensor.softmax = lambda tensor, *_, **__: tensor.exp_()  # in place: the memory before it stays what it is
    try:
        return rejection_sampler.rejection_sample(
            torch.tensor([-1], dtype=torch.int32),
            [1],
            1,
            torch.tensor([1], dtype=torch.int32),
            None,
            target_logits,
            torch.tensor([[3]]),
            metadata,
        ).tolist()
    finally:
        torch.Tensor.softmax = soft_max


def numbers() -> object:
    """Whether a seeded request's rejected token takes as many random numbers as there are tokens."""
    size = 64
    seeded, by_size = (torch.Generator().manual_seed(0) for _ in range(2))
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(1), generators={0: seeded})
    rejection_sampler.rejection_sample(
        torch.tensor([0], dtype=torch.int32),
        [1],
        1,
        torch.tensor([1], dtype=torch.int32),
        None,
        torch.zeros(1, size),
        torch.tensor([[3]]),
        metadata,
    )
    torch.rand(1, dtype=torch.float64, generator=by_size)  # whether it is accepted
    torch.empty(size).exponential_(generator=by_size)
    return torch.equal(seeded.get_state(), by_size.get_state())


def bonus() -> object:
    """How often the sampler is asked for the token after proposals that are rejected; and what comes of them."""
    asked = 0

    class Counting(Sampler):
        def forward(self, *args: object, **kwargs: object) -> object:
            nonlocal asked
            asked += 1
            return super().forward(*args, **kwargs)

    metadata = SpecDecodeMetadata.make_dummy([[1, 1]], torch.device("cpu"))
    metadata.target_logits_indices, metadata.bonus_logits_indices = torch.tensor([0, 1]), torch.tensor([2])
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 1.0, 2.0], [2.0, 0.0, 1.0]])
    greedy = SamplingMetadata(
        **dict.fromkeys(field.name for field in dataclasses.fields(SamplingMetadata))
        | {"all_greedy": True, "all_random": False, "no_penalties": True, "bad_words_token_ids": {}}
        | {"logitsprocs": LogitsProcessors(), "generators": {}, "output_token_ids": [[]]}
    )
    output = rejection_sampler.RejectionSampler(Counting())(metadata, None, logits, greedy)
    return [asked, output.sampled_token_ids.tolist()]


def draws() -> object:
    """Whether drawing a token looks at one number: two tokens of the same probability, and a seed at each end."""
    logits = torch.full((2, 64), -torch.inf)
    logits[:, [3, 60]] = 1.5
    return [
        torch.ops._C.fused_gumbel_argmax(logits[:, order], torch.tensor([0, 2**31 - 1])).tolist()
        for order in (range(64), range(63, -1, -1))
    ]


def counted() -> object:
    """Whether penalties count every entry of the vocabulary; and what they leave of a token that was said twice."""
    stock, calls = layers.get_token_bin_counts_and_mask, []

    def get_token_bin_counts_and_mask(*args: object) -> object:
        calls.append(args)
        return stock(*args)

    layers.get_token_bin_counts_and_mask = get_token_bin_counts_and_mask
    half, one = torch.tensor([0.5]), torch.tensor([1.0])
    try:
        logits = penalties.apply_all_penalties(
            torch.full((1, 4), 4.0), torch.tensor([[1]]), one, half, 2 * one, [[2, 2]]
        )
    finally:
        layers.get_token_bin_counts_and_mask = stock
    return [len(calls), logits.tolist()]


def budget() -> object:
    """Three requests without proposals; the last one's budget is spent. The largest logit of each row, then and after
    one step more, when its thinking has ended."""
    holder = ThinkingBudgetStateHolder(
        SimpleNamespace(reasoning_start_token_ids=[1], reasoning_end_token_ids=[2]), 3, 4, torch.device("cpu"), False
    )
    output: list[int] = []
    spent = (2, SamplingParams(thinking_token_budget=0), [1], output)
    holder.sync_batch(BatchUpdate(batch_size=3, removed=[], added=[spent], moved=[]))
    outputs, proposals, seen = [[], [], output], [[], [], []], []
    for _ in range(2):
        logits = torch.zeros(3, 4)
        logits[:, 3] = 1.0
        holder.update_state(outputs, proposals)
        seen.append(holder.apply_to_logits(logits, False, proposals).argmax(dim=-1).tolist())
        output.append(seen[-1][2])
    return seen


def inherited() -> object:
    """Rows with a budget, when those that had one in rows 0 and then 2 have ended, and others moved to row 0."""
    holder = ThinkingBudgetStateHolder(
        SimpleNamespace(reasoning_start_token_ids=[1], reasoning_end_token_ids=[2]), 4, 4, torch.device("cpu"), False
    )
    budget = SamplingParams(thinking_token_budget=3)
    added = [(0, budget, [1], []), (1, SamplingParams(), [1], []), (2, budget, [1], []), (3, budget, [1], [])]
    swapped = [(2, 1, MoveDirectionality.SWAP), (1, 2, MoveDirectionality.SWAP)]
    holder.sync_batch(BatchUpdate(batch_size=4, removed=[], added=added, moved=swapped))
    ended = [(3, 0, MoveDirectionality.UNIDIRECTIONAL)]
    holder.sync_batch(BatchUpdate(batch_size=3, removed=[], added=[], moved=ended))
    seen = [sorted(holder._state)]
    ended = [(1, 0, MoveDirectionality.UNIDIRECTIONAL)]
    holder.sync_batch(BatchUpdate(batch_size=2, removed=[2], added=[], moved=ended))
    return [*seen, sorted(holder._state)]


GPUModelRunner._sample = draw

applied: list[str] = []
if "patched" in sys.argv:
    from vllm_tokentiming.vllm_adapter.patches import apply_patches

    applied = apply_patches(torch.device("cpu"))
    again = apply_patches(torch.device("cpu"))
    assert again == [], again

results: dict[str, object] = {"applied": applied}
for case in (expand, top_k, sorted_entries, rewind, padding, numbers, bonus, draws, counted, budget, inherited):
    try:
        results[case.__name__] = case()
    except (RuntimeError, IndexError, NotImplementedError) as error:
        results[case.__name__] = f"{type(error).__name__}: {error}"
sys.stdout.write(json.dumps(results) + "\n")
