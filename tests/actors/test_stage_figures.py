"""Counts of latencies against the latencies themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.stage_figures import NO_LATENCIES, LatencyCounts

SECONDS = st.lists(st.floats(0.002, 90_000), min_size=1, max_size=60)


@given(SECONDS, st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_at_most_a_bucket_above_the_true_one(
    seconds: list[float], share: float
) -> None:
    true_s = float(np.quantile(seconds, share, method="inverted_cdf"))
    found_s = LatencyCounts.of(seconds).quantile_s(share)
    assert found_s is not None
    assert true_s * (1 - 1e-9) <= found_s <= 1.0109 * true_s


@given(SECONDS, SECONDS)
def test_counts_are_added_and_taken_away(first: list[float], second: list[float]) -> None:
    both = LatencyCounts.of([*first, *second])
    one, other = LatencyCounts.of(first), LatencyCounts.of(second)
    assert one.plus(other) == both
    assert both.since(one) == other
    assert both.requests == len(first) + len(second)
    assert one.plus(NO_LATENCIES) == one


def test_nothing_has_no_quantile_and_what_is_beyond_counts_as_the_longest() -> None:
    assert NO_LATENCIES.quantile_s(0.5) is None
    assert LatencyCounts.of([0.0]).quantile_s(1.0) == pytest.approx(2**-10)
    assert LatencyCounts.of([1e9]).quantile_s(1.0) == pytest.approx(2**18)
