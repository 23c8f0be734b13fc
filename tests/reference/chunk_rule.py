"""The chunk rule as docs/losslessness.md words it: slow, plain, on dicts.

``check_every_candidate=False`` is the tempting mistake: links are asked for the drawn token alone, and a row takes in
candidates for which they were answered otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Law = dict[int, float]
Row = dict[int, float]
Encode = Callable[[tuple[int, ...], int], tuple[int, ...]]
Linked = Callable[[tuple[int, ...], int, int], bool]


def lacking_bytes(data: bytes) -> int:
    """Continuation bytes that the end of a text still lacks, reading it from its start and skipping what is invalid."""
    lacking = 0
    for byte in data:
        if 0x80 <= byte < 0xC0:
            lacking = max(lacking - 1, 0)
        elif byte < 0x80 or byte >= 0xF8:
            lacking = 0
        else:
            lacking = 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
    return lacking


def always_linked(_run, _last, _position):
    return True


def chunk_rule(  # noqa: C901 - the rule in one piece
    drafted: Sequence[int],
    laws: Sequence[Law],
    *,
    token_bytes: Sequence[bytes],
    extendable: Collection[int],
    encode: Encode,
    linked: Linked = always_linked,
    end_ids: Collection[int] = (),
    longest_run: int,
    planned_steps: int,
    max_tokens: int,
    check_every_candidate: bool = True,
) -> list[tuple[int, Row]]:
    def lacking(run, last):
        """A special token, which has no bytes, ends any character."""
        return lacking_bytes(b"".join(token_bytes[i] for i in (*run, last))) if token_bytes[last] else 0

    def extends(run, last, position):
        """Known from the token and what went before it."""
        if position + 1 >= planned_steps:
            return False
        return lacking(run, last) > 0 or (len(run) < longest_run and last in extendable)

    proposal: list[tuple[int, Row]] = []
    start = 0
    while start < len(drafted):
        end = start
        while end + 1 < len(drafted) and extends(tuple(drafted[start:end]), drafted[end], end):
            end += 1
        run, last = tuple(drafted[start:end]), drafted[end]
        if extends(run, last, end):  # the draft stopped before its plan
            alive = {last: 1.0}
        else:
            alive = {d: p for d, p in laws[end].items() if (p > 0 or d == last) and not extends(run, d, end)}
        encodings = {d: encode(run, d) for d in alive}
        if not encodings[last]:
            return proposal
        for position, token in enumerate(encodings[last]):
            link = linked(run, last, position)
            alive = {
                d: p
                for d, p in alive.items()
                if len(encodings[d]) > position and (not check_every_candidate or linked(run, d, position) == link)
            }
            row: Row = {}
            if link and sum(alive.values()) > 0:
                total = sum(alive.values())
                for d, p in alive.items():
                    row[encodings[d][position]] = row.get(encodings[d][position], 0.0) + p / total
            else:
                row[token] = 1.0
            proposal.append((token, row))
            if len(proposal) == max_tokens:
                return proposal
            alive = {d: p for d, p in alive.items() if encodings[d][position] == token}
        if last in end_ids or lacking(run, last) > 0:
            return proposal
        start = end + 1
    return proposal
