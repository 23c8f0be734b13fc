"""Aligns drafted tokens with proxy tokens for a batch of requests; owns the byte tables and the kernel's workspace."""

from __future__ import annotations

from typing import Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.alignment import spelling
from vllm_tokentiming.alignment.kernel import BAD_INPUT, ByteArray, Int32Array, Int64Array, align_batch, warm_up
from vllm_tokentiming.alignment.spelling import certify_links
from vllm_tokentiming.errors import ConfigError, VocabularyError

_FIRST_CELLS: Final = 128 * 128
"""Cells of a fresh workspace: vLLM verifies at most 128 proposed tokens a request, so serving hardly ever grows it."""

BoolArray = npt.NDArray[np.bool_]

_INT32: Final = np.dtype(np.int32)
_INT64: Final = np.dtype(np.int64)


class Alignment(NamedTuple):
    """How each request's drafted tokens and proxy tokens lie on each other.

    A named tuple rather than a frozen dataclass: making one costs half, and one is made in every cycle.

    Attributes:
        path: int32 [P, 2], pairs (draft index, proxy index) local to the request, from (0, 0) to (k - 1, m - 1); each
            step moves on by one in the draft, in the proxy, or in both. Empty where a request has no draft or no proxy
            tokens.
        path_offsets: int32 [B + 1]; request b owns ``path[path_offsets[b]:path_offsets[b + 1]]``.
        last_draft_index: int32 [M], per proxy token the local index of the last draft token aligned with it; -1 where
            the request has no draft tokens.
        cost: int64 [B], the sum of the Levenshtein distances along each path.
    """

    path: Int32Array
    path_offsets: Int32Array
    last_draft_index: Int32Array
    cost: Int64Array


class Aligner:
    """Dynamic Token Warping between two vocabularies (TokenTiming, arXiv 2510.15545, section 3.2).

    Args:
        draft_flat_bytes: uint8 [total], the bytes of all draft tokens, one after the other.
        draft_byte_offsets: int32 [V + 1]; token t is
            ``draft_flat_bytes[draft_byte_offsets[t]:draft_byte_offsets[t + 1]]``.
        target_flat_bytes: uint8 [total], the same for the target.
        target_byte_offsets: int32 [V + 1].
        window_radius: Sakoe-Chiba radius in cells, ≥ 0; :func:`~vllm_tokentiming.alignment.band.band_of_row` says
            which cells that is.

    Raises:
        VocabularyError: a table whose offsets do not fit its bytes.
        ConfigError: a negative radius.
    """

    def __init__(
        self,
        draft_flat_bytes: ByteArray,
        draft_byte_offsets: Int32Array,
        target_flat_bytes: ByteArray,
        target_byte_offsets: Int32Array,
        *,
        window_radius: int,
    ) -> None:
        if window_radius < 0:
            raise ConfigError(f"window_radius is {window_radius}; it must be at least 0. The paper's choice is 8.")
        draft_bytes, draft_starts = _checked_table(draft_flat_bytes, draft_byte_offsets, vocabulary="draft")
        target_bytes, target_starts = _checked_table(target_flat_bytes, target_byte_offsets, vocabulary="target")
        self._tables = (draft_bytes, draft_starts, target_bytes, target_starts, int(window_radius))
        self._cells = np.empty(_FIRST_CELLS, dtype=np.int64)
        self._positions_of_byte = np.zeros(256, dtype=np.int64)
        longest_target_token = int(np.diff(target_starts).max(initial=0))
        self._scratch = np.empty(longest_target_token + 1, dtype=np.int32)
        warm_up()
        spelling.warm_up()

    def align(
        self, draft_ids: Int32Array, draft_offsets: Int32Array, proxy_ids: Int32Array, proxy_offsets: Int32Array
    ) -> Alignment:
        """Align every request's drafted tokens with its proxy tokens.

        Args:
            draft_ids: int32 [N], the drafted tokens of all requests, in the draft's vocabulary.
            draft_offsets: int32 [B + 1]; request b drafted ``draft_ids[draft_offsets[b]:draft_offsets[b + 1]]``.
            proxy_ids: int32 [M], the proxy tokens, in the target's vocabulary.
            proxy_offsets: int32 [B + 1].

        Raises:
            VocabularyError: an id outside its vocabulary.
            ValueError: offsets that do not cut the ids into B requests.
            TypeError: an argument that is not a one-dimensional int32 array.
        """
        num_proxy = len(proxy_ids)
        batch = len(draft_offsets) - 1
        if batch < 0:
            raise ValueError("draft_offsets is empty; it must hold B + 1 offsets, [0] for no request.")
        path = np.empty((len(draft_ids) + num_proxy, 2), _INT32)
        path_offsets = np.empty(batch + 1, _INT32)
        last_draft_index = np.empty(num_proxy, _INT32)
        cost = np.empty(batch, _INT64)
        try:
            length = align_batch(
                *self._tables,
                self._cells,
                self._positions_of_byte,
                self._scratch,
                draft_ids,
                draft_offsets,
                proxy_ids,
                proxy_offsets,
                path,
                path_offsets,
                last_draft_index,
                cost,
            )
        except TypeError:
            # The kernel takes one signature only, so checking the types costs the good case nothing.
            given = (draft_ids, draft_offsets, proxy_ids, proxy_offsets)
            return self.align(*_as_the_kernel_takes_them(given))
        if length < 0:
            if length == BAD_INPUT:
                self._refuse(draft_ids, draft_offsets, proxy_ids, proxy_offsets)
            self._cells = np.empty(-length, dtype=np.int64)
            return self.align(draft_ids, draft_offsets, proxy_ids, proxy_offsets)
        return Alignment(path[:length], path_offsets, last_draft_index, cost)

    def links(
        self, draft_ids: Int32Array, draft_offsets: Int32Array, proxy_ids: Int32Array, proxy_offsets: Int32Array
    ) -> BoolArray:
        """Which proxy tokens may carry the law of their request's last draft token: bool [M].

        Those that the path links with it, of requests whose draft and proxy tokens spell the same bytes. Arguments and
        errors as of :meth:`align`.
        """
        alignment = self.align(draft_ids, draft_offsets, proxy_ids, proxy_offsets)
        links = np.empty(len(proxy_ids), dtype=np.bool_)
        given = (draft_ids, draft_offsets, proxy_ids, proxy_offsets)
        certify_links(*self._tables[:4], *given, alignment.last_draft_index, links)
        return links

    def _refuse(
        self, draft_ids: Int32Array, draft_offsets: Int32Array, proxy_ids: Int32Array, proxy_offsets: Int32Array
    ) -> NoReturn:
        if len(draft_offsets) != len(proxy_offsets):
            raise ValueError(
                f"draft_offsets describes {len(draft_offsets) - 1} requests, proxy_offsets {len(proxy_offsets) - 1}; "
                "they must describe the same ones. A request without tokens repeats its offset."
            )
        _, draft_starts, _, target_starts, _ = self._tables
        for side, ids, offsets, vocab_size in (
            ("draft", draft_ids, draft_offsets, len(draft_starts) - 1),
            ("proxy", proxy_ids, proxy_offsets, len(target_starts) - 1),
        ):
            if offsets[0] != 0 or offsets[-1] != len(ids) or np.any(np.diff(offsets) < 0):
                raise ValueError(
                    f"{side}_offsets is {np.array2string(offsets, threshold=8)}; it must rise from 0 to {len(ids)}, "
                    f"the number of {side}_ids."
                )
            outside = ids[(ids < 0) | (ids >= vocab_size)]
            if len(outside):
                raise VocabularyError(
                    f"{side} token id {outside[0]} is outside its vocabulary of {vocab_size} tokens. Build the tables "
                    "with as many entries as the model has logits (model_vocab_size)."
                )
        raise AssertionError("the kernel refused input that has no fault")


