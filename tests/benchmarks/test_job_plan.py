"""The pure parts of the benchmark of jobs: numbers of a sweep, the best of them, lengths."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.planning.job_cases import (
    ALIKE,
    LOGNORMAL,
    LONGEST_OUTPUT,
    LONGEST_PROMPT,
    RowLengths,
    best_number,
    geometric_mean,
    settings,
    sweep_numbers,
)


def test_a_sweep_has_no_wide_steps() -> None:
    numbers = sweep_numbers(500, 1.03)
    assert numbers[:16] == list(range(1, 17))
    assert numbers[-1] == 500
    assert all(b - a == 1 or b <= 1.03 * a for a, b in pairwise(numbers))
    assert sweep_numbers(1, 1.2) == [1]


@pytest.mark.parametrize("best", [1, 2, 37, 211, 300])
def test_the_best_number_is_found_and_no_unfitting_one(best: int) -> None:
    """Up to 300 fit; the rate falls with the distance from the best one."""
    asked: list[int] = []

    def rate(number: int) -> float | None:
        asked.append(number)
        return None if number > 300 else 1 / (1 + abs(math.log(number / best)))

    found = best_number(rate, 3000, 1.3, 1.02)
    assert found is not None
    assert found[0] == pytest.approx(best, rel=0.02)
    assert found[1] == rate(found[0])
    assert len(asked) == len(set(asked)) + 1  # the line above asks again
    assert best_number(lambda _: None, 3000, 1.3, 1.02) is None


def test_the_geometric_mean_treats_a_ratio_and_its_inverse_alike() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([3.0, 1 / 3]) == pytest.approx(1.0)
    assert math.isnan(geometric_mean([]))


@pytest.mark.parametrize("kind", [ALIKE, LOGNORMAL])
def test_rows_fit_the_slots_of_their_job(kind: str) -> None:
    lengths = RowLengths(kind, Path())
    rows, slots = lengths.draw(500, 3), lengths.job(200).in_flight(1)
    assert len(rows) == 500
    assert max(output for _, output in rows) <= slots.new_tokens <= LONGEST_OUTPUT
    assert 1 <= min(min(row) for row in rows) <= max(max(row) for row in rows) <= LONGEST_PROMPT
    assert rows == lengths.draw(500, 3)
    assert (rows == lengths.draw(500, 4)) == (kind == ALIKE)


def test_real_lengths_are_read_from_the_data(tmp_path: Path) -> None:
    """Prompts that are too long are left out, and headers say which column is meant."""
    (tmp_path / "traces").mkdir()
    (tmp_path / "lengths").mkdir()
    (tmp_path / "traces" / "splitwise_conv.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n1.5,9000,7\n"
    )
    (tmp_path / "lengths" / "vicuna13b_predictions.csv").write_text(
        "output_tokens,predicted_class\n40,1\n"
    )
    assert set(RowLengths("real", tmp_path).draw(50, 0)) == {(374, 40)}


def test_cases_are_named_by_number_and_by_model() -> None:
    assert len(list(settings([]))) == 14
    chosen = list(settings(["3", "qwen2.5-7b"]))
    assert [each.model for each in chosen] == ["opt-30b", "qwen2.5-7b"]
    assert all(len(each.cluster.devices) == 4 for each in chosen)
