"""What a run tells Prometheus of its rows, errors and faults, by what its journal is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray
import ray.util.metrics

from llmpq.jobs.journal import MoreEvents, PlanChange, ProgressPoint
from llmpq.run.metrics import RunMetrics
from tests.llmpq.made_journals import BEGAN, PLAN, START, died, failed_rows

Values = dict[tuple[str, str], float]


class Pretend:
    """Stands for Ray's gauges: the value of each by name and tag, but for `run`."""

    values: Values

    def __init__(self, name: str, _: str, tags: tuple[str, ...]) -> None:
        self.name, self.tags = name.removeprefix("llmpq_"), tags

    def set_default_tags(self, tags: dict[str, str]) -> None:
        assert tags.keys() <= set(self.tags)
        assert all(value.isascii() for value in tags.values()), "Ray takes no others"

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        assert set(tags or ()) == {*self.tags} - {"run"}
        tag = "".join((tags or {}).values())
        assert tag.isascii()
        Pretend.values[self.name, tag] = value


@pytest.fixture(autouse=True)
def values(monkeypatch: pytest.MonkeyPatch) -> Iterator[Values]:
    Pretend.values = {}
    monkeypatch.setattr(ray.util.metrics, "Gauge", Pretend)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return Pretend.values


def point(rows: int, errors: int, left_s: float | None = 9.0) -> ProgressPoint:
    return ProgressPoint(BEGAN + 10, rows, errors, 20 * rows, 40.0, left_s)


def test_rows_errors_and_faults_are_told_beside_the_plan(values: Values) -> None:
    told = RunMetrics("Äpfel")
    told.note(replace(START, rows=100, resumed=30, resumed_errors=2))
    for entry in (died(BEGAN + 1), died(BEGAN + 2), failed_rows(BEGAN + 3, 2, "row … is 'é'")):
        told.note(entry)
    assert values == {}  # before the first point, stages still load
    told.note(point(10, 2))
    assert values == {
        ("planned_tokens_per_s", ""): 40.0,
        ("seconds_to_go", ""): 9.0,
        ("rows", "all"): 100,
        ("rows", "done"): 40,
        ("rows", "errors"): 4,
        ("row_errors", r"row ... is '\xe9'"): 2,
        ("events", "died"): 2,
        ("lost_seconds", "died"): 5.0,
    }
    told.note(failed_rows(BEGAN + 13, 3, "row … is 'é'"))
    told.note(MoreEvents(BEGAN + 14, 7))
    told.note(PlanChange(BEGAN + 15, replace(PLAN, tokens_per_s=50.0)))
    told.note(point(11, 3, None))
    assert values["row_errors", r"row ... is '\xe9'"] == 3
    assert values["events", "others"] == 7
    assert values["planned_tokens_per_s", ""] == 50.0
    assert values["seconds_to_go", ""] == 0
    assert values["rows", "done"] == 41


def test_nothing_is_told_without_ray_or_of_what_is_not_planned(
    values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = RunMetrics("run")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    told.note(replace(START, plan=replace(PLAN, tokens_per_s=None)))
    told.note(point(1, 0))
    assert values == {}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    told.note(point(2, 0))
    assert values["rows", "done"] == 2
    assert ("planned_tokens_per_s", "") not in values


def test_all_is_told_again_as_ray_forgets_what_is_not(values: Values) -> None:
    told = RunMetrics("run")
    told.refresh()
    assert values == {}
    for entry in (START, died(BEGAN), failed_rows(BEGAN, 2), point(1, 2)):
        told.note(entry)
    before = dict(values)
    values.clear()
    told.refresh()
    assert values == before
    assert len(values) == 8


def test_every_run_has_its_own(values: Values) -> None:
    """Two runs of one process tell their own figures."""
    for rows in (5, 6):
        told: Any = RunMetrics(f"run{rows}")
        told.note(START)
        told.note(point(rows, 0))
        assert values["rows", "done"] == rows
