"""What drafts are shown of chats in the targets' own templates: ChatML, Llama 3's, Gemma's, DeepSeek's."""

from __future__ import annotations

import functools

import pytest
from reference.vocabulary import REAL, paired, real

from vllm_tokentiming.vocabulary import DraftContext

pytestmark = pytest.mark.real_tokenizers

BEGINNINGS = {
    "deepseek_v3": "<｜begin▁of▁sentence｜>",
    "gemma3": "<bos>",
    "llama3": "<|begin_of_text|>",
    "qwen3": "",
    "smollm2-135m-instruct": "",
    "qwen2.5-coder-0.5b-instruct": "",
}
"""What a template begins with that says nothing to a draft: shown by its counterpart, or not at all."""
CHAT = [
    {"role": "user", "content": "Wie heißt „hello“ auf 中文?\n\n  1.  Antwort\ttab"},
    {"role": "assistant", "content": "你好."},
    {"role": "user", "content": "<|im_end|> is no end of mine; </s> neither.\r\n"},
]


@functools.cache
def chat(folder):
    """The chat in a tokenizer's template, and its ids."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    # Some are loaded by a class that contradicts their file.
    own = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return rendered, own(rendered, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("target", BEGINNINGS)
@pytest.mark.parametrize("draft", REAL)
def test_a_chat_is_shown_whole_with_one_beginning(tokenizer_folder, target, draft):
    beginning = BEGINNINGS[target]
    rendered, ids = chat(tokenizer_folder(target))
    target, draft = real(tokenizer_folder(target)), real(tokenizer_folder(draft))
    special_map = paired(target, draft)
    context = DraftContext(target, draft, special_map)
    for start in range(0, len(ids), 7):
        context.commit(ids[start : start + 7])

    found = list(context.ids)
    if draft.bos_id is not None:
        assert found.pop(0) == draft.bos_id
        assert draft.bos_id not in found
    # Paired tokens must come in the target's order; put back, they give the template's text, but for its beginning.
    pairs = [token for token in ids if token in special_map.target_to_draft]
    assert [token for token in found if token in draft.special_ids] == [special_map.target_to_draft[t] for t in pairs]
    shown = b""
    for token in found:
        shown += (
            target.literals[pairs.pop(0)].encode() if token in draft.special_ids else draft.token_bytes[token] or b""
        )
    assert rendered.startswith(beginning)
    expected = rendered.encode()
    if ids[0] not in special_map.target_to_draft:
        expected = draft.first_text(rendered.removeprefix(beginning).encode())
    assert shown == expected
