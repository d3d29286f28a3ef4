"""Tokens per second are those of full slots only."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from llmpq import Plan
from llmpq.run.drift import LEAST_ROWS, LEAST_S, RateWindow
from llmpq.run.summary import planned_tokens_per_s

SLOTS = 2 * LEAST_ROWS


def fed(window: RateWindow, first_s: int, last_s: int, rate: float, in_flight: int) -> None:
    """Rows of ten tokens each, and a state a second."""
    for at_s in range(first_s, last_s):
        window.add(float(at_s), int(rate * at_s), int(rate * at_s / 10), in_flight)


def test_the_first_turn_fills_slots_and_the_next_is_measured() -> None:
    window = RateWindow(SLOTS)
    fed(window, 0, 26, 100.0, SLOTS)
    assert window.tokens_per_s is None, "one turn takes 12.8 s, two 25.6 s"
    fed(window, 26, 28, 100.0, SLOTS)
    assert window.tokens_per_s == pytest.approx(100, rel=0.01)


def test_the_end_of_a_job_and_a_slow_source_do_not_count() -> None:
    window = RateWindow(SLOTS)
    fed(window, 0, 40, 100.0, SLOTS)
    assert window.tokens_per_s is not None
    window.add(41.0, 4001, 400, SLOTS - 1)
    assert window.tokens_per_s is None
    fed(window, 42, 55, 100.0, SLOTS)
    assert window.tokens_per_s is None
    fed(window, 55, 58, 100.0, SLOTS)
    assert window.tokens_per_s == pytest.approx(100, rel=0.01)


def test_a_later_change_is_seen_and_after_a_fault_slots_fill_again() -> None:
    window = RateWindow(SLOTS)
    fed(window, 0, 100, 100.0, SLOTS)
    for at_s in range(100, 130):
        tokens = 10000 + 50 * (at_s - 100)
        window.add(float(at_s), tokens, tokens // 10, SLOTS)
    assert window.tokens_per_s == pytest.approx(50, rel=0.05)
    window.clear()
    fed(window, 130, 140, 100.0, SLOTS)
    assert window.tokens_per_s is None


def test_a_few_quick_rows_are_no_evidence() -> None:
    window = RateWindow(1)
    for at_s in range(int(LEAST_S)):
        window.add(float(at_s), 1000 * at_s, 100 * at_s, 4)
    assert window.tokens_per_s is None
    window.add(LEAST_S + 1, 11000, 1100, 4)
    assert window.tokens_per_s == pytest.approx(1000)


def test_a_plan_is_compared_at_the_time_scale_of_its_run(plan: Plan) -> None:
    assert planned_tokens_per_s(plan.spec) is None, "emulated without a time scale"
    predicted = plan.predicted.tokens_per_s
    assert planned_tokens_per_s(replace(plan.spec, time_scale=2.0)) == pytest.approx(predicted / 2)
    stages = tuple(replace(stage, emulated=False) for stage in plan.stages)
    assert planned_tokens_per_s(replace(plan.spec, stages=stages)) == pytest.approx(predicted)


def test_the_end_of_a_job_may_be_noted_while_the_rate_is_asked_for() -> None:
    class Disturbed(RateWindow):
        """Has another thread note the end of the job in the middle of an answer."""

        other: threading.Thread | None = None

        def _is_enough(self, first: Any) -> bool:
            found = super()._is_enough(first)
            if self.other is None and found:
                self.other = threading.Thread(target=self.add, args=(70.0, 700, 70, 0))
                self.other.start()
                self.other.join(0.1)  # it has to wait for the answer
            return found

    window = Disturbed(1)
    fed(window, 0, 66, 10.0, 1)
    assert window.other is None, "it is the answer that is disturbed"
    assert window.tokens_per_s == pytest.approx(10)
    assert window.other is not None
    window.other.join()
    assert window.tokens_per_s is None