def _checked_table(flat_bytes: ByteArray, byte_offsets: Int32Array, *, vocabulary: str) -> tuple[ByteArray, Int32Array]:
    """The table in the layout that the kernel is compiled for, copied where it has another."""
    if flat_bytes.dtype != np.uint8 or flat_bytes.ndim != 1:
        raise VocabularyError(
            f"the {vocabulary} vocabulary's bytes are {flat_bytes.dtype} of shape {flat_bytes.shape}; they must be a "
            "flat uint8 array."
        )
    if byte_offsets.dtype != _INT32 or byte_offsets.ndim != 1 or len(byte_offsets) < 1:
        raise VocabularyError(
            f"the {vocabulary} vocabulary's offsets are {byte_offsets.dtype} of shape {byte_offsets.shape}; they must "
            "be int32, one more than there are tokens."
        )
    if byte_offsets[0] != 0 or byte_offsets[-1] != len(flat_bytes) or np.any(np.diff(byte_offsets) < 0):
        raise VocabularyError(
            f"the {vocabulary} vocabulary's offsets run from {byte_offsets[0]} to {byte_offsets[-1]}; they must rise "
            f"from 0 to {len(flat_bytes)}, the number of its bytes."
        )
    return np.require(flat_bytes, requirements=["C", "W"]), np.require(byte_offsets, requirements=["C", "W"])


def _as_the_kernel_takes_them(arrays: tuple[Int32Array, ...]) -> tuple[Int32Array, ...]:
    """Copies of arrays that are read-only or not contiguous.

    Raises:
        TypeError: an argument is no one-dimensional int32 array, or nothing is wrong that a copy could cure.
    """
    names = ("draft_ids", "draft_offsets", "proxy_ids", "proxy_offsets")
    for name, array in zip(names, arrays, strict=True):
        if not isinstance(array, np.ndarray) or array.dtype != _INT32 or array.ndim != 1:
            found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(f"{name} is {found}; it must be a one-dimensional int32 array, np.array(ids, np.int32).")
    if all(array.flags.c_contiguous and array.flags.writeable for array in arrays):
        raise TypeError("the alignment kernel refused arrays of the types that it is compiled for.")
    return tuple(np.require(array, requirements=["C", "W"]) for array in arrays)
