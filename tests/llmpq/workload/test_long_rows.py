"""The cut between ordinary and long rows, against trying every cut."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llmpq.workload.long_rows import best_cut

Rows = list[tuple[int, int, int]]


def taken_by_trying(rows: Rows, least_below: float = 0.95) -> tuple[float, float]:
    """What the job takes of the KV cache whole and with the best cut, by the rule as it is told."""
    longest = max(p + n for p, n, _ in rows)
    whole = longest * sum(o for *_, o in rows)
    best = float(whole)
    ordered = sorted(p + n for p, n, _ in rows)
    for most in sorted(set(ordered)):
        if sum(t <= most for t in ordered) < least_below * len(rows):
            continue
        output_above = sum(o for p, n, o in rows if p + n > most)
        output_below = sum(o for p, n, o in rows if p + n <= most)
        if output_above:
            best = min(best, output_below * most + 2 * output_above * longest)
    return whole, best


def cut_of(rows: Rows) -> object:
    return best_cut(*np.array(rows).T)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_better(seed: int) -> None:
    draw = random.Random(seed)
    rows = [(draw.randint(5, 60), n := draw.choice([8, 16]), n) for _ in range(150)]
    for _ in range(draw.randint(0, 6)):
        limit = draw.choice([8, 200])
        rows[draw.randrange(150)] = (draw.randint(60, 900), limit, draw.randint(1, limit))
    whole, best = taken_by_trying(rows)
    found = best_cut(*np.array(rows).T)
    if 1 - best / whole < 0.2:
        assert found is None
    else:
        assert found is not None
        assert found[1] == pytest.approx(1 - best / whole)


def test_rows_that_are_alike_or_too_many_are_not_cut() -> None:
    assert cut_of([(10, 5, 5)] * 100) is None
    assert cut_of([(10, 5, 5)] * 94 + [(900, 5, 5)] * 6) is None
    assert cut_of([(10, 5, 5)] * 96 + [(900, 5, 5)] * 4) is not None
    assert cut_of([(10, 5, 5), (900, 5, 5)]) is None


def test_long_rows_that_generate_nearly_all_are_not_cut() -> None:
    assert cut_of([(10, 5, 5)] * 97 + [(10, 5000, 5000)] * 3) is None
    assert cut_of([(10, 5, 5)] * 97 + [(10, 5000, 5)] * 3) is not None
