"""Hugging Face's assisted generation as a system: the same protocol as ``benchmarks.engine_worker``.

With another tokenizer transformers re-tokenises the draft's text at temperature 0 (universal assisted generation, UAG)
and drafts from the intersection of the vocabularies above it (universal speculative decoding, USD; Timor et al., arXiv
2502.05202). One prompt at a time, as it has it. Its speed-up is to be read against ``hf none``, not against vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def measure(models: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Generate for each prompt in turn."""
    import torch
    from transformers import GenerationConfig

    from benchmarks.engine_worker import prompt_ids

    sampling, tokenizer = request["sampling"], models["tokenizer"]
    sampled = sampling["temperature"] > 0
    config = GenerationConfig(
        max_new_tokens=sampling["max_tokens"],
        do_sample=sampled,
        temperature=sampling["temperature"] if sampled else None,
        top_k=0 if sampled else None,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
    )
    assistant = {}
    if "drafts" in models:
        assistant = {
            "assistant_model": models["drafts"][sampled],
            "tokenizer": tokenizer,
            "assistant_tokenizer": models["draft_tokenizer"],
        }
    outputs = []
    begun = time.perf_counter()
    with torch.inference_mode():
        for text in request["chat"]:
            ids = prompt_ids(tokenizer, text)
            output = models["target"].generate(
                torch.tensor([ids]), generation_config=config, attention_mask=torch.ones(1, len(ids)), **assistant
            )
            outputs.append(output[0, len(ids) :].tolist())
    return {"seconds": time.perf_counter() - begun, "token_ids": outputs, "speculation": {}}


def main() -> None:
    """Serve measurements until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = json.loads(sys.argv[1])
    begun = time.perf_counter()

    def load(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments["dtype"])).eval()

    models = {"target": load(arguments["model"]), "tokenizer": AutoTokenizer.from_pretrained(arguments["model"])}
    # As many tokens from all systems; assisted generation refuses min_new_tokens.
    models["target"].generation_config.eos_token_id = None
    if arguments.get("draft"):
        models["draft"] = load(arguments["draft"])
        # USD puts layers of its own into the draft, with which UAG ends in an error of shapes: one draft for each.
        models["drafts"] = {sampled: load(arguments["draft"]) for sampled in (False, True)}
        for draft in models["drafts"].values():
            draft.generation_config.num_assistant_tokens = arguments["num_speculative_tokens"]
        models["draft_tokenizer"] = AutoTokenizer.from_pretrained(arguments["draft"])
    print(json.dumps({"ready": True, "start_seconds": time.perf_counter() - begun}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(models, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
