"""What the vocabulary room must compute, slowly and obviously, and tiny tokenizers to compute it on."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vllm_tokentiming.vocabulary import SpecialTokenMap, Vocabulary

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "for i in range(10):\n\tprint(i, end='')\r\n",
    "Schöne Grüße aus Köln, naïve café über 1234567890 Euro.",
    "你好，世界。今天天气很好！我们去公园吧。こんにちは、世界。カタカナ",
    "안녕하세요 세계. Привет, мир! สวัสดีชาวโลก مرحبا بالعالم",
    "👩‍👩‍👧‍👦 🙂🙃 é é ﬁ ½",
    '{"a": [1, 2, {"b": null}], "url": "https://example.org/path?q=1&r=2"}',
] * 4


def byte_level(
    *, vocab_size: int = 600, pattern: str | None = QWEN_PATTERN, alphabet: bool = True, **options: Any
) -> Any:
    """A byte-level BPE tokenizer with <|im_end|> and <|endoftext|> (special) and <think> (not)."""
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=options.get("add_prefix_space", False), use_regex=False)]
    )
    if options.get("nfc"):
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [],
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<s>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def sentencepiece(
    *, vocab_size: int = 900, dummy_prefix: bool = True, byte_fallback: bool = True, unigram: bool = False
) -> Any:
    """A Llama-2-like tokenizer: ▁ for spaces, <0xNN> fallback, BOS, added tokens of newlines and ▁."""
    specials = ["<unk>", "<s>", "</s>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    base = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    base.normalizer = normalizers.Replace(" ", "▁")
    base.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    base.train_from_iterator(
        CORPUS[:4],
        trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials + byte_pieces, show_progress=False),
    )
    spec = json.loads(base.to_str())
    vocab, merges = spec["model"]["vocab"], [tuple(merge) for merge in spec["model"]["merges"]]
    if unigram:
        model: Any = models.Unigram(
            [(piece, 0.0 if rank < 259 else -1.0 - len(vocab) * 1e-3 - rank * 1e-3) for piece, rank in vocab.items()],
            0,
            byte_fallback,
        )
    else:
        model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True)
    tokenizer = Tokenizer(model)
    steps = [normalizers.Prepend("▁")] if dummy_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(specials)
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("▁▁▁▁", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def word_piece() -> Any:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TINY = {
    "byte_level": byte_level,
    "no_pattern": lambda: byte_level(pattern=None, vocab_size=500),
    "few_bytes": lambda: byte_level(alphabet=False, nfc=True, add_prefix_space=True),
    "sentencepiece": sentencepiece,
    "unigram": lambda: sentencepiece(unigram=True, dummy_prefix=False),
}
REAL = ["llama2", "llama3", "gemma3", "qwen3", "gpt4o", "gptoss", "deepseek_v3", "claude"]
REAL += ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"]  # folders of models


@functools.cache
def tiny(name):
    tokenizer = TINY[name]()
    return Vocabulary.from_tokenizer(tokenizer, model_vocab_size=len(tokenizer) + 3, name=name)


@functools.cache
def real(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Vocabulary.from_tokenizer(tokenizer, model_vocab_size=len(tokenizer) + 3, name=folder.name)


@functools.cache
def paired(target, draft):
    return SpecialTokenMap.build(target, draft, ())


def held_back(data: bytes) -> int:
    """Bytes at the end that are a proper prefix of some valid character, found by trying continuations."""
    for length in (3, 2, 1):
        tail = data[-length:]
        if len(data) < length or tail[0] < 0xC0:
            continue
        for more in range(1, 4):
            for fill in (b"\x80", b"\x90", b"\xa0", b"\xbf", b"\x9f"):
                try:
                    if len((tail + fill + b"\x80" * (more - 1)).decode()) == 1:
                        return length
                except UnicodeDecodeError:
                    continue
    return 0


def context_from_scratch(
    target: Vocabulary, draft: Vocabulary, special_map: SpecialTokenMap, target_ids: Sequence[int]
) -> tuple[list[int], int]:
    """The draft's context of all of ``target_ids``, encoded at once, and how many bytes are held back."""
    segments: list[bytes | int] = [b""]
    for token in target_ids:
        spelled = target.token_bytes[token] if 0 <= token < target.model_vocab_size else None
        if spelled is None and token in special_map.target_to_draft:
            segments += [special_map.target_to_draft[token], b""]
        else:
            segments[-1] += special_map.literal(token) if spelled is None else spelled
    held = held_back(segments[-1])
    segments[-1] = segments[-1][: len(segments[-1]) - held]
    ids = [] if draft.bos_id is None else [draft.bos_id]
    first = True
    for segment in segments:
        if isinstance(segment, int):
            ids.append(segment)
            first = False
        elif segment:
            ids += draft.encoder.reference(draft.first_text(segment) if first else segment)
            first = False
    return ids, held


TEXT_PARTS = [
    *CORPUS[:8],
    "你好世界，这是一个很长的句子没有空格但是有标点。",
    "天地玄黄宇宙洪荒日月盈昃辰宿列张",
    "สวัสดีครับผมชื่อสมชายยินดีที่ได้รู้จัก",
    "مرحبا بكم في العالم العربي",
    "안녕하세요만나서반갑습니다 감사합니다",
    "e\u0301a\u0308 \u1100\u1161\u11a8 Z\u0351\u0343\u036b",
    "👩‍👩‍👧‍👦👍🏽🇩🇪",
    "\x00\x01\x07\x1b[31m\x7f\x85\u200b\u00ad\ufeff",
    " " * 40,
    "\n" * 9 + " " * 13 + "\t" * 5,
    "\r\n\r\n \r\n",
    "\u00a0 \u3000 \u2028 \u00a0\u00a0",
    "3.14159265358979323846264338327950288419716939937510",
    "1234567890" * 12,
    "SGVsbG8gV29ybGQhIFRoaXMgaXMgYmFzZTY0IGRhdGEgd2l0aG91dCBzcGFjZXM=",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "<|im_end|></s><s><bos><|endoftext|><think></think><end_of_turn><unk><0x0A>[PAD]",
    "▁▁ ▁a▁b ▁",
    "I'm can't o'clock it's 'tis we'LL ''s",
    '{"a":[1,2,{"b":null}],"k":"v"}',
    "foo.bar(baz)[0]->qux::quux/*comment*/#include<stdio.h>",
    "https://example.org/a/b?c=d&e=f#g_h-i~j",
    "� already replaced �",
    "ﬁ ½ ² Å K İ ß ſ",
    "!!!\n\n???\n...\n\n  x;\n};\n",
]
"""Kinds of text that tokenizers trip over; tests join and cut them."""
