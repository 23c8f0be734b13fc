"""Train the tiny target and draft that the package carries, from Python's own documentation, on one CPU thread.

    python scripts/train_tiny_pair.py --out vllm_tokentiming/tiny_pair     # train, save, evaluate
    python scripts/train_tiny_pair.py --out vllm_tokentiming/tiny_pair --evaluate   # evaluate what is there

Last run: Python 3.11.7, torch 2.13, 746 s on one thread of a two-core machine that other work kept busy (load 4 to 8),
of which target 325 s, distillation 73 s, draft 340 s. Final losses: target 0.58 nats a token, draft 0.70 (of its
smaller tokens, and on text partly sampled at temperature 1). Acceptance at temperature 0, five draft tokens a cycle,
prompts about entries never shown: chat 62 %, completion 50 % of the proposed target tokens. Seeds are fixed; another
Python version has other documentation, and another processor rounds otherwise, so weights differ in detail.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from tiny_pair_acceptance import measure_acceptance
from tiny_pair_text import Chat, Corpus, build_corpus
from tiny_pair_tokenizers import (
    DRAFT_BEGIN,
    DRAFT_END,
    TARGET_END,
    TARGET_TURN_END,
    build_draft_tokenizer,
    build_target_tokenizer,
    save_tokenizer,
    without_prefix,
)
from tiny_pair_training import Schedule, Shape, build_model, continue_texts, train
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as HFTokenizer

logger = logging.getLogger("train_tiny_pair")

SEED = 20251118
# The model's 4096 rows exceed the tokenizer's 4040 entries: real checkpoints are padded too.
TARGET_TOKENIZER_SIZE, DRAFT_TOKENIZER_SIZE = 4040, 1536
TARGET_SHAPE = Shape(4096, 256, 448, 3, 4, 2)
DRAFT_SHAPE = Shape(DRAFT_TOKENIZER_SIZE, 192, 384, 3, 2, 2)


def _as_target_text(chat: Chat, tokenizer: HFTokenizer) -> str:
    messages = [{"role": role, "content": content} for role, content in chat.turns]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def _target_stream(texts: list[str], tokenizer: HFTokenizer, rng: random.Random) -> np.ndarray:
    end_id = tokenizer.convert_tokens_to_ids(TARGET_END)
    shuffled = rng.sample(texts, len(texts))
    ids = [token for text in shuffled for token in [*tokenizer(text).input_ids, end_id]]
    return np.array(ids, dtype=np.int32)


class DraftCutter:
    """Cuts target-side text into draft tokens as a running request would show it to the draft.

    The committed text ends wherever a target token ended, often inside a draft piece; so half of the documents are
    cut at random target token boundaries first, and the draft learns to go on from there.
    """

    def __init__(self, target: HFTokenizer, draft: HFTokenizer, rng: random.Random) -> None:
        self._target = target
        self._mid_text = without_prefix(draft)
        self._rng = rng
        self._begin, self._end = draft.convert_tokens_to_ids([DRAFT_BEGIN, DRAFT_END])

    def cut(self, text: str, *, finished: bool = True) -> list[int]:
        """Return draft ids, BOS included; the target's end of turn is the draft's end token.

        Args:
            text: in the target's form.
            finished: whether the text ends here, with an end token, or was cut off by a length limit.
        """
        rng = self._rng
        if rng.random() < 0.9:
            text = text.replace(TARGET_TURN_END, DRAFT_END)
        text = text.removesuffix("\n").removesuffix(DRAFT_END).removesuffix(TARGET_TURN_END)
        # A context begins with BOS and the dummy space; a few documents lack it, as text after another end token does.
        if rng.random() < 0.85:
            text = " " + text
        ids = [self._begin]
        for segment in self._segments(text) if rng.random() < 0.6 else [text]:
            ids += self._mid_text.encode(segment).ids
        return [*ids, self._end] if finished else ids

    def _segments(self, text: str) -> list[str]:
        segments, start = [], 0
        for _, stop in self._target(text, return_offsets_mapping=True).offset_mapping:
            # A token that ends inside a character has a zero-width neighbour; the seam stays between characters.
            if stop > start and self._rng.random() < 0.15:
                segments.append(text[start:stop])
                start = stop
        return [*segments, text[start:]]


def _distillation_prompts(corpus: Corpus, rng: random.Random, count: int) -> list[str]:
    """Mix seen questions, recombined ones and openings of documents: what the target says when it guesses matters."""
    names = [chat.turns[-2][1].rstrip("?").split()[-2:][0] for chat in corpus.chats]
    dotted = sorted({name for name in names if "." in name})
    prompts = []
    for _ in range(count):
        kind = rng.random()
        if kind < 0.3:
            turns = rng.choice(corpus.chats).turns[:-1]
            body = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
            prompts.append(body + "<|im_start|>assistant\n")
        elif kind < 0.65:
            left, right = rng.choice(dotted), rng.choice(dotted)
            name = f"{left.rsplit('.', 1)[0]}.{right.rsplit('.', 1)[1]}"
            question = rng.choice(["What does {} do?", "How do I call {}?"]).format(name)
            prompts.append(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        else:
            words = rng.choice(corpus.documents)[:400].split(" ")
            prompts.append(" ".join(words[: rng.randint(2, max(3, len(words) - 1))]))
    return prompts


def _distil(target: LlamaForCausalLM, tokenizer: HFTokenizer, prompts: list[str]) -> list[tuple[str, bool]]:
    """Return prompts with the target's continuations, greedy or sampled, and whether each came to an end."""
    encoded = [tokenizer(prompt).input_ids for prompt in prompts]
    end_ids = frozenset(tokenizer.convert_tokens_to_ids([TARGET_END, TARGET_TURN_END]))
    texts = []
    cut = len(encoded) * 7 // 10
    for seed, (part, temperature) in enumerate([(encoded[:cut], 0.0), (encoded[cut:], 1.0)]):
        answers = continue_texts(
            target, part, max_new_tokens=64, end_ids=end_ids, pad_id=0, temperature=temperature, seed=seed
        )
        for prompt, answer in zip(part, answers, strict=True):
            text = tokenizer.decode([*prompt, *answer]).removesuffix(TARGET_END)
            if "\ufffd" not in text:
                texts.append((text, answer[-1] in end_ids))
    return texts


