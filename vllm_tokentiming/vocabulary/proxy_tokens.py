"""What does the draft propose, in the target's vocabulary? Drafted ids → bytes → target ids; no state of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vllm_tokentiming.errors import UnencodableTextError
from vllm_tokentiming.vocabulary.special_tokens import SpecialTokenMap
from vllm_tokentiming.vocabulary.utf8 import valid_prefix
from vllm_tokentiming.vocabulary.vocabulary import Vocabulary

_KEPT_PIECES: Final = 1 << 17


class ProxyTokenizer:
    """Re-tokenises drafted text for the target (TokenTiming, section 3: proxy tokens).

    Every id that comes out is a real token below the target's model vocabulary size, and their bytes are the drafted
    bytes: nothing is normalised, replaced, or proposed of an unfinished or invalid character.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary, special_map: SpecialTokenMap) -> None:
        self._encoder = target.encoder
        self._draft_bytes = draft.token_bytes
        self._draft_to_target = special_map.draft_to_target
        self._draft_ends = draft.end_ids
        self._plain_ids: dict[bytes, tuple[int, ...] | None] = {}

    def proxy(self, ids_in_draft_vocab: Sequence[int]) -> list[int]:
        """Target ids of a draft: all of its text encoded at once.

        Stops before an unfinished or invalid character, before text that the target cannot write, before a special
        token without counterpart, and after the draft's end, which becomes the target's.
        """
        table = self._draft_bytes
        size = len(table)
        proxy_ids: list[int] = []
        run: list[bytes] = []
        for token in ids_in_draft_vocab:
            token_bytes = table[token] if 0 <= token < size else None
            if token_bytes is not None:
                run.append(token_bytes)
                continue
            complete = self._extend(proxy_ids, b"".join(run))
            run.clear()
            counterpart = self._draft_to_target.get(token)
            if not complete or counterpart is None:
                return proxy_ids
            proxy_ids.append(counterpart)
            if token in self._draft_ends:
                return proxy_ids
        self._extend(proxy_ids, b"".join(run))
        return proxy_ids

    def encode_chunk(self, run: tuple[int, ...], last: int) -> tuple[int, ...]:
        """Target ids of one chunk: the tokens ``run`` followed by ``last``, all in the draft's vocabulary.

        Returns:
            The ids of exactly the chunk's text, with the counterpart of ``last`` behind it where that is a special
            token; or () where there are no such ids: the text is not whole characters, the target cannot write it,
            ``run`` has a special token, or ``last`` is one without counterpart.
        """
        table = self._draft_bytes
        size = len(table)
        spelled: list[bytes] = []
        for token in run:
            token_bytes = table[token] if 0 <= token < size else None
            if token_bytes is None:
                return ()
            spelled.append(token_bytes)
        ending: tuple[int, ...] = ()
        last_bytes = table[last] if 0 <= last < size else None
        if last_bytes is not None:
            spelled.append(last_bytes)
        elif last in self._draft_to_target:
            ending = (self._draft_to_target[last],)
        else:
            return ()
        data = b"".join(spelled)
        if valid_prefix(data) < len(data):
            return ()
        try:
            return (*self._encoder.encode(data), *ending)
        except UnencodableTextError:
            return ()

    def encode_chunks(self, run: tuple[int, ...], lasts: Sequence[int]) -> list[tuple[int, ...]]:
        """:meth:`encode_chunk` of one run with each of several last tokens.

        Where text can be cut between the two (see ``seams.py``), as before most tokens that begin with a space, the
        run is encoded once and the last token is known. Else it is cut at the last place within the run, and what is
        left before the last token has mostly been seen before it already.
        """
        encode_chunk = self.encode_chunk
        table = self._draft_bytes
        size = len(table)
        if not run or not all(0 <= token < size and table[token] for token in run):
            return [encode_chunk(run, last) for last in lasts]
        spelled = b"".join([table[token] or b"" for token in run])
        seams, plain = self._encoder.seams, self._plain
        cut = max(seams.last_coarse(spelled), seams.last_fine(spelled))
        head, whole, rest = plain(spelled[:cut]), plain(spelled), spelled[cut:]
        cut_before = seams.after(spelled[-1]) if whole is not None else ()
        chunks = []
        for last in lasts:
            data = table[last] if 0 <= last < size else None
            # Only what needs no mending: mending looks at more than one side of a cut.
            left, right = None, None
            if data:
                left, right = (whole, plain(data)) if data[0] in cut_before else (head, plain(rest + data))
            chunks.append(encode_chunk(run, last) if left is None or right is None else left + right)
        return chunks

    def _plain(self, data: bytes) -> tuple[int, ...] | None:
        """The target tokenizer's own ids, None where they do not spell ``data``."""
        try:
            return self._plain_ids[data]
        except KeyError:
            if len(self._plain_ids) >= _KEPT_PIECES:
                self._plain_ids.clear()
            plain = self._plain_ids[data] = self._encoder.plain(data)
            return plain

    def _extend(self, proxy_ids: list[int], data: bytes) -> bool:
        """Append the ids of ``data`` as far as it can be proposed; whether that is all of it."""
        whole = valid_prefix(data)
        ids, covered = self._encoder.encode_prefix(data[:whole])
        proxy_ids += ids
        return covered == len(data)
