"""The predicted peak of memory against going on token by token."""

from __future__ import annotations

import numpy as np
import pytest

from planner.schedule.peak import Peak


@pytest.mark.parametrize("seed", range(30))
def test_the_peak_is_that_of_a_walk_over_all_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 9))
    tokens, left = rng.integers(1, 60, count), rng.integers(0, 15, count)
    new_tokens, new_left = rng.integers(1, 60, 20), rng.integers(0, 20, 20)
    found = Peak(tokens, left).with_another(new_tokens, new_left)
    for each, until, most in zip(new_tokens, new_left, found, strict=True):
        held = [
            each + step + sum(n + step for n, end in zip(tokens, left, strict=True) if end >= step)
            for step in range(until + 1)
        ]
        assert most == max(held)
