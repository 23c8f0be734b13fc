"""Which special tokens of two vocabularies mean the same? Built once per pair of models; immutable."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from vllm_tokentiming.errors import ConfigError
from vllm_tokentiming.vocabulary.roles import BEGINNINGS, END_OF_TEXT, END_OF_TURN
from vllm_tokentiming.vocabulary.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokenMap:
    """Special tokens with a counterpart, both ways, and the text of those without.

    Attributes:
        target_to_draft: target id → draft id.
        draft_to_target: draft id → target id; has every draft token that ends an answer, if the target has an end.
        shown: what the draft is shown for a target special token without a counterpart: its literal text, once.
    """

    target_to_draft: dict[int, int]
    draft_to_target: dict[int, int]
    shown: dict[int, bytes]

    @classmethod
    def build(cls, target: Vocabulary, draft: Vocabulary, pairs: Sequence[tuple[str, str]]) -> Self:
        """Pair special tokens by equal literal, further ends by their role, and as configured, which overrides both.

        Args:
            target: vocabulary of the target.
            draft: vocabulary of the draft.
            pairs: (target literal, draft literal).

        Raises:
            ConfigError: a configured literal is not an added token of its vocabulary.
        """
        target_ids, draft_ids = _ids_by_literal(target), _ids_by_literal(draft)
        target_to_draft = _equal_literals(target, draft)
        draft_to_target = {draft_id: target_id for target_id, draft_id in target_to_draft.items()}
        for end in _ends(draft):
            counterpart = _end_counterpart(draft, end, target)
            if counterpart is not None:
                draft_to_target.setdefault(end, counterpart)
        for end in _ends(target):
            counterpart = _end_counterpart(target, end, draft)
            if counterpart is not None:
                target_to_draft.setdefault(end, counterpart)
        beginnings = {
            token for token in target.special_ids if target.literals.get(token) in BEGINNINGS
        } - target.end_ids
        if target.bos_id is not None and target.bos_id not in target.end_ids:
            beginnings.add(target.bos_id)
        begin = draft.bos_id
        if begin is not None and begin not in draft.end_ids:
            # The draft's context begins with this already; a second is neither shown to it nor proposed.
            target_to_draft = {t: d for t, d in target_to_draft.items() if d != begin and t not in beginnings}
            draft_to_target.pop(begin, None)
        for target_literal, draft_literal in pairs:
            target_id = _configured(target_ids, target_literal, target.name)
            draft_id = _configured(draft_ids, draft_literal, draft.name)
            if draft_id != begin or begin in draft.end_ids:
                target_to_draft[target_id] = draft_id
                draft_to_target[draft_id] = target_id
        shown = {
            token: b"" if token in beginnings else target.literals.get(token, "").encode(errors="replace")
            for token in target.special_ids
            if token not in target_to_draft
        }
        return cls(target_to_draft=target_to_draft, draft_to_target=draft_to_target, shown=shown)

    def literal(self, target_id: int) -> bytes:
        """What the draft is shown for a target token without bytes and without counterpart; empty for unused ids."""
        return self.shown.get(target_id, b"")


def _ids_by_literal(vocabulary: Vocabulary) -> dict[str, int]:
    return {literal: token for token, literal in vocabulary.literals.items() if token < vocabulary.model_vocab_size}


def _equal_literals(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Special on both sides only: ``</s>`` ends a text of Llama 2, but for Gemma it is a tag of HTML."""
    draft_ids = {literal: token for literal, token in _ids_by_literal(draft).items() if token in draft.special_ids}
    return {
        token: draft_ids[literal]
        for literal, token in _ids_by_literal(target).items()
        if token in target.special_ids and literal in draft_ids
    }


def _ends(vocabulary: Vocabulary) -> list[int]:
    ends = vocabulary.end_ids & vocabulary.special_ids
    return sorted(token for token in ends if token < vocabulary.model_vocab_size)


def _end_counterpart(vocabulary: Vocabulary, end: int, other: Vocabulary) -> int | None:
    """The other vocabulary's end of the same role, or any; its tokenizer's own end first.

    A vocabulary with a single end says with it whatever ends, and the other's own end is what its model says then.
    """
    ends = _ends(other)
    if not ends:
        return None
    if other.eos_id in ends and _ends(vocabulary) == [end]:
        return other.eos_id
    literal = vocabulary.literals.get(end, "")
    for role in (END_OF_TURN, END_OF_TEXT):
        if literal in role:
            same_role = [token for token in ends if other.literals.get(token) in role]
            if other.eos_id in same_role:
                return other.eos_id
            if same_role:
                return min(same_role, key=lambda token: (role.index(other.literals[token]), token))
    return other.eos_id if other.eos_id in ends else min(ends)


def _configured(ids: dict[str, int], literal: str, name: str) -> int:
    if literal in ids:
        return ids[literal]
    near = difflib.get_close_matches(literal, ids, n=3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ConfigError(
        f"special_token_pairs names {literal!r}, which is not an added token of {name}.{hint} Write the literal as it "
        f"stands in added_tokens of its tokenizer.json, or leave the pair out."
    )
