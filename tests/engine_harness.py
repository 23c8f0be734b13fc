"""A draft engine in the test's own process, without an LLM around it, and the Hugging Face reference that it is judged
by.

The models are small random Llamas made on the spot: wide weights, so that greedy choices are clear and texts do not
repeat.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_tokentiming.config import TokenTimingConfig
from vllm_tokentiming.engine.interface import DraftedTokens, DraftEngine, DraftRequest, DraftSampling, Silence

VOCAB_SIZE = 384
MAX_MODEL_LEN = 1024
CLEAR = 1e-3
"""A greedy choice may differ from the reference where two logits are closer than this: sums run in another order."""


def make_random_llama(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save a small random Llama; its head size is one that vLLM's CPU attention has a kernel for."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": MAX_MODEL_LEN,
            "initializer_range": 0.3,
            "tie_word_embeddings": False,
            **changes,
        }
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load_reference(folder: Path) -> Any:
    """The judge: Hugging Face in float32, every context computed whole."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_logits(model: Any, ids: list[int], last: int) -> torch.Tensor:
    """Logits after each of the last ``last`` tokens of ``ids``, [last, V]."""
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0, -last:]
    return logits.double()


def check_greedy(model: Any, context: list[int], drafted: list[int]) -> None:
    """Every drafted token is the reference's choice after the context and the tokens drafted before it."""
    assert drafted, "nothing was drafted"
    logits = reference_logits(model, context + drafted[:-1], len(drafted))
    for place, token in enumerate(drafted):
        best = logits[place].max()
        assert logits[place, token] > best - CLEAR, (
            f"token {place} after {len(context)} context tokens is {token} ({logits[place, token]:.4f}), the reference "
            f"takes {int(logits[place].argmax())} ({best:.4f})"
        )


def start_distributed() -> None:
    """What a vLLM worker does before it loads a model, once per process."""
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        model_parallel_is_initialized,
    )
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    if model_parallel_is_initialized():
        return
    _set_torch_accelerator_to_noop()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}", backend="gloo"
    )
    ensure_model_parallel_initialized(1, 1)


@contextmanager
def vllm_engine(folder: Path, *, max_num_seqs: int = 8, **options: Any) -> Iterator[Any]:
    """A ``VllmDraftEngine`` in float32, eager, under the config of a target that is the same model."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    from vllm_tokentiming.engine.vllm_engine import VllmDraftEngine

    torch.set_num_threads(1)
    config = EngineArgs(
        model=str(folder), dtype="float32", enforce_eager=True, max_num_seqs=max_num_seqs, skip_tokenizer_init=True
    ).create_engine_config()
    with set_current_vllm_config(config):
        start_distributed()
        options = {"draft_quantization": None, **options}
        yield VllmDraftEngine(config, TokenTimingConfig(draft_model=str(folder), **options))


def transformers_engine(folder: Path, *, max_num_seqs: int = 8, **options: Any) -> Any:
    """A ``TransformersDraftEngine`` in float32."""
    from vllm_tokentiming.engine.transformers_engine import TransformersDraftEngine

    torch.set_num_threads(1)
    return TransformersDraftEngine.from_options(
        TokenTimingConfig(draft_model=str(folder), engine="transformers", **options),
        device="cpu",
        dtype=torch.float32,
        max_num_seqs=max_num_seqs,
    )


@torch.inference_mode()
def check_laws(model: Any, context: list[int], drafted: DraftedTokens, sampling: DraftSampling) -> None:
    """Every law is the reference's softmax at the temperature over its top k, and the token came from it."""
    ids = drafted.ids_in_draft_vocab
    assert drafted.law_ids is not None
    assert drafted.law_probs is not None
    assert drafted.law_ids.dtype == np.int32
    assert drafted.law_probs.dtype == np.float64
    assert drafted.law_ids.shape == drafted.law_probs.shape
    assert len(drafted.law_ids) == len(ids)
    np.testing.assert_allclose(drafted.law_probs.sum(axis=1), 1.0, atol=1e-9)
    scaled = reference_logits(model, context + ids[:-1], len(ids)) / sampling.temperature
    for place, token in enumerate(ids):
        law = np.zeros(scaled.shape[1])
        law[drafted.law_ids[place]] = drafted.law_probs[place]
        assert (drafted.law_probs[place] > 0).sum() <= sampling.top_k
        assert law[token] > 0
        kept = scaled[place].topk(min(sampling.top_k, scaled.shape[1]))
        expected = torch.zeros(scaled.shape[1], dtype=torch.float64)
        expected[kept.indices] = kept.values.softmax(dim=0)
        np.testing.assert_allclose(law, expected.numpy(), atol=1e-3)


