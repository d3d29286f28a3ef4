"""A run that switches plans gives every row one result, whichever way and whenever it is stopped;
pretend stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import pytest

from actors.messages import Finished, Request
from llmpq import Plan
from llmpq.jobs.row_database import Tally
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row
from llmpq.run.engine import RunResources
from llmpq.run.options import RunOptions
from llmpq.run.run import Run
from llmpq.run.switching import DriftControl, Switch
from planner.plan.spec import PlanSpec
from quant.common.errors import DeviceLostError

ROWS, AT_ONCE = 60, 8


class Group:
    """Stages that finish one request after the other; a request keeps the tokens it came with."""

    def __init__(self, plan: PlanSpec, loses_device_at: int | None) -> None:
        self.plan = plan
        self.observer = self
        self.ended = 0
        self._loses_device_at = loses_device_at
        self._taken: dict[str, Request] = {}

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to free."""

    def figures(self) -> None:
        """No stage answers."""

    def tokens_in_flight(self) -> dict[str, int]:
        return dict.fromkeys(self._taken, 1)

    def generate(self, requests: Iterator[Request | None]) -> Iterator[tuple[Finished, ...]]:
        while True:
            while len(self._taken) < AT_ONCE:
                request = next(requests, "end")
                if request == "end":
                    break
                if isinstance(request, Request):
                    self._taken[request.custom_id] = request
                else:
                    yield ()
            if not self._taken:
                return
            self.ended += 1
            if self.ended == self._loses_device_at:
                raise DeviceLostError("gone", (0,), (self.plan.stages[0].device,))
            yield self._end(next(iter(self._taken)))

    def _end(self, custom_id: str) -> tuple[Finished, ...]:
        request = self._taken.pop(custom_id)
        return (Finished(custom_id, (*request.generated, 7), "stop"),)

    def halt(self) -> tuple[Finished, ...]:
        return self._end(next(iter(self._taken))) if self._taken else ()

    def unfinished(self) -> tuple[Request, ...]:
        return tuple(replace(each, generated=(5,)) for each in self._taken.values())


class PretendedStages(RunResources):
    """Pretend groups, the first of which may lose a device."""

    def __init__(self, plan: PlanSpec, loses_device_at: int | None) -> None:
        super().__init__(plan, RunOptions(replan="auto"))
        self.groups: list[Group] = []
        self._loses_device_at = loses_device_at

    def group(self, plan: PlanSpec, copies: int = 1) -> Any:
        self.groups.append(Group(plan, None if self.groups else self._loses_device_at))
        return self.groups[-1]


class Pretended(Run):
    """A run in pretend groups."""

    def __init__(self, plan: PlanSpec, loses_device_at: int | None = None) -> None:
        shared = PretendedStages(plan, loses_device_at)
        super().__init__(shared)
        self.groups = shared.groups


@pytest.fixture
def other(plan: Plan) -> PlanSpec:
    return replace(plan.spec, unused_devices=("none/CPU:0",))


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    monkeypatch.setattr("llmpq.remote.shared_stages.ray_session", lambda *_: nullcontext())
    monkeypatch.setattr("llmpq.run.run.replan_after_loss", lambda *_: plan.spec)


@pytest.fixture
def switch_at(monkeypatch: pytest.MonkeyPatch, other: PlanSpec) -> Any:
    """Makes the run switch once, when it is asked for the n-th time."""

    def plan_switch(count: int, how: Literal["drain", "replay"]) -> None:
        asked = 0

        def switch(self: DriftControl, progress: Any) -> Switch | None:
            nonlocal asked
            asked += 1
            return Switch(other, how, 9.0, 1.0) if asked == count else None

        monkeypatch.setattr(DriftControl, "switch", switch)

    return plan_switch


def rows(bad_from: int = ROWS) -> Iterator[Row | BadRow]:
    for i in range(ROWS):
        yield BadRow(str(i), "bad") if i % 9 == 4 or i >= bad_from else Row(str(i), token_ids=(3,))


def ids(results: list[Result]) -> list[int]:
    return sorted(int(result.custom_id) for result in results)


@pytest.mark.parametrize("count", [1, 20, 45, 53])
@pytest.mark.parametrize("how", ["drain", "replay"])
def test_every_row_has_one_result(
    plan: Plan, other: PlanSpec, switch_at: Any, how: Literal["drain", "replay"], count: int
) -> None:
    switch_at(count, how)
    run = Pretended(plan.spec)
    plans: list[PlanSpec] = []
    run.on_plan.append(plans.append)
    results = list(run.results(rows(), Tally(ROWS, 0, 0, 8 * ROWS)))
    assert ids(results) == list(range(ROWS))
    assert run._shared.plan is other, "a session would go on with it"
    assert sum(result.error is not None for result in results) == 7
    assert plans == [other]
    replayed = sum(len(result.token_ids) == 2 for result in results)
    assert (replayed > 0) is (how == "replay" and count < 53)
    first, *second = (group.ended for group in run.groups)
    started = count + (AT_ONCE - 1 if how == "drain" else 0) < 53
    assert len(second) == started
    assert first == min(53, count + (AT_ONCE - 1 if how == "drain" else 0))
    assert run.summary is not None
    assert run.summary.prompts == ROWS


def test_no_stages_are_started_where_only_bad_rows_are_left(plan: Plan, switch_at: Any) -> None:
    switch_at(20, "drain")
    run = Pretended(plan.spec)
    assert ids(list(run.results(rows(bad_from=29)))) == list(range(ROWS))
    assert len(run.groups) == 1


@pytest.mark.parametrize("how", ["drain", "replay"])
def test_a_stop_in_the_middle_loses_and_doubles_nothing(
    plan: Plan, switch_at: Any, how: Literal["drain", "replay"]
) -> None:
    """What has no result then is what the next run is given."""
    for stop in range(15, 35):
        switch_at(20, how)
        results = Pretended(plan.spec).results(rows())
        given = [next(results) for _ in range(stop)]
        results.close()
        done = {each.custom_id for each in given}
        assert len(done) == stop
        left = (row for row in rows() if row.custom_id not in done)
        assert ids([*given, *Pretended(plan.spec).results(left)]) == list(range(ROWS))


@pytest.mark.parametrize("lost_at", [10, 23])
def test_a_device_that_is_lost_before_or_while_it_drains(
    plan: Plan, switch_at: Any, lost_at: int
) -> None:
    switch_at(20, "drain")
    run = Pretended(plan.spec, loses_device_at=lost_at)
    assert ids(list(run.results(rows()))) == list(range(ROWS))
    assert [event for event in run.groups if event.plan is plan.spec]
