"""Which tokens do top-k and top-p leave?

A few, mostly, and they are among those above a bound that is cheap to find; only these are sorted here. vLLM sorts the
whole vocabulary, for every row: a speculative step pays that once more for each proposed token. The tokens that are
left are vLLM's, but for one at which the sum of probabilities is within rounding of 1 - p (vLLM sums in float32, over
the whole vocabulary).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

_BLOCK: Final = 64
"""Tokens that share one maximum: as many maxima as that are soon found, and their k-th is near the k-th logit."""

_FEW: Final = 8
"""Up to one in so many blocks, their tokens are looked at alone; above, all tokens."""

_TRIED: Final = (64, 512)
"""How many blocks' maxima are above the bounds that are tried for top-p alone, before that which all maxima are."""


def apply_top_k_top_p(
    logits: torch.Tensor,
    k: torch.Tensor | None,
    p: torch.Tensor | None,
    allow_cpu_sync: bool = True,  # noqa: ARG001 - vLLM's signature; here all is on the CPU
) -> torch.Tensor:
    """Stands in for ``vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_top_p_pytorch``, under its parameters' names.

    Args:
        logits: float [rows, vocabulary], on the CPU; float32 ones are changed in place.
        k: int [rows], or None: all but the k largest are masked, and equals of the k-th largest stay; the size of the
            vocabulary for rows without.
        p: float [rows], or None: of what top-k left, the least likely tokens whose probabilities sum up to at most
            1 - p are masked, but never the likeliest; 1 for rows without.
        allow_cpu_sync: unused.

    Returns:
        The logits, masked by -inf.
    """
    rows, size = logits.shape
    if rows == 0:  # vLLM's own raises
        return logits
    if logits.dtype != torch.float32:
        return apply_top_k_top_p(logits.float(), k, p).to(logits.dtype)
    numbers = k.tolist() if k is not None else [size] * rows
    masses = p.tolist() if p is not None else [1.0] * rows
    limited = [row for row in range(rows) if numbers[row] < size or masses[row] < 1.0]
    if not limited:
        return logits
    maxima = _block_maxima(logits)
    by_mass_alone = [row for row in limited if numbers[row] >= size]
    totals = dict(zip(by_mass_alone, _totals(logits[by_mass_alone], maxima[by_mass_alone]), strict=True))
    kept = {}
    for row in limited:
        of_row = _Row(logits[row].numpy(), maxima[row].numpy())
        if row in totals:
            candidates = of_row.candidates_of_mass(masses[row] * totals[row])
        else:
            candidates = of_row.candidates_of_largest(numbers[row])
        values = of_row.logits[candidates]
        chosen = _chosen(values, number=numbers[row], mass=masses[row], total=totals.get(row))
        kept[row] = candidates[chosen], values[chosen]
    # All rows by torch's threads: a fill by one of them waits for the caches of those that found the maxima.
    if len(limited) == rows:
        logits.fill_(-torch.inf)
    else:
        logits.index_fill_(0, torch.tensor(limited), -torch.inf)
    for row, (places, values) in kept.items():
        logits[row].numpy()[places] = values
    return logits


def _block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """Float32 [rows, blocks]; the last block may be shorter."""
    rows, size = logits.shape
    whole = size // _BLOCK * _BLOCK
    maxima = logits[:, :whole].view(rows, whole // _BLOCK, _BLOCK).amax(-1)
    if whole < size:
        maxima = torch.cat((maxima, logits[:, whole:].amax(-1, keepdim=True)), dim=-1)
    return maxima


def _totals(logits: torch.Tensor, maxima: torch.Tensor) -> list[float]:
    """Of each row, the sum of the exponentials of the logits over that of the largest."""
    totals: list[float] = (logits - maxima.amax(-1, keepdim=True)).exp_().sum(-1).tolist() if len(logits) else []
    return totals


class _Row:
    """The logits of one row, float32 [vocabulary], and the largest of each block, float32 [blocks]."""

    def __init__(self, logits: NDArray[np.float32], maxima: NDArray[np.float32]) -> None:
        self.logits = logits
        self._maxima = maxima

    def candidates_of_largest(self, number: int) -> NDArray[np.intp]:
        """Places, in order, of the ``number`` largest logits, of their equals, and of some more."""
        if number > self._maxima.size:
            return np.arange(self.logits.size)
        # So many blocks hold a logit that is no smaller, so the number-th largest is not below it.
        floor = np.partition(self._maxima, -number)[-number]
        blocks = np.flatnonzero(~(self._maxima < floor))  # with those that hold NaN
        if blocks.size > self._maxima.size // _FEW:
            return np.flatnonzero(~(self.logits < floor))
        places = (blocks[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
        places = places[: np.searchsorted(places, self.logits.size)]
        return places[np.flatnonzero(~(self.logits[places] < floor))]

    def candidates_of_mass(self, mass: float) -> NDArray[np.intp]:
        """Places, in order, of the largest logits, whose exponentials over that of the largest sum up to ``mass``."""
        largest = self._maxima.max()
        for number in (*_TRIED, self._maxima.size):
            places = self.candidates_of_largest(number)
            with np.errstate(invalid="ignore"):
                if np.exp(self.logits[places] - largest).sum() >= mass:
                    return places
        return np.arange(self.logits.size)


def _chosen(values: NDArray[np.float32], *, number: int, mass: float, total: float | None) -> NDArray[np.intp]:
    """Places of the candidates that stay.

    Args:
        values: float32 [candidates], the logits, in the vocabulary's order.
        number: k; what is left by it is what probabilities are taken of.
        mass: p.
        total: the sum of all exponentials over that of the largest; None where those that top-k leaves are all.
    """
    ascending = np.sort(values)
    if total is None:
        ascending = ascending[np.searchsorted(ascending, ascending[-number]) :]
    masked = 0
    if mass < 1.0:
        with np.errstate(invalid="ignore"):
            sums = np.exp(ascending - ascending[-1], dtype=np.float64).cumsum()
        total = float(sums[-1]) if total is None else total
        masked = int((sums + (total - sums[-1]) <= (1.0 - mass) * total).sum())
        masked = min(masked, ascending.size - 1)
    least = ascending[masked]
    places = np.flatnonzero(~(values < least))
    # Of equals the earlier ones in the vocabulary are masked first; in vLLM those that an unstable sort puts first.
    surplus = places.size - (ascending.size - masked)
    return np.delete(places, np.flatnonzero(values[places] == least)[:surplus]) if surplus else places
