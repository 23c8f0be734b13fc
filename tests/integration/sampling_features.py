"""Scenarios of what a request can ask of sampling. A scenario takes the ``LLM``, and returns what JSON can carry."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from scenarios import PROMPTS
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError


def _generate(llm: Any, prompts: Any, parameters: Any) -> list[list[int]]:
    outputs = llm.generate(list(prompts), parameters, use_tqdm=False)
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


def constraints(llm: Any) -> Any:
    """Everything that changes the target's law deterministically, greedy, each beside plain requests of one batch."""
    tokenizer = llm.get_tokenizer()
    common = [tokenizer.encode(text, add_special_tokens=False)[0] for text in (" the", " a", "\n", ".", " is", "x")]
    asked: dict[str, dict[str, Any]] = {
        "plain": {},
        "presence": {"presence_penalty": 1.5},
        "frequency": {"frequency_penalty": 0.7},
        "repetition": {"repetition_penalty": 1.3},
        "bad words": {"bad_words": ["the", "is", " a", "return"]},
        "allowed tokens": {"allowed_token_ids": common},
        "all penalties": {"presence_penalty": 0.3, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    }
    answers: dict[str, Any] = {}
    prompts, parameters = [], []
    for name, given in asked.items():
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, **given)
        answers[name] = _generate(llm, PROMPTS[:2], params)
        prompts += PROMPTS[:3]
        parameters += [params] * 3
    answers["together"] = _generate(llm, prompts, parameters)
    return answers


def not_with_speculation(llm: Any) -> Any:
    """What vLLM says to each parameter that it refuses with any speculative method; None where it takes it."""
    answers: dict[str, str | None] = {}
    for name, given in {"logit bias": {"logit_bias": {300: 3.0}}, "min p": {"min_p": 0.2}}.items():
        try:
            _generate(llm, PROMPTS[:1], SamplingParams(temperature=1.0, max_tokens=4, **given))
        except VLLMValidationError as error:
            answers[name] = str(error)
        else:
            answers[name] = None
    return answers


def logprobs(llm: Any) -> Any:
    """Values of ``logprobs`` and ``prompt_logprobs``: token, rank and logprob of each."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=2)

    def values(positions: Any) -> list[Any]:
        return [
            None
            if position is None
            else sorted((token, one.rank, round(one.logprob, 6)) for token, one in position.items())
            for position in positions
        ]

    return [
        {
            "ids": list(output.outputs[0].token_ids),
            "output": values(output.outputs[0].logprobs),
            "prompt": values(output.prompt_logprobs),
        }
        for output in llm.generate(list(PROMPTS), params, use_tqdm=False)
    ]


def seeds(llm: Any) -> Any:
    """A seeded request alone, among others, and among others that come later."""
    seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=32, ignore_eos=True)
    other = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    alone = _generate(llm, [PROMPTS[2]], seeded)[0]
    crowd = _generate(llm, PROMPTS, [other, other, seeded, *[other] * 5])[2]
    engine = llm.llm_engine
    engine.add_request("seeded", PROMPTS[2], seeded)
    late, step = [], 0
    while engine.has_unfinished_requests():
        if step in {2, 4, 5}:
            engine.add_request(f"late-{step}", PROMPTS[step], other)
        step += 1
        late += [list(o.outputs[0].token_ids) for o in engine.step() if o.finished and o.request_id == "seeded"]
    return {"alone": alone, "crowd": crowd, "late": late[0]}


ADAPTER_RANK = 8


def _write_adapter(folder: Path, config: Any, *, seed: int) -> Path:
    """A LoRA adapter as PEFT saves it, of random weights large enough to change what is said."""
    import torch
    from safetensors.torch import save_file

    dice = torch.Generator().manual_seed(seed)
    head = config.head_dim
    sizes = {"q_proj": config.num_attention_heads * head, "v_proj": config.num_key_value_heads * head}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, rows in sizes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(ADAPTER_RANK, config.hidden_size, generator=dice) * 0.05
            tensors[f"{place}.lora_B.weight"] = torch.randn(rows, ADAPTER_RANK, generator=dice) * 0.05
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": ADAPTER_RANK,
        "lora_alpha": 16,
        "target_modules": list(sizes),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def adapters(llm: Any) -> Any:
    """Two LoRA adapters of the target and the target itself, each alone and all in one batch."""
    from vllm.lora.request import LoRARequest

    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with tempfile.TemporaryDirectory() as name:
        config = llm.llm_engine.model_config.hf_config
        of_request: list[Any] = [None]
        for seed in (1, 2):
            folder = _write_adapter(Path(name) / str(seed), config, seed=seed)
            of_request.append(LoRARequest(f"adapter-{seed}", seed, str(folder)))

        def generate(prompts: Any, chosen: Any) -> list[list[int]]:
            outputs = llm.generate(list(prompts), greedy, lora_request=chosen, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        alone = [generate(PROMPTS[:3], [lora] * 3) for lora in of_request]
        together = generate([p for p in PROMPTS[:3] for _ in of_request], of_request * 3)
    return {"alone": alone, "together": together}
