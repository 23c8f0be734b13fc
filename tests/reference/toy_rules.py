"""Toy pairs of vocabularies, and the product's transfers as rules for the enumeration."""

from __future__ import annotations

import zlib

import numpy as np
from reference.chunk_rule import always_linked, chunk_rule
from reference.enumeration import Drafted, ProposalRows, World

from vllm_tokentiming.transfer.chunks import ChunkTable, every_link
from vllm_tokentiming.transfer.exact import ChunkTransfer, ExactRows
from vllm_tokentiming.transfer.extendable import Extendable
from vllm_tokentiming.transfer.interface import Draft

LETTERS = (b"a", b"b")
# é, è, a and the bytes that the first two are made of: byte-level tokens may split them.
CHARACTERS = (b"a", b"\xc3", b"\xa9", b"\xa8")


def vocabulary(alphabet, rng, size, longest):
    """The alphabet, then random longer tokens."""
    tokens = list(alphabet)
    while len(tokens) < size:
        token = b"".join(rng.choice(np.array(alphabet, dtype=object), rng.integers(2, longest + 1)))
        if token not in tokens:
            tokens.append(token)
    return tuple(tokens)


def world(seed, *, alphabet=LETTERS, ends=True, top_k=99, size=4):
    rng = np.random.default_rng(seed)
    draft, target = vocabulary(alphabet, rng, size, 2), vocabulary(alphabet, rng, size + 2, 3)
    if not ends:
        return World(draft, target, seed, top_k=top_k)
    # The draft has one more special that the target lacks.
    return World((*draft, b"", b""), (*target, b""), seed, draft_end=len(draft), target_end=len(target), top_k=top_k)


def rows_of(exact: ExactRows) -> ProposalRows:
    o = exact.offsets
    return [
        (token, dict(zip(exact.ids_in_target_vocab[a:b].tolist(), exact.probs[a:b].tolist(), strict=True)))
        for token, a, b in zip(exact.tokens_in_target_vocab.tolist(), o[:-1], o[1:], strict=True)
    ]


def flags_by(linked, chunks, encodings):
    """A certifier's answer where ``linked(run, last, position)`` tells of each proxy token."""
    return [linked(c[:-1], c[-1], j) for c, e in zip(chunks, encodings, strict=True) for j in range(len(e))]


def product_rule(world, *, extendable=(), longest_run=3, max_tokens=99, encode=None, linked=None, planned=None):
    encode = encode or world.encode

    def certify(chunks, encodings):
        if linked is None:
            return every_link(chunks, encodings)
        return flags_by(linked, chunks, encodings)

    transfer = ChunkTransfer(
        ChunkTable(
            draft_vocab_size=len(world.draft),
            target_vocab_size=len(world.target),
            encode=lambda run, lasts: [encode(run, d) for d in lasts],
            certify=certify,
        ),
        end_ids_in_draft_vocab=[world.draft_end] if world.draft_end >= 0 else [],
        longest_run=longest_run,
    )
    mask = np.isin(np.arange(len(world.draft)), list(extendable))
    snapshot = Extendable.build(mask, world.draft)

    def rule(drafted: Drafted) -> ProposalRows:
        return rows_of(
            transfer.exact_rows(
                Draft(
                    drafted.ids,
                    drafted.law_ids,
                    drafted.law_probs,
                    planned_steps=planned(drafted) if planned else drafted.planned_steps,
                    max_tokens=max_tokens,
                ),
                snapshot,
            )
        )

    return rule


def reference_rule(world, *, extendable=(), linked=always_linked, check_every_candidate=True):
    def rule(drafted: Drafted) -> ProposalRows:
        return chunk_rule(
            drafted.ids,
            drafted.laws(),
            token_bytes=world.draft,
            extendable=extendable,
            encode=world.encode,
            linked=linked,
            end_ids=[world.draft_end],
            longest_run=3,
            planned_steps=drafted.planned_steps,
            max_tokens=99,
            check_every_candidate=check_every_candidate,
        )

    return rule


def appending(world, rule, *, withdraws=False):
    """A rule whose proposals go on with tokens that depend on those before them, up to two; one in three goes on.

    Args:
        world: the vocabularies.
        rule: proposes.
        withdraws: wrongly takes the last proposed token back where nothing follows it.
    """

    def longer(drafted: Drafted) -> ProposalRows:
        proposal = rule(drafted)
        proposed = tuple(token for token, _ in proposal)
        if not proposed:
            return proposal
        # Whether it pays may depend on the laws: all of them are known by then.
        most = min(noise("append", proposed) % 3, 1 + int(float(np.max(drafted.law_probs[-1])) > 0.5))
        if withdraws and most == 0:
            return proposal[:-1]
        for _ in range(most):
            token = noise("follows", tuple(token for token, _ in proposal)) % len(world.target)
            proposal = [*proposal, (token, {token: 1.0})]
        return proposal

    return longer


def noise(*key) -> int:
    return zlib.crc32(repr(key).encode())


def faulty_link(run, last, position):
    """An aligner that errs: for some candidates it does not link the proxy token to the chunk's last draft token."""
    return noise("link", run, last, position) % 3 != 0


def faulty_encoder(world):
    """A tokenizer that errs: it drops chunks, loses tokens, changes them, or adds some."""

    def encode(run, last):
        right = world.encode(run, last)
        fault = noise("encode", run, last) % 6
        wrong = noise("token", run, last) % len(world.target)
        return {0: (), 1: right[:-1], 2: (*right[:-1], wrong), 3: (*right, wrong)}.get(fault, right)

    return encode


def sets(world):
    """Several E: none, each single token, random halves, all."""
    rng = np.random.default_rng(world.seed)
    n = len(world.draft)
    return [(), (0,), (1,), *[tuple(np.flatnonzero(rng.random(n) < 0.5).tolist()) for _ in range(2)], tuple(range(n))]
