"""What can be set: one frozen, validated source of every option, its help and its default."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

from vllm_tokentiming.errors import ConfigError

TransferMode = Literal["exact", "point_mass", "tli", "slem", "paper"]
ExtendableMode = Literal["online", "table", "off"]
EngineKind = Literal["vllm", "transformers"]
DraftDtype = Literal["auto", "float32", "bfloat16", "float16"]

OPTIONS_KEY: Final = "tokentiming"
"""Where the options are in vLLM's ``additional_config``."""

MAX_SPECULATIVE_TOKENS: Final = 128
"""vLLM's rejection sampler takes at most this many proposed tokens a request and step (``MAX_SPEC_LEN``)."""


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTimingConfig:
    """Every option of the plugin, validated once.

    The keys are those of ``--speculative-config`` with ``"method": "tokentiming"`` (where ``draft_model`` is called
    ``model``, as for vLLM's other methods), and of ``--additional-config '{"tokentiming": {…}}'``.

    Raises:
        ConfigError: a value is of the wrong type or out of range; the message says what to write instead.
    """

    draft_model: str = field(metadata={"help": "path or Hub id of the draft model"})
    draft_tokenizer: str | None = _option(None, "path or Hub id of the draft's tokenizer; default: the draft model")
    draft_revision: str | None = _option(None, "Hub revision of the draft model and its tokenizer")
    draft_dtype: DraftDtype = _option("auto", "dtype of the draft's weights; auto: the target's")
    draft_quantization: str | None = _option(
        "auto",
        "int8: 8-bit weights and activations, made from the draft once and cached; auto: that on CPUs that gain by it, "
        "where the draft allows it; null: as its config says; else a vLLM quantization method",
    )
    draft_trust_remote_code: bool = _option(False, "run code that the draft's repository brings")
    draft_max_model_len: int | None = _option(
        None, "longest draft context, tokens; past it a request goes on without proposals; default: the draft's own"
    )
    draft_kv_cache_memory: float | None = _option(
        None,
        "draft KV cache, GiB; default: room for max_num_seqs × max_model_len, at most 1 GiB on CPU and 4 GiB on GPU",
    )
    draft_enforce_eager: bool | None = _option(
        None,
        "run the draft without torch.compile and CUDA graphs; default: as the target, but true on CPU where its steps "
        "run on vLLM's kernels directly",
    )
    num_draft_tokens: int | None = _option(
        None, "draft forward passes per cycle, at most; default: num_speculative_tokens (the cap on proxy tokens)"
    )
    adaptive_length: bool = _option(
        True, "draft fewer tokens, or none, where they do not pay; false: num_draft_tokens in every cycle"
    )
    repeats: bool = _option(
        True,
        "propose what followed the same words earlier in the request, for a draft or after it, where that pays",
    )
    window_radius: int = _option(8, "Sakoe-Chiba radius of the alignment, cells (paper: 8 is best)")
    transfer: TransferMode = _option(
        "exact",
        "how draft probabilities reach the rejection sampler; all but paper are lossless (docs/losslessness.md)",
    )
    extendable: ExtendableMode = _option(
        "online",
        "transfer=exact: draft tokens that the target may go on with, as the vocabularies suggest and committed text "
        "shows "
        "(online), as the vocabularies suggest (table), or none (off)",
    )
    longest_run: int = _option(3, "transfer=exact: draft tokens before the last one of a chunk, at most")
    allow_lossy: bool = _option(False, "permit transfer=paper, which changes the target's output distribution")
    draft_top_k: int = _option(64, "the draft samples from its k likeliest tokens")
    draft_temperature: float | None = _option(
        None, "the draft's temperature, 0 for a greedy draft; default: each request learns what pays"
    )
    special_token_pairs: tuple[tuple[str, str], ...] = _option(
        (), "(target literal, draft literal) of special tokens that mean the same, beside those with equal literals"
    )
    engine: EngineKind = _option("vllm", "what runs the draft model")
    seed: int = _option(0, "seed of the draft's sampling for requests without their own")

    def __post_init__(self) -> None:
        object.__setattr__(self, "special_token_pairs", _as_pairs(self.special_token_pairs))
        self._check_types()
        if not self.draft_model.strip():
            raise ConfigError(
                'draft_model is empty. Name the draft, e.g. "model": "HuggingFaceTB/SmolLM2-135M-Instruct".'
            )
        self._check_range("draft_max_model_len", minimum=2)
        self._check_range("draft_kv_cache_memory", minimum=0.0, open_minimum=True)
        self._check_range("num_draft_tokens", minimum=1, maximum=MAX_SPECULATIVE_TOKENS)
        self._check_range("window_radius", minimum=1)
        self._check_range("draft_top_k", minimum=1)
        self._check_range("longest_run", minimum=0)
        self._check_range("draft_temperature", minimum=0.0)
        self._check_range("seed", minimum=0, maximum=2**63 - 1)  # what a torch.Generator takes
        if self.transfer == "paper" and not self.allow_lossy:
            raise ConfigError(
                "transfer='paper' gives the rejection sampler the paper's scalar probabilities, which changes the "
                "target's output distribution. Set allow_lossy=true to reproduce the paper, or use "
                "transfer='exact' (lossless)."
            )

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """Build from a JSON-like mapping; unknown keys are errors.

        Raises:
            ConfigError: an unknown key, a missing draft model, or an invalid value.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        for key in options:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"unknown tokentiming option {key!r}.{hint} Known options: {', '.join(sorted(known))}."
                )
        if not options.get("draft_model"):
            raise ConfigError(
                'no draft model is named. Set "model" in --speculative-config (or "draft_model" in '
                '--additional-config {"tokentiming": …}) to a path or Hub id.'
            )
        return cls(**options)

    def to_mapping(self) -> dict[str, Any]:
        """The options as JSON-serialisable values, the inverse of :meth:`from_mapping`."""
        values = dataclasses.asdict(self)
        values["special_token_pairs"] = [list(pair) for pair in self.special_token_pairs]
        return values

    def _check_types(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):
            value, expected = getattr(self, f.name), hints[f.name]
            if f.name == "special_token_pairs":
                continue
            alternatives = typing.get_args(expected) or (expected,)
            if typing.get_origin(expected) is Literal:
                if value not in alternatives:
                    choices = ", ".join(repr(a) for a in alternatives)
                    raise ConfigError(f"{f.name} is {value!r}; it must be one of {choices}.")
                continue
            accepted = tuple(a for a in alternatives if isinstance(a, type))
            if float in accepted:
                accepted += (int,)
            if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
                names = " or ".join("null" if a is type(None) else a.__name__ for a in accepted)
                raise ConfigError(f"{f.name} is {value!r} ({type(value).__name__}); it must be {names}.")
            if isinstance(value, str) and not value.strip() and f.name != "draft_model":
                raise ConfigError(f"{f.name} is {value!r}, which names nothing. Name it, or leave {f.name} out.")

    def _check_range(
        self, name: str, *, minimum: float, maximum: float | None = None, open_minimum: bool = False
    ) -> None:
        value = getattr(self, name)
        if value is None:
            return
        too_small = value <= minimum if open_minimum else value < minimum
        if (
            too_small
            or (maximum is not None and value > maximum)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            bound = f"greater than {minimum}" if open_minimum else f"at least {minimum}"
            if maximum is not None:
                bound += f" and at most {maximum}"
            raise ConfigError(f"{name} is {value!r}; it must be {bound}.")


def check_num_speculative_tokens(value: Any) -> int:
    """Validate vLLM's ``num_speculative_tokens``.

    Raises:
        ConfigError
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SPECULATIVE_TOKENS:
        raise ConfigError(
            f"num_speculative_tokens is {value!r}; it must be a whole number from 1 to {MAX_SPECULATIVE_TOKENS}. 3 "
            f"to 8 suit most "
            'pairs: "num_speculative_tokens": 5.'
        )
    return value


def _as_pairs(value: Any) -> tuple[tuple[str, str], ...]:
    # Only lists and tuples: a string of two characters would unpack like a pair, and a mapping yield its keys.
    outer = value if isinstance(value, list | tuple) else (None,)
    pairs = tuple(tuple(pair) if isinstance(pair, list | tuple) else () for pair in outer)
    if not all(len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], str) for pair in pairs):
        raise ConfigError(
            f"special_token_pairs is {value!r}; it must be a list of [target literal, draft literal], "
            'e.g. [["<|im_end|>", "</s>"]].'
        )
    return pairs
