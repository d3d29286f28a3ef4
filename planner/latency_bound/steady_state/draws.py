"""Numbers that stand for random ones: in their proportions, and in an order without any."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from planner.length_distribution import FloatArray


@lru_cache(maxsize=64)
def even_shares(count: int, seed: int = 0) -> FloatArray:
    """So many shares, evenly spread over 0 to 1."""
    return np.random.default_rng(seed).permutation((np.arange(count) + 0.5) / count)


def poisson_numbers(mean: float, count: int) -> list[int]:
    """So many numbers of what happens by chance, so often in the mean."""
    from scipy.special import pdtr  # takes a tenth of a second, which commands do not wait for

    most = int(mean + 8 * np.sqrt(mean) + 8)
    found = np.searchsorted(pdtr(np.arange(most), mean), even_shares(count, 1))
    return [int(each) for each in found]
