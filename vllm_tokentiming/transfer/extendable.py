"""Which draft tokens are likely to be cut by the target's tokenizer: the set E of extendable draft tokens.

A chunk of draft tokens goes on after an extendable one. Any choice of E keeps the transfer exact, as long as it is made
before the token is drawn (docs/losslessness.md); a good choice makes proxy tokens that the target would have written
itself.

Owns: :class:`ExtendableSet` owns the counts of one pair of vocabularies. :class:`Extendable`, which it hands out, never
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from vllm_tokentiming.errors import ConfigError
from vllm_tokentiming.transfer.chunk_kernel import CONTINUATION_SHIFT, IN_E, PENDING_SHIFT, count_boundaries

DEFAULT_THRESHOLD: Final = 0.3
"""Extendable above this share of ends that are no target boundary. Below a half: a wrong cut costs all that follows."""

PRIOR_STRENGTH: Final = 1.0
"""How many observations the vocabularies' own guess is worth: text corrects it at once (docs/losslessness.md)."""


def pending_bytes(data: bytes) -> int:
    """How many bytes the last UTF-8 character of ``data`` still lacks; 0 where its lead byte is not in ``data``."""
    for length, byte in enumerate(reversed(data[-3:]), start=1):
        if byte < 0x80:
            return 0
        if byte >= 0xC0:
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4 if byte < 0xF8 else 0
            return max(size - length, 0)
    return 0


def continuation_bytes(data: bytes) -> int:
    """The length of a token that holds nothing but UTF-8 continuation bytes, else 0."""
    return len(data) if data and all(0x80 <= byte < 0xC0 for byte in data) else 0


def _traits(data: bytes, *, in_e: bool) -> int:
    if data[-1] < 0x80:
        return IN_E if in_e else 0
    pending = pending_bytes(data)
    in_e = in_e or pending > 0
    return in_e * IN_E | pending << PENDING_SHIFT | min(continuation_bytes(data), 3) << CONTINUATION_SHIFT


@dataclass(frozen=True, slots=True)
class Extendable:
    """E as it stood before a cycle's tokens were drawn. Never written again.

    Attributes:
        traits: uint8 [draft vocabulary], one byte a token so that kernel and Python read one place; the bits are
            ``chunk_kernel.IN_E`` and those at ``PENDING_SHIFT`` (:func:`pending_bytes`) and ``CONTINUATION_SHIFT``
            (:func:`continuation_bytes`, 3 at most).
    """

    traits: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        self.traits.setflags(write=False)

    @classmethod
    def build(cls, mask: npt.NDArray[np.bool_], draft_token_bytes: Sequence[bytes | None]) -> Self:
        """E from a mask; tokens that end inside a character are added, tokens without bytes are removed.

        Args:
            mask: bool [draft vocabulary].
            draft_token_bytes: bytes of every draft token; None or empty for those without.

        Raises:
            ValueError: the two differ in length.
        """
        if len(mask) != len(draft_token_bytes):
            raise ValueError(f"the mask covers {len(mask)} draft tokens, the byte table {len(draft_token_bytes)}")
        traits = [
            _traits(data, in_e=flag) if data else 0 for flag, data in zip(mask.tolist(), draft_token_bytes, strict=True)
        ]
        return cls(np.array(traits, dtype=np.uint8))

    @classmethod
    def nothing(cls, draft_vocab_size: int) -> Self:
        """The empty E over a vocabulary without multi-byte characters: every token is a chunk."""
        return cls(np.zeros(draft_vocab_size, dtype=np.uint8))

    def __len__(self) -> int:
        return len(self.traits)

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """Bool [draft vocabulary], a copy: the tokens of E."""
        return (self.traits & IN_E).astype(np.bool_)


class ExtendableSet:
    """E of one pair of vocabularies: a guess from the vocabularies, corrected by what committed text showed.

    The pipeline feeds it committed text only, so that every snapshot depends on the past alone. Snapshots are shared
    until a flag changes, so taking one each cycle costs nothing.

    Args:
        prior: float64 [draft vocabulary], the guessed chance that the token's end is no target boundary
            (:func:`~vllm_tokentiming.transfer.boundary_prior.extendable_prior`).
        draft_token_bytes: bytes of every draft token; None or empty for those without.
        threshold: extendable where the posterior mean is above it.
        strength: observations that the prior is worth.

    Raises:
        ConfigError: sizes that differ, a prior outside [0, 1], a threshold outside [0, 1], or a strength that is not
            positive.
    """

    def __init__(
        self,
        prior: npt.NDArray[np.float64],
        draft_token_bytes: Sequence[bytes | None],
        *,
        threshold: float = DEFAULT_THRESHOLD,
        strength: float = PRIOR_STRENGTH,
    ) -> None:
        if len(prior) != len(draft_token_bytes):
            raise ConfigError(
                f"the prior covers {len(prior)} draft tokens and the byte table {len(draft_token_bytes)}; build both "
                "from the draft's model vocabulary."
            )
        if not (np.all(prior >= 0.0) and np.all(prior <= 1.0)):
            raise ConfigError("the prior has entries outside [0, 1]; it must hold probabilities.")
        if not 0.0 <= threshold <= 1.0 or not strength > 0.0:
            raise ConfigError(
                f"threshold is {threshold} and strength {strength}; required: 0 ≤ threshold ≤ 1, strength > 0."
            )
        self._threshold = threshold
        self._seen: npt.NDArray[np.float64] = np.full(len(prior), strength, dtype=np.float64)
        self._cut: npt.NDArray[np.float64] = prior * strength
        """How often each token was seen, and how often cut, the prior's share included."""
        self._has_bytes: npt.NDArray[np.bool_] = np.array([bool(data) for data in draft_token_bytes], dtype=np.bool_)
        self._prior = Extendable.build(prior > threshold, draft_token_bytes)
        self._current = self._prior
        self.observe([], [])  # compiles

    @property
    def prior(self) -> Extendable:
        """E as the vocabularies alone suggest.

        For requests whose output must not depend on what other requests wrote (those with a seed).
        """
        return self._prior

    def snapshot(self) -> Extendable:
        """E as of now; later observations leave it alone."""
        return self._current

    def observe(
        self,
        ids_in_draft_vocab: Sequence[int] | npt.NDArray[np.int32],
        is_boundary: Sequence[bool] | npt.NDArray[np.bool_],
    ) -> None:
        """Learn from committed text.

        Args:
            ids_in_draft_vocab: the draft's tokens of a stretch of committed text that starts at a character.
            is_boundary: whether a target token ends where each of them ends.

        Raises:
            ValueError: the two differ in length.
        """
        if len(ids_in_draft_vocab) != len(is_boundary):
            raise ValueError(
                f"{len(ids_in_draft_vocab)} draft tokens, {len(is_boundary)} boundaries; one is needed for each"
            )
        counted = np.empty(len(ids_in_draft_vocab), dtype=np.int32)
        traits = np.empty(len(ids_in_draft_vocab), dtype=np.uint8)
        number, changed = count_boundaries(
            np.array(ids_in_draft_vocab, dtype=np.int32),
            np.array(is_boundary, dtype=np.bool_),
            self._current.traits,
            self._has_bytes,
            self._seen,
            self._cut,
            self._threshold,
            counted,
            traits,
        )
        if changed:
            following = self._current.traits.copy()
            following[counted[:number]] = traits[:number]  # of a token that stands there twice, the last
            self._current = Extendable(following)
