"""Buckets, and figures of agreement, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.lengths.buckets import agreement, buckets_of, confusion_of, even_buckets


@given(longest=st.integers(1, 5000), count=st.integers(1, 20))
def test_buckets_are_even_and_end_with_the_longest(longest: int, count: int) -> None:
    buckets = even_buckets(longest, count)
    assert buckets[-1] == longest
    assert len(buckets) == min(count, longest)
    widths = np.diff((0, *buckets))
    assert widths.min() >= 1
    assert widths.max() - widths.min() <= 1


@given(length=st.integers(1, 300), longest=st.integers(1, 200))
def test_a_length_is_in_the_first_bucket_with_room(length: int, longest: int) -> None:
    buckets = even_buckets(longest)
    roomy = [number for number, most in enumerate(buckets) if length <= most]
    assert buckets_of([length], buckets)[0] == (roomy[0] if roomy else len(buckets) - 1)


def test_figures_of_agreement() -> None:
    true, predicted = np.array([0, 1, 2, 2]), np.array([0, 2, 0, 2])
    found = agreement(true, predicted, np.array([0.9, 0.7, 0.75, 1.0]))
    assert found.accuracy == 0.5
    assert found.too_short == 0.25
    assert found.wrong_distance == 1.5
    # bins: {0.9, 1.0} both right, {0.7, 0.75} both wrong
    assert found.calibration_error == pytest.approx(0.5 * (1 - 0.95) + 0.5 * 0.725)
    assert confusion_of(true, predicted, 3).tolist() == [[1, 0, 0], [0, 0, 1], [1, 0, 1]]


def test_nothing_is_wrong_where_all_are_right() -> None:
    found = agreement(np.array([1, 0]), np.array([1, 0]))
    assert (found.accuracy, found.wrong_distance, found.calibration_error) == (1.0, None, None)