@dataclass(slots=True)
class _Served:
    context: list[int]
    seen: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)


def simulate_server(
    engine: DraftEngine,
    model: Any,
    *,
    seed: int,
    cycles: int,
    max_num_seqs: int,
    longest_prompt: int = 300,
    may_be_silent: frozenset[Silence] = frozenset(),
) -> int:
    """Random requests join, leave, pause, accept, reject and rewrite; every proposal is compared with the reference.

    Returns:
        The number of drafted tokens that were checked.
    """
    rng = random.Random(seed)
    vocab_size = engine.vocab_size
    served: dict[str, _Served] = {}
    checked = 0
    for cycle in range(cycles):
        if len(served) < max_num_seqs and (not served or rng.random() < 0.5):
            length = rng.choice([1, 2, 126, 127, 128, 129, 255, 256, 257, rng.randrange(1, longest_prompt)])
            prompt = [rng.randrange(vocab_size) for _ in range(min(length, longest_prompt))]
            if served and rng.random() < 0.5:  # starts like another one
                other = rng.choice(list(served.values())).context
                prompt = other[: rng.randrange(1, len(other) + 1)] + prompt[:3]
            served[f"request {cycle}"] = _Served(context=prompt)
        for request_id in [rid for rid in served if rng.random() < 0.05]:
            del served[request_id]
            engine.release(request_id)
        batch = [rid for rid in served if rng.random() < 0.85]
        rng.shuffle(batch)
        requests = []
        for request_id in batch:
            one = served[request_id]
            _move_on(rng, one, vocab_size)
            same = next((i for i, (a, b) in enumerate(zip(one.context, one.seen, strict=False)) if a != b), None)
            stable = min(len(one.context), len(one.seen)) if same is None else same
            sampling = rng.choice(
                [None, None, DraftSampling(temperature=rng.choice([0.0, 0.7, 1.3]), top_k=rng.randrange(1, 40))]
            )
            requests.append(
                DraftRequest(
                    request_id=request_id,
                    context_ids=list(one.context),
                    num_steps=rng.choice([0, 1, 2, 3, 6]),
                    num_stable=rng.randrange(stable + 1),
                    sampling=sampling,
                )
            )
            one.seen = list(one.context)
        for request, drafted in zip(requests, engine.draft(requests), strict=True):
            served[request.request_id].drafted = drafted.ids_in_draft_vocab
            checked += check_proposal(model, request, drafted, may_be_silent=may_be_silent)
    for request_id in served:
        engine.release(request_id)
    return checked


def _move_on(rng: random.Random, one: _Served, vocab_size: int) -> None:
    accepted = one.drafted[: rng.randrange(len(one.drafted) + 1)]
    kind = rng.random()
    if kind < 0.7:  # a prefix is accepted, then the verifier's own token
        one.context += [*accepted, rng.randrange(vocab_size)]
    elif kind < 0.8:  # nothing new
        pass
    elif kind < 0.95:  # the seam is encoded anew
        keep = max(0, len(one.context) - rng.randrange(1, 12))
        one.context = one.context[:keep] + [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 8))]
    else:  # everything from some place on is new
        keep = rng.randrange(len(one.context))
        one.context = one.context[:keep] + [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 150))]
    one.drafted = []


def check_proposal(
    model: Any, request: DraftRequest, drafted: DraftedTokens, *, may_be_silent: frozenset[Silence] = frozenset()
) -> int:
    """The proposal is what the reference says; returns its length."""
    ids = drafted.ids_in_draft_vocab
    if drafted.reason is not None:
        assert ids == []
        assert drafted.reason in may_be_silent | ({Silence.WARMING} if request.num_steps == 0 else set())
        return 0
    assert len(ids) == request.num_steps > 0
    sampling = request.sampling
    if sampling is None or sampling.temperature == 0:
        assert drafted.law_ids is None
        assert drafted.law_probs is None
        check_greedy(model, list(request.context_ids), ids)
    else:
        check_laws(model, list(request.context_ids), drafted, sampling)
    return len(ids)
