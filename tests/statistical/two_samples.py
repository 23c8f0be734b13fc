"""Do two tables of counts come from one law? Chi-square of homogeneity, and total variation against its own noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

_SMALLEST_EXPECTED = 5.0


@dataclass(frozen=True)
class Comparison:
    """Result of :func:`compare`.

    Attributes:
        p: of the chi-square test.
        total_variation: between the two empirical laws over the cells.
        noise: 99th percentile of the total variation between two samples of these sizes from the pooled law over the
            cells.
        cells: outcomes frequent enough for the test, and one cell for the rare ones together (their frequencies are too
            poorly known for the pooled law to stand for the true one).
    """

    p: float
    total_variation: float
    noise: float
    cells: int


def compare(first: Mapping[str, int], second: Mapping[str, int], *, seed: int = 0) -> Comparison:
    """Compare two tables of outcome counts."""
    keys = sorted(set(first) | set(second))
    table = np.array([[first.get(key, 0) for key in keys], [second.get(key, 0) for key in keys]], dtype=np.int64)
    sizes = table.sum(axis=1)
    frequent = table.sum(axis=0) / sizes.sum() * sizes.min() >= _SMALLEST_EXPECTED
    cells = np.column_stack([table[:, frequent], table[:, ~frequent].sum(axis=1)])
    cells = cells[:, cells.sum(axis=0) > 0]
    p = float(stats.chi2_contingency(cells).pvalue) if cells.shape[1] > 1 else 1.0
    dice = np.random.default_rng(seed)
    pooled = cells.sum(axis=0) / sizes.sum()
    drawn = [dice.multinomial(size, pooled, size=500) / size for size in sizes]
    noise = float(np.quantile(0.5 * np.abs(drawn[0] - drawn[1]).sum(axis=1), 0.99))
    total_variation = float(0.5 * np.abs(cells[0] / sizes[0] - cells[1] / sizes[1]).sum())
    return Comparison(p=p, total_variation=total_variation, noise=noise, cells=cells.shape[1])
