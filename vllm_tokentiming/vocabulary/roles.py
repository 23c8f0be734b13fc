"""Which special tokens end an answer, a turn or a text, and which only begin one? Known literals; no state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

END_OF_TURN: Final = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|return|>",
    "<|end|>",
    "<|user_end|>",
    "<|eom_id|>",
    "<|call|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|assistant_end|>",
)
"""Literals that end a turn of a chat, the commonest first."""

END_OF_TEXT: Final = (
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "<|eos|>",
    "<|END_OF_TEXT|>",
)
"""Literals that end a document."""

BEGINNINGS: Final = frozenset(
    {
        "<s>",
        "<bos>",
        "<|begin_of_text|>",
        "<|startoftext|>",
        "<｜begin▁of▁sentence｜>",
        "<BOS_TOKEN>",
        "<|bos|>",
        "<SOS>",
    }
)
"""Literals that only say that a text begins: nothing to show to a draft in whose vocabulary they do not exist."""


def end_literal_ids(literals: dict[int, str], special_ids: frozenset[int]) -> Iterable[int]:
    """The special tokens whose literals are known ends."""
    known = {*END_OF_TURN, *END_OF_TEXT}
    return (token for token in special_ids if literals.get(token) in known)
