"""Buckets of lengths and their agreement, and predictors that need no training."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.lengths.predictor import (
    Confused,
    Known,
    Prompt,
    agreement,
    buckets_of,
    confusion_of,
    even_buckets,
)
from llmpq.lengths.sources import read_trace
from quant.common.errors import SpecError


@given(
    lengths=st.sets(st.integers(1, 5000), min_size=1, max_size=90),
    more=st.integers(0, 50),
    count=st.integers(1, 20),
)
def test_buckets_have_as_many_rows_each_and_end_with_the_longest(
    lengths: set[int], more: int, count: int
) -> None:
    buckets = even_buckets(sorted(lengths), max(lengths) + more, count)
    assert buckets[-1] == max(lengths) + more
    held = [sum(a < n <= b for n in lengths) for a, b in itertools.pairwise((0, *buckets))]
    assert sum(held) == len(lengths)
    assert max(held) <= -(-len(lengths) // count)
    assert len(held) <= count


def test_many_alike_share_a_bucket() -> None:
    assert even_buckets([5] * 50 + [900], 1000) == (5, 1000)
    assert even_buckets([3, 70, 80], 50, 3) == (3, 50)


@given(length=st.integers(1, 300), longest=st.integers(1, 200))
def test_a_length_is_in_the_first_bucket_with_room(length: int, longest: int) -> None:
    buckets = even_buckets(range(1, longest + 1), longest)
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


BUCKETS = (10, 20, 40)
PROMPTS = [Prompt("a", 50), Prompt("b", 30), Prompt("c", 5)]


def test_nobody_is_expected_to_get_more_than_may_be() -> None:
    assert Known().expect(PROMPTS) == [50, 30, 5]
    assert Known({"a": 7, "c": 99}).expect(PROMPTS) == [7, 30, 5]
    everyone = Confused({"a": 35, "b": 35, "c": 35}, BUCKETS, np.eye(3).tolist())
    assert everyone.expect(PROMPTS) == [40, 30, 5]


def test_drawn_buckets_have_the_shares_of_the_matrix() -> None:
    true = {str(number): 15 for number in range(4000)}
    prompts = [Prompt(name, 100) for name in true]
    predictor = Confused(true, BUCKETS, [[1, 0, 0], [2, 5, 3], [0, 0, 1]], seed=3)
    found = predictor.expect(prompts)
    shares = [found.count(most) / len(found) for most in BUCKETS]
    assert shares == pytest.approx([0.2, 0.5, 0.3], abs=0.03)
    assert predictor.expect(prompts[::-1]) == found[::-1]
    assert Confused(true, BUCKETS, np.ones((3, 3)).tolist(), seed=4).expect(prompts) != found


@pytest.mark.parametrize(
    ("confusion", "named"),
    [
        ([[1, 0], [0, 1]], r"confusion is \[2, 2\]"),
        ([[1, 0, 0], [0, 0, 0], [0, 0, 1]], "one above 0"),
        ([[1, 0, 0], [0, -1, 2], [0, 0, 1]], "0 or more"),
        ([[1, 0, 0], [0, float("nan"), 2], [0, 0, 1]], "0 or more"),
    ],
)
def test_a_matrix_that_is_none_is_refused(confusion: list[list[float]], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        Confused({}, BUCKETS, confusion)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "custom_id,expected_tokens\na,7\nb,12\n"),
        ("t.jsonl", '{"custom_id":"a","expected_tokens":7}\n\n'
                    '{"custom_id":"b","expected_tokens":12}\n'),
    ],
)  # fmt: skip
def test_a_file_of_predictions_is_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_trace(tmp_path / name) == {"a": 7, "b": 12}


HEAD = "custom_id,expected_tokens\na,3\n"


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("t.csv", HEAD + "b,nan\n", r"t\.csv:3: expected_tokens is 'nan'"),
        ("t.csv", HEAD + "b,-4\n", r"t\.csv:3: expected_tokens is '-4'"),
        ("t.csv", HEAD + "b,0\n", "whole number of 1 to"),
        ("t.csv", HEAD + "b,1.5\n", "'1.5'"),
        ("t.csv", HEAD + "a,4\n", "custom_id 'a' stands there twice"),
        ("t.csv", HEAD + ",4\n", "custom_id is ''"),
        ("t.csv", "id,tokens\na,1\n", "the columns are 'id,tokens'"),
        ("t.csv", "custom_id,expected_tokens\n", "no rows"),
        ("t.jsonl", '{"custom_id":"b","expected_tokens":NaN}\n', r"t\.jsonl:1: .* is nan"),
        ("t.jsonl", '{"custom_id":"b","expected_tokens":-1}\n', "is -1"),
        ("t.jsonl", '{"custom_id":"b","expected_tokens":true}\n', "is True"),
        ("t.jsonl", "[1]\n", r"t\.jsonl:1: no JSON object"),
    ],
)
def test_what_is_no_prediction_is_named(tmp_path: Path, name: str, text: str, named: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=named):
        read_trace(tmp_path / name)
