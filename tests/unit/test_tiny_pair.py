"""The embedded pair: small, loadable, unlike in its tokenizers, and a draft that its target agrees with."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from vllm_tokentiming.tiny_pair import tiny_pair

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROLES = ("target", "draft")
SCRIPTS = Path(__file__).parents[2] / "scripts"
MAX_BYTES = 8_000_000
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
# Seen in training, about names that do not exist, and plain openings: none decides the figure alone.
PROMPTS = (
    CHAT.format("What does json.dumps do?"),
    CHAT.format("What does shutil.copyfile do?"),
    CHAT.format("What is the threading module?"),
    CHAT.format("What does queue.Queue.rotate do?"),
    CHAT.format("What does pathlib.Path.compress do?"),
    CHAT.format("How do I call logging.Handler.send?"),
    "heapq.heappush\n    Push",
    "textwrap.unwrap(text, width=70)\n    ",
)


def folder(role: str) -> Path:
    return getattr(tiny_pair(), role)


def load_tokenizer(role: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder(role))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    # Steps of a millisecond lose more to waking threads than they gain, above all on a busy machine.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    # float32: the loop below is about text, not about rounding.
    return {
        role: transformers.AutoModelForCausalLM.from_pretrained(folder(role), dtype=torch.float32).eval()
        for role in ROLES
    }


def test_package_data_is_small() -> None:
    root = tiny_pair().target.parent
    files = [file for file in root.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    total = sum(file.stat().st_size for file in files)
    assert 1_000_000 < total <= MAX_BYTES, f"{total} bytes"


@pytest.mark.parametrize("role", ROLES)
def test_folder_is_a_plain_llama_that_two_ranks_can_share(role: str) -> None:
    config = json.loads((folder(role) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert config["num_attention_heads"] % 2 == 0
    assert config["num_key_value_heads"] % 2 == 0
    assert config["vocab_size"] % 64 == 0
    assert config["intermediate_size"] % 64 == 0
    assert config["max_position_embeddings"] >= 2048
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize("role", ROLES)
def test_weights_are_finite_and_trained(role: str, models: dict[str, Any]) -> None:
    for name, weight in models[role].named_parameters():
        assert torch.isfinite(weight).all(), name
    tokenizer = load_tokenizer(role)
    text = "json.dumps(obj)\n    Return a string that is the same as the given object."
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        loss = models[role](ids, labels=ids).loss.item()
    # Chance is log(vocabulary), above 7 for both; text of this sort must be far from it.
    assert loss < 0.75 * math.log(len(tokenizer)), loss


def test_tokenizers_differ_in_kind() -> None:
    spec = {role: json.loads((folder(role) / "tokenizer.json").read_text(encoding="utf-8")) for role in ROLES}
    assert spec["target"]["decoder"]["type"] == "ByteLevel"
    assert [part["type"] for part in spec["draft"]["decoder"]["decoders"]] == [
        "Replace",
        "ByteFallback",
        "Fuse",
        "Strip",
    ]
    assert spec["draft"]["model"]["byte_fallback"] is True
    assert {f"<0x{byte:02X}>" for byte in range(256)} <= spec["draft"]["model"]["vocab"].keys()
    assert len(spec["target"]["model"]["vocab"]) > 2 * len(spec["draft"]["model"]["vocab"])


def test_target_has_more_rows_than_its_tokenizer_has_entries(models: dict[str, Any]) -> None:
    assert len(load_tokenizer("target")) < models["target"].config.vocab_size
    assert len(load_tokenizer("draft")) == models["draft"].config.vocab_size


@pytest.mark.parametrize("role", ROLES)
def test_any_text_survives_the_tokenizer(role: str) -> None:
    tokenizer = load_tokenizer(role)
    for text in ("plain words", "    indented\n\ttab", "naïve ☺ 日本語 🎉", "x = {'a': 1}  # ▁"[:-1], "a  b   c"):
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("role", ROLES)
def test_special_tokens_and_ends(role: str) -> None:
    tokenizer = load_tokenizer(role)
    assert tokenizer.bos_token_id is not None
    assert tokenizer.eos_token_id is not None
    generation = json.loads((folder(role) / "generation_config.json").read_text())
    assert tokenizer.eos_token_id in generation["eos_token_id"]
    begins = tokenizer("text").input_ids[0] == tokenizer.bos_token_id
    assert begins is (role == "draft")


def test_chat_templates_render_and_differ() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ]
    rendered = {
        role: load_tokenizer(role).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for role in ROLES
    }
    assert rendered["target"] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
        "<|im_start|>assistant\nTwo.<|im_end|>\n<|im_start|>user\nThree?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered["draft"] == "<s><<SYS>> Be brief. <</SYS>> [INST] One? [/INST] Two.</s>[INST] Three? [/INST] "


def test_chat_answers_end_by_themselves(models: dict[str, Any]) -> None:
    tokenizer = load_tokenizer("target")
    ids = tokenizer(CHAT.format("Hello"), return_tensors="pt").input_ids
    output = models["target"].generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :].tolist()
    assert output[-1] == tokenizer.eos_token_id
    assert len(tokenizer.decode(output, skip_special_tokens=True).split()) >= 3


def greedy(model: Any, ids: list[int], count: int, ends: set[int]) -> list[int]:
    output = []
    with torch.inference_mode():
        step = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        while True:
            output.append(int(step.logits[0, -1].argmax()))
            if len(output) == count or output[-1] in ends:
                return output
            step = model(torch.tensor([output[-1:]]), past_key_values=step.past_key_values, use_cache=True)


def test_target_accepts_what_the_draft_proposes(models: dict[str, Any]) -> None:
    target_tokenizer, draft_tokenizer = load_tokenizer("target"), load_tokenizer("draft")
    # Without the dummy space that it puts before every text, the draft's tokenizer cuts the middle of a text as it is.
    draft_tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    begin, end = draft_tokenizer.bos_token_id, draft_tokenizer.eos_token_id
    proposed = accepted = 0
    for prompt in PROMPTS:
        prompt_ids = target_tokenizer(prompt).input_ids
        reference = greedy(models["target"], prompt_ids, 24, set(models["target"].generation_config.eos_token_id))
        done = 0
        while done < len(reference):
            text = target_tokenizer.decode(prompt_ids + reference[:done]).replace("<|im_end|>", "</s>")
            drafted = greedy(models["draft"], draft_tokenizer(" " + text).input_ids, 5, {end})
            words = [token for token in drafted if token != end]
            # A token in front keeps the decoder from stripping a leading space.
            tail = draft_tokenizer.decode([begin, *words]).removeprefix("<s>")
            proposal = target_tokenizer(tail).input_ids
            if drafted[-1] == end:
                proposal.append(target_tokenizer.eos_token_id)
            proposal = proposal[: len(reference) - done]
            agreed = 0
            while agreed < len(proposal) and proposal[agreed] == reference[done + agreed]:
                agreed += 1
            proposed += len(proposal)
            accepted += agreed
            done += agreed + 1
    assert proposed > 100
    assert accepted / proposed >= 0.4, f"{accepted} of {proposed}"


def test_training_text_is_repeatable_and_keeps_the_held_out_entries_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from tiny_pair_text import build_corpus

    corpus = build_corpus(seed=1)
    assert corpus == build_corpus(seed=1)
    asked = {content for chat in corpus.chats for role, content in chat.turns if role == "user"}
    assert "What does json.dumps do?" in asked
    assert len(corpus.held_out_questions) == len(corpus.held_out_documents) == 24
    assert not asked & set(corpus.held_out_questions)
    assert not set(corpus.documents) & set(corpus.held_out_documents)
    assert sys.modules.pop("tiny_pair_text").__file__ == str(SCRIPTS / "tiny_pair_text.py")