def _save(model: LlamaForCausalLM, tokenizer: HFTokenizer, folder: Path, end_ids: list[int]) -> None:
    bos_id, pad_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(bos_token_id=bos_id, eos_token_id=end_ids, pad_token_id=pad_id)
    # In place: what is distilled and measured afterwards is the rounded model, as saved.
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, folder)


def train_pair(
    out: Path, *, target_steps: int, draft_steps: int, distillation_prompts: int, keep_target: bool = False
) -> None:
    """Train both models (or the draft alone) and save them under ``out``/target and ``out``/draft."""
    rng = random.Random(SEED)
    corpus = build_corpus(seed=SEED)
    plain = [*corpus.documents, *("".join(f"<|im_start|>{r}\n{c}\n" for r, c in chat.turns) for chat in corpus.chats)]
    target_tokenizer = build_target_tokenizer(plain, size=TARGET_TOKENIZER_SIZE)
    draft_tokenizer = build_draft_tokenizer(plain, size=DRAFT_TOKENIZER_SIZE)
    chats = [_as_target_text(chat, target_tokenizer) for chat in corpus.chats]
    texts = [*corpus.documents, *chats]
    end_ids = target_tokenizer.convert_tokens_to_ids([TARGET_TURN_END, TARGET_END])
    logger.info("%d documents, %d chats, %d characters", len(corpus.documents), len(chats), sum(map(len, texts)))

    if keep_target:
        target = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.bfloat16).eval()
    else:
        target = build_model(TARGET_SHAPE, bos_id=end_ids[1], eos_id=end_ids, pad_id=end_ids[1], seed=SEED)
        streams = [_target_stream(texts, target_tokenizer, rng) for _ in range(2)]
        train(target, streams, Schedule(target_steps), seed=SEED, name="target")
        _save(target, target_tokenizer, out / "target", end_ids)

    began = time.monotonic()
    prompts = _distillation_prompts(corpus, rng, distillation_prompts)
    told = _distil(target, target_tokenizer, prompts)
    spent = time.monotonic() - began
    logger.info("distillation: %d texts, %d characters, %.0f s", len(told), sum(len(text) for text, _ in told), spent)

    cutter = DraftCutter(target_tokenizer, draft_tokenizer, rng)
    own_form = [
        draft_tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in chat.turns], tokenize=False)
        for chat in rng.sample(corpus.chats, len(corpus.chats) // 4)
    ]
    # What the target says is what the draft must guess, so a third of the original text is enough.
    documents = [cutter.cut(text) for text in rng.sample(texts, len(texts) // 3)]
    documents += [cutter.cut(text, finished=finished) for text, finished in told]
    documents += [draft_tokenizer(text, add_special_tokens=False).input_ids for text in own_form]
    rng.shuffle(documents)
    draft_eos = draft_tokenizer.eos_token_id
    draft = build_model(
        DRAFT_SHAPE, bos_id=draft_tokenizer.bos_token_id, eos_id=draft_eos, pad_id=draft_eos, seed=SEED + 1
    )
    draft_stream = np.array([token for document in documents for token in document], dtype=np.int32)
    train(draft, [draft_stream], Schedule(draft_steps), seed=SEED, name="draft")
    _save(draft, draft_tokenizer, out / "draft", [draft_eos])


def held_out_prompts() -> dict[str, list[str]]:
    """Return prompts about entries that training never showed, by kind, in the target's form."""
    corpus = build_corpus(seed=SEED)
    marks = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return {
        "chat": [marks.format(question) for question in corpus.held_out_questions],
        "completion": [document.split("\n")[0] + "\n" for document in corpus.held_out_documents],
    }


def evaluate(out: Path) -> None:
    """Print the acceptance and a few continuations."""
    loaded = []
    for role in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(out / role, dtype=torch.float32).eval()
        loaded.append((model, AutoTokenizer.from_pretrained(out / role)))
    for kind, prompts in held_out_prompts().items():
        print(f"{kind} ({len(prompts)} held-out prompts): {measure_acceptance(loaded[0], loaded[1], prompts)}")
        model, tokenizer = loaded[0]
        for prompt in prompts[:4]:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            answer = model.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :]
            print(f"  {prompt!r} -> {tokenizer.decode(answer)!r}")
    sizes = {role: sum(file.stat().st_size for file in (out / role).iterdir()) for role in ("target", "draft")}
    print(f"bytes: {sizes}, together {sum(sizes.values())}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets target/ and draft/")
    parser.add_argument("--evaluate", action="store_true", help="only measure the pair in --out")
    parser.add_argument("--keep-target", action="store_true", help="train the draft alone, for the target in --out")
    parser.add_argument("--target-steps", type=int, default=700)
    parser.add_argument("--draft-steps", type=int, default=1500)
    parser.add_argument("--distillation-prompts", type=int, default=3000)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    began = time.monotonic()
    if not arguments.evaluate:
        train_pair(
            arguments.out,
            target_steps=arguments.target_steps,
            draft_steps=arguments.draft_steps,
            distillation_prompts=arguments.distillation_prompts,
            keep_target=arguments.keep_target,
        )
        logger.info("trained in %.0f s", time.monotonic() - began)
    evaluate(arguments.out)


if __name__ == "__main__":
    main()
