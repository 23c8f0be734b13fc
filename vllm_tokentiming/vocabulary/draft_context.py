"""What has the draft read so far? One object per request owns its context in the draft's vocabulary.

Committed target tokens become bytes; only the last *piece* of them, which further text can still change, is encoded
again (see ``seams.py``). So the ids equal the encoding of the whole text, at a cost that does not grow with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vllm_tokentiming.vocabulary.special_tokens import SpecialTokenMap
from vllm_tokentiming.vocabulary.utf8 import incomplete_suffix
from vllm_tokentiming.vocabulary.vocabulary import Vocabulary

_LOOK_FOR_FINE_SEAMS: Final = 64
_CUT_ANYWAY: Final = 256
_KEEP: Final = 96
_CUT_UNVERIFIED: Final = 2048


class DraftContext:
    """A request's context, kept canonical as target tokens are committed.

    The draft's BOS stands once, at the start, if its tokenizer puts one there; then the text behind the tokenizer's
    dummy prefix space, if it has one, as the draft was trained on. Paired special tokens are single draft tokens and
    divide the text; others are part of it by their literals. Bytes that the draft cannot write are left out, as its own
    tokenizer does.

    Attributes:
        ids: the context in the draft's vocabulary. Changed in place by :meth:`commit`; not to be changed by others.
        num_target_tokens: committed so far.
        num_stable: so many leading ids were the same before the last commit.
    """

    __slots__ = (
        "_draft",
        "_encoder",
        "_held",
        "_open",
        "_open_at",
        "_specials",
        "_started",
        "_target_bytes",
        "ids",
        "num_stable",
        "num_target_tokens",
    )

    def __init__(self, target: Vocabulary, draft: Vocabulary, special_map: SpecialTokenMap) -> None:
        self._target_bytes = target.token_bytes
        self._draft = draft
        self._encoder = draft.encoder
        self._specials = special_map
        self.ids: list[int] = [] if draft.bos_id is None else [draft.bos_id]
        self.num_target_tokens = 0
        self.num_stable = 0
        self._held = b""
        self._open = b""
        self._open_at = len(self.ids)
        self._started = False

    @property
    def ends_inside_character(self) -> bool:
        """Whether bytes of an unfinished character are held back; nothing can be proposed after half a character."""
        return bool(self._held)

    def commit(self, target_ids: Sequence[int]) -> None:
        """Append target tokens, of which unused and negative ids stand for nothing.

        Args:
            target_ids: the newly committed tokens, in the target's vocabulary.
        """
        self.num_stable = len(self.ids)
        self.num_target_tokens += len(target_ids)
        table = self._target_bytes
        size = len(table)
        run: list[bytes] = []
        for token in target_ids:
            token_bytes = table[token] if 0 <= token < size else None
            if token_bytes is not None:
                run.append(token_bytes)
                continue
            draft_id = self._specials.target_to_draft.get(token)
            if draft_id is None:
                run.append(self._specials.literal(token))
            else:
                self._append(b"".join(run), end=True)
                run.clear()
                self._divide(draft_id)
        if run:
            self._append(b"".join(run), end=False)

    def _append(self, new: bytes, *, end: bool) -> None:
        """Append text; ``end`` says that none can follow, so nothing is held back."""
        if self._held:
            new = self._held + new
            self._held = b""
        if not end:
            held = incomplete_suffix(new)
            if held:
                self._held, new = new[-held:], new[:-held]
        if not new:
            return
        if not self._started:
            self._started = True
            new = self._draft.first_text(new)
        ids, at = self.ids, self._open_at
        text = self._open + new
        encoding = self._encoder.encode_open(text)
        fresh = encoding.ids
        same, shorter = 0, min(len(ids) - at, len(fresh))
        while same < shorter and ids[at + same] == fresh[same]:
            same += 1
        self.num_stable = min(self.num_stable, at + same)
        ids[at + same :] = fresh[same:]
        self._open_at = len(ids) - encoding.open_ids
        self._open = text[encoding.open_start :]
        if len(self._open) > _LOOK_FOR_FINE_SEAMS:
            self._shorten()

    def _divide(self, draft_id: int) -> None:
        self._started = True
        self.ids.append(draft_id)
        self._open = b""
        self._open_at = len(self.ids)

    def _shorten(self) -> None:
        """Move the start of the open piece to a fine seam, or, in long text without any, to some token."""
        start = self._encoder.seams.last_fine(self._open)
        if start and self._reopen(start):
            return
        if len(self._open) <= _CUT_ANYWAY:
            return
        # No seam for long (a run of letters, say): any token serves from which on encoding gives the same ids again.
        kept, index, tries = 0, len(self.ids), 0
        table = self._draft.token_bytes
        while index > self._open_at and tries < 4:
            index -= 1
            kept += len(table[self.ids[index]] or b"")
            if kept >= _KEEP and kept < len(self._open):
                start = len(self._open) - kept
                if not 0x80 <= self._open[start] < 0xC0:
                    tries += 1
                    if self._reopen(start):
                        return
        if len(self._open) > _CUT_UNVERIFIED:
            self._open, self._open_at = self._open[-kept:], index

    def _reopen(self, start: int) -> bool:
        """Let the open piece begin at byte ``start`` of itself, if its ids there are those of that text alone."""
        rest = self._open[start:]
        encoding = self._encoder.encode_open(rest)
        count = len(encoding.ids)
        if count > len(self.ids) - self._open_at or self.ids[len(self.ids) - count :] != encoding.ids:
            return False
        self._open, self._open_at = rest, len(self.ids) - count
        return True
