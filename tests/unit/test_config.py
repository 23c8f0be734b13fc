"""Every validation of ``TokenTimingConfig``: what is refused, what the message says; the round trip through JSON."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tokentiming import ConfigError, TokenTimingConfig
from vllm_tokentiming.config import MAX_SPECULATIVE_TOKENS, DraftDtype, EngineKind, ExtendableMode, TransferMode

DRAFT = "some/draft"
FIELDS = {f.name: f for f in dataclasses.fields(TokenTimingConfig)}


def config(**options: Any) -> TokenTimingConfig:
    return TokenTimingConfig.from_mapping({"draft_model": DRAFT, **options})


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**options)
    return str(caught.value)


def test_defaults_are_the_documented_ones() -> None:
    assert config().to_mapping() == {
        "draft_model": DRAFT,
        "draft_tokenizer": None,
        "draft_revision": None,
        "draft_dtype": "auto",
        "draft_quantization": "auto",
        "draft_trust_remote_code": False,
        "draft_max_model_len": None,
        "draft_kv_cache_memory": None,
        "draft_enforce_eager": None,
        "num_draft_tokens": None,
        "adaptive_length": True,
        "repeats": True,
        "window_radius": 8,
        "transfer": "exact",
        "extendable": "online",
        "longest_run": 3,
        "allow_lossy": False,
        "draft_top_k": 64,
        "draft_temperature": None,
        "special_token_pairs": [],
        "engine": "vllm",
        "seed": 0,
    }


def test_every_option_has_help() -> None:
    assert all(len(f.metadata["help"]) > 10 for f in FIELDS.values())


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().window_radius = 3


def test_is_hashable_and_compares_by_value() -> None:
    pairs = [["<|im_end|>", "</s>"]]
    assert len({config(special_token_pairs=pairs), config(special_token_pairs=pairs), config()}) == 2


@pytest.mark.parametrize("missing", [{}, {"draft_model": ""}, {"draft_model": None}])
def test_missing_draft_model_is_named_with_its_key(missing: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r'no draft model is named.*"model".*path or Hub id'):
        TokenTimingConfig.from_mapping(missing)


def test_blank_draft_model() -> None:
    message = refusal(draft_model="  ")
    assert "draft_model is empty" in message
    assert '"model":' in message


def test_unknown_key_gets_a_suggestion_and_the_list() -> None:
    message = refusal(window_radus=4)
    assert "'window_radus'" in message
    assert "Did you mean 'window_radius'?" in message
    assert all(name in message for name in FIELDS)


def test_unknown_key_like_no_other_gets_no_suggestion() -> None:
    assert "Did you mean" not in refusal(zzz=1)


def test_unknown_key_need_not_be_a_string() -> None:
    with pytest.raises(ConfigError, match="unknown tokentiming option 7"):
        TokenTimingConfig.from_mapping({"draft_model": DRAFT, typing.cast("str", 7): 1})


@pytest.mark.parametrize(
    ("name", "value", "required"),
    [
        ("draft_model", 3, "str"),
        ("draft_tokenizer", 3, "str or null"),
        ("draft_revision", False, "str or null"),
        ("draft_quantization", ["int8"], "str or null"),
        ("draft_trust_remote_code", 1, "bool"),
        ("draft_trust_remote_code", "false", "bool"),
        ("draft_max_model_len", 512.0, "int or null"),
        ("draft_max_model_len", "512", "int or null"),
        ("draft_kv_cache_memory", "1", "float or null or int"),
        ("draft_kv_cache_memory", True, "float or null or int"),
        ("draft_enforce_eager", "yes", "bool or null"),
        ("num_draft_tokens", True, "int or null"),
        ("window_radius", 8.0, "int"),
        ("window_radius", None, "int"),
        ("longest_run", 2.0, "int"),
        ("allow_lossy", None, "bool"),
        ("draft_top_k", "64", "int"),
        ("draft_temperature", "0.7", "float or null or int"),
        ("seed", None, "int"),
        ("seed", True, "int"),
    ],
)
def test_wrong_type_says_found_and_required(name: str, value: Any, required: str) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name} is {value!r}")
    assert type(value).__name__ in message
    assert message.endswith(f"it must be {required}.")


@pytest.mark.parametrize("name", ["draft_tokenizer", "draft_revision", "draft_quantization"])
@pytest.mark.parametrize("value", ["", "  "])
def test_a_name_of_nothing_says_to_leave_it_out(name: str, value: str) -> None:
    assert refusal(**{name: value}) == f"{name} is {value!r}, which names nothing. Name it, or leave {name} out."


@pytest.mark.parametrize("name", ["draft_dtype", "transfer", "extendable", "engine"])
@pytest.mark.parametrize("value", ["nonsense", None, 1, ["vllm"], ""])
def test_wrong_choice_lists_the_choices(name: str, value: Any) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name} is {value!r}")
    for choice in typing.get_args(typing.get_type_hints(TokenTimingConfig)[name]):
        assert repr(choice) in message


@pytest.mark.parametrize(
    ("name", "bad", "good", "bound"),
    [
        ("draft_max_model_len", 1, 2, "at least 2"),
        ("draft_max_model_len", -5, 10**6, "at least 2"),
        ("draft_kv_cache_memory", 0, 1e-6, "greater than 0"),
        ("draft_kv_cache_memory", -1.5, 3, "greater than 0"),
        ("draft_kv_cache_memory", float("nan"), 0.5, "greater than 0"),
        ("draft_kv_cache_memory", float("inf"), 0.5, "greater than 0"),
        ("num_draft_tokens", 0, 1, f"at least 1 and at most {MAX_SPECULATIVE_TOKENS}"),
        (
            "num_draft_tokens",
            MAX_SPECULATIVE_TOKENS + 1,
            MAX_SPECULATIVE_TOKENS,
            f"at least 1 and at most {MAX_SPECULATIVE_TOKENS}",
        ),
        ("window_radius", 0, 1, "at least 1"),
        ("draft_top_k", 0, 1, "at least 1"),
        ("longest_run", -1, 0, "at least 0"),
        ("draft_temperature", -0.01, 0, "at least 0"),
        ("draft_temperature", float("nan"), 1.5, "at least 0"),
        ("draft_temperature", float("inf"), 1.5, "at least 0"),
        ("seed", -1, 0, "at least 0"),
        ("seed", 2**63, 2**63 - 1, "at least 0"),
    ],
)
def test_range_says_found_and_bound_and_holds_at_the_edge(name: str, bad: float, good: float, bound: str) -> None:
    message = refusal(**{name: bad})
    assert message.startswith(f"{name} is {bad!r}; it must be {bound}")
    assert getattr(config(**{name: good}), name) == good


def test_paper_transfer_needs_the_opt_in() -> None:
    message = refusal(transfer="paper")
    assert "changes the target's output distribution" in message
    assert "allow_lossy=true" in message
    assert "transfer='exact'" in message
    assert config(transfer="paper", allow_lossy=True).transfer == "paper"


def test_special_token_pairs_become_tuples() -> None:
    assert config(special_token_pairs=[["<|im_end|>", "</s>"]]).special_token_pairs == (("<|im_end|>", "</s>"),)


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        "<s>",
        ["<s>"],
        ["ab"],
        [["<s>"]],
        [["a", "b", "c"]],
        [["a", 1]],
        [[None, "b"]],
        {"ab": "cd"},
        [{"a", "b"}],
    ],
)
def test_malformed_special_token_pairs_show_a_right_one(value: Any) -> None:
    message = refusal(special_token_pairs=value)
    assert message.startswith(f"special_token_pairs is {value!r}")
    assert '[["<|im_end|>", "</s>"]]' in message


def test_constructor_treats_special_token_pairs_as_from_mapping_does() -> None:
    direct = TokenTimingConfig(draft_model=DRAFT, special_token_pairs=[["a", "b"]])
    assert direct == config(special_token_pairs=[["a", "b"]])
    with pytest.raises(ConfigError, match="special_token_pairs"):
        TokenTimingConfig(draft_model=DRAFT, special_token_pairs="ab")


def test_error_is_a_value_error_too() -> None:
    # vLLM's own start-up reports ValueError as a bad option.
    with pytest.raises(ValueError, match="unknown tokentiming option"):
        config(nonsense=1)


texts = st.text(min_size=1).filter(str.strip)
whole = st.integers(1, 10**6)
OPTIONS = st.fixed_dictionaries(
    {"draft_model": texts},
    optional={
        "draft_tokenizer": st.none() | texts,
        "draft_revision": st.none() | texts,
        "draft_dtype": st.sampled_from(typing.get_args(DraftDtype)),
        "draft_quantization": st.none() | texts,
        "draft_trust_remote_code": st.booleans(),
        "draft_max_model_len": st.none() | st.integers(2, 10**7),
        "draft_kv_cache_memory": st.none() | st.floats(1e-3, 1e3) | st.integers(1, 100),
        "draft_enforce_eager": st.none() | st.booleans(),
        "num_draft_tokens": st.none() | st.integers(1, MAX_SPECULATIVE_TOKENS),
        "adaptive_length": st.booleans(),
        "repeats": st.booleans(),
        "window_radius": whole,
        "transfer": st.sampled_from([mode for mode in typing.get_args(TransferMode) if mode != "paper"]),
        "extendable": st.sampled_from(typing.get_args(ExtendableMode)),
        "longest_run": st.integers(0, 100),
        "allow_lossy": st.booleans(),
        "draft_top_k": whole,
        "draft_temperature": st.none() | st.floats(0, 100),
        "special_token_pairs": st.lists(
            st.lists(texts, min_size=2, max_size=2), max_size=3, unique_by=lambda pair: pair[0]
        ),
        "engine": st.sampled_from(typing.get_args(EngineKind)),
        "seed": st.integers(0, 2**31),
    },
)


@given(OPTIONS)
def test_round_trip_through_json(options: dict[str, Any]) -> None:
    built = TokenTimingConfig.from_mapping(options)
    there = json.loads(json.dumps(built.to_mapping()))
    assert TokenTimingConfig.from_mapping(there) == built
    assert {key: there[key] for key in options} == options


def test_hypothesis_strategy_covers_every_option() -> None:
    seen: set[str] = set()

    @given(OPTIONS)
    def collect(options: dict[str, Any]) -> None:
        seen.update(options)

    collect()
    assert seen == set(FIELDS)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.lists(st.text()),
    st.dictionaries(st.text(), st.text()),
)


@given(name=st.sampled_from(sorted(FIELDS)), value=JUNK)
def test_any_json_value_is_accepted_or_refused_by_name(name: str, value: Any) -> None:
    message = ""
    try:
        config(**{name: value})
    except ConfigError as error:
        message = str(error)
    assert not message or name in message or (name == "draft_model" and "draft model" in message)
