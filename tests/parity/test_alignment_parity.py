"""The compiled alignment equals the textbook one on random input, with the compiler and without it."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher
from reference import alignment as reference
from uncompiled import run_uncompiled

from vllm_tokentiming.alignment import Aligner
from vllm_tokentiming.alignment.kernel import align_batch
from vllm_tokentiming.alignment.levenshtein import (
    MAX_PATTERN_LENGTH,
    levenshtein,
    levenshtein_from_pattern,
    mark_pattern,
    unmark_pattern,
)

UNCOMPILED = bool(numba.config.DISABLE_JIT)
EXAMPLES = 30 if UNCOMPILED else 200

# Few distinct bytes make near misses and ties common; lengths go past what one word of bits holds.
token_bytes = st.one_of(
    st.binary(max_size=8),
    st.lists(st.sampled_from(b"ab \xff"), max_size=10).map(bytes),
    st.integers(0, 140).flatmap(lambda n: st.lists(st.sampled_from(b"ab"), min_size=n, max_size=n)).map(bytes),
)
texts = st.lists(token_bytes, max_size=9)


def table(tokens: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *(len(token) for token in tokens)]).astype(np.int32)
    return np.frombuffer(b"".join(tokens), dtype=np.uint8), offsets


def flat(batch: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *(len(ids) for ids in batch)]).astype(np.int32)
    return np.array([token for ids in batch for token in ids], dtype=np.int32), offsets


def numbered(batch: list[list[bytes]]) -> tuple[list[bytes], list[list[int]]]:
    """A vocabulary that holds the batch's tokens, and the batch as ids."""
    vocabulary = sorted({token for tokens in batch for token in tokens})
    return vocabulary, [[vocabulary.index(token) for token in tokens] for tokens in batch]


@settings(max_examples=EXAMPLES, deadline=None)
@given(batch=st.lists(st.tuples(texts, texts), max_size=4), window_radius=st.integers(0, 9))
def test_batch_equals_the_textbook(batch, window_radius):
    draft_vocabulary, draft = numbered([tokens for tokens, _ in batch])
    target_vocabulary, proxy = numbered([tokens for _, tokens in batch])
    aligner = Aligner(*table(draft_vocabulary), *table(target_vocabulary), window_radius=window_radius)
    found = aligner.align(*flat(draft), *flat(proxy))
    last = []
    for request, (draft_tokens, proxy_tokens) in enumerate(batch):
        path, cost = reference.align(draft_tokens, proxy_tokens, window_radius)
        begin, end = found.path_offsets[request : request + 2]
        assert found.path[begin:end].tolist() == [list(cell) for cell in path]
        assert found.cost[request] == cost
        last += reference.last_draft_index(path, len(proxy_tokens))
    assert found.last_draft_index.tolist() == last
    assert found.path_offsets[-1] == len(found.path)


@settings(max_examples=EXAMPLES, deadline=None)
@given(left=token_bytes, right=token_bytes)
def test_both_levenshtein_kernels_equal_the_textbook(left, right):
    distance = reference.levenshtein(left, right)
    one = np.frombuffer(b"x" + left + b"y", dtype=np.uint8).copy()
    other = np.frombuffer(b"zz" + right + b"z", dtype=np.uint8).copy()
    scratch = np.full(len(right) + 1, 77, dtype=np.int32)
    assert levenshtein(one, 1, 1 + len(left), other, 2, 2 + len(right), scratch) == distance
    if len(left) <= MAX_PATTERN_LENGTH:
        positions = np.zeros(256, dtype=np.int64)
        mark_pattern(one, 1, 1 + len(left), positions)
        assert levenshtein_from_pattern(positions, len(left), other, 2, 2 + len(right)) == distance
        unmark_pattern(one, 1, 1 + len(left), positions)
        assert not positions.any()


def test_the_kernel_under_test_is_what_the_environment_asked_for():
    assert isinstance(align_batch, Dispatcher) != UNCOMPILED


@pytest.mark.skipif(UNCOMPILED, reason="this is the run without the compiler")
def test_the_same_holds_without_the_compiler():
    assert "3 passed, 1 skipped" in run_uncompiled(__file__)
