"""What is compared: each system is one set of vLLM engine arguments, by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BASELINE = "none"
VLLM_WORKER = "benchmarks.engine_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to serve the target.

    Attributes:
        name: in the tables.
        engine_args: of ``vllm.LLM``, besides those that all systems share.
        environment: variables that this system alone gets.
        worker: the module that runs it.
    """

    name: str
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    worker: str = VLLM_WORKER


def parse_system(text: str, *, draft: str | None, num_speculative_tokens: int) -> System:
    """Build a system from the command line.

    Args:
        text: ``none``; ``ours`` or ``ours:{JSON options}``; ``tli`` (vLLM's ``draft_model`` with
            ``use_heterogeneous_vocab``); ``ngram``; ``suffix``; ``hf`` (Hugging Face's assisted generation) and
            ``hf-none``, its baseline; or ``NAME={JSON}``, any ``--speculative-config``.
        draft: the draft model of ``ours``, ``tli`` and ``hf``.
        num_speculative_tokens: K, where the system has one.

    Raises:
        ValueError: the text names no system, or one that needs a draft.
    """
    name, _, options = text.partition(":")
    common = {"num_speculative_tokens": num_speculative_tokens}
    if name in ("ours", "tli", "hf") and draft is None:
        raise ValueError(f"the system {name!r} needs --draft")
    if name == BASELINE:
        return System(name=name)
    if name == "ours":
        extra = json.loads(options) if options else {}
        label = "ours" if not extra else "ours " + " ".join(f"{key}={value}" for key, value in extra.items())
        return _speculative(label, {"method": "tokentiming", "model": draft, **common, **extra})
    if name in ("hf", "hf-none"):
        return System(
            name="HF assisted" if name == "hf" else "HF none",
            engine_args={"draft": draft if name == "hf" else None, **common},
            worker="benchmarks.hf_worker",
        )
    of_vllm = {
        "tli": ("vLLM TLI", {"method": "draft_model", "model": draft, "use_heterogeneous_vocab": True}),
        "ngram": ("vLLM n-gram", {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2}),
        "suffix": ("vLLM suffix", {"method": "suffix"}),
    }
    if name in of_vllm:
        label, config = of_vllm[name]
        return _speculative(label, {**config, **common})
    label, separator, config_text = text.partition("=")
    if separator:
        return _speculative(label, json.loads(config_text))
    raise ValueError(
        f"unknown system {text!r}; write none, ours, ours:{{JSON}}, tli, ngram, suffix, hf, hf-none, or NAME={{JSON}}"
    )


def _speculative(name: str, config: Mapping[str, Any]) -> System:
    return System(name=name, engine_args={"speculative_config": dict(config)})
