"""How do the two tiny tokenizers cut text? Unlike on purpose, each like a family in wide use.

Target: byte-level BPE (GPT-2 alphabet, split by a regular expression, no BOS added, ChatML turns), as Qwen's.
Draft: SentencePiece-style BPE (▁ for the space, ``<0xNN>`` byte fallback, BOS added, ``[INST]`` turns), as Llama 2's.
Both are saved as ordinary Hugging Face tokenizer files. This module owns no state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TARGET_END, TARGET_TURN_START, TARGET_TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
DRAFT_UNKNOWN, DRAFT_BEGIN, DRAFT_END = "<unk>", "<s>", "</s>"

TARGET_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As in Llama 2, the end token follows every answer; a system message goes before the first instruction.
DRAFT_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ '<<SYS>> ' + message['content'] + ' <</SYS>> ' }}"
    "{% elif message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST] ' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)

_TARGET_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What a merge may span while the draft's merges are learned: a word with its ▁, one digit, one run of signs or of ▁.
_DRAFT_SPLIT = r"▁?[\p{L}]+|▁?\p{N}|▁?[^\p{L}\p{N}▁]+|▁+(?=▁)|▁+"


def build_target_tokenizer(texts: Iterable[str], *, size: int) -> PreTrainedTokenizerFast:
    """Train the byte-level tokenizer: ``size`` entries, specials first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_TARGET_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[TARGET_END, TARGET_TURN_START, TARGET_TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TARGET_TURN_END,
        bos_token=TARGET_END,
        pad_token=TARGET_END,
        chat_template=TARGET_CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def build_draft_tokenizer(texts: Iterable[str], *, size: int) -> PreTrainedTokenizerFast:
    """Train the SentencePiece-style tokenizer: ``size`` entries, specials, then bytes, then pieces."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    # A newline stays a byte token, as in Llama 2: it never enters a merge.
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\n\t\r]+"), behavior="removed"),
            pre_tokenizers.Split(Regex(_DRAFT_SPLIT), behavior="isolated"),
        ]
    )
    specials = [DRAFT_UNKNOWN, DRAFT_BEGIN, DRAFT_END]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(specials) - len(byte_tokens), limit_alphabet=120, show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    vocabulary = {token: index for index, token in enumerate([*specials, *byte_tokens, *pieces])}

    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for left, right in learned["merges"]],
            unk_token=DRAFT_UNKNOWN,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    state = json.loads(tokenizer.to_str())
    begin = {"SpecialToken": {"id": DRAFT_BEGIN, "type_id": 0}}
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {DRAFT_BEGIN: {"id": DRAFT_BEGIN, "ids": [1], "tokens": [DRAFT_BEGIN]}},
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        unk_token=DRAFT_UNKNOWN,
        bos_token=DRAFT_BEGIN,
        eos_token=DRAFT_END,
        pad_token=DRAFT_END,
        chat_template=DRAFT_CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def without_prefix(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Return the draft's tokenizer as it cuts the middle of a text: no dummy ▁ in front, no BOS."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    state["post_processor"] = None
    return Tokenizer.from_str(json.dumps(state))


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save in Hugging Face's form, without the indentation (a third of the file) and with the template inside."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    whole = folder / "tokenizer.json"
    state: dict[str, Any] = json.loads(whole.read_text(encoding="utf-8"))
    # Merges as "left right" strings are the older form, which every release reads; it is also shorter.
    if not any(" " in part for pair in state["model"]["merges"] for part in pair):
        state["model"]["merges"] = [" ".join(pair) for pair in state["model"]["merges"]]
    whole.write_text(json.dumps(state, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    template_file = folder / "chat_template.jinja"
    template_file.unlink(missing_ok=True)
    settings_file = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(settings_file.read_text(encoding="utf-8"))
    settings["chat_template"] = tokenizer.chat_template
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings_file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
