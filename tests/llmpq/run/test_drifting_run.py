"""A run whose answers are three times as long as planned: it says so, takes another plan, and gives
every row one result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors.handover.group import DividedGroup
from actors.recovery.policy import RecoveryEvent
from actors.stage_group import StageGroup
from llmpq import Cluster, Plan, Sampling
from llmpq.run.monitor import monitor
from llmpq.run.replan import reschedule_measured
from llmpq.run.switching import Measured
from planner.lengths import LengthDistribution, Lengths, RequestLengths
from planner.plan.spec import PlanSpec
from planner.scheduling import RequestSchedule
from planner.workload import Job
from quant.common.errors import InfeasibleError
from tests.llmpq.divided_plans import divided_plan
from tests.planner.bounded import FORECAST, bounded

pytestmark = pytest.mark.usefixtures("local_ray")

CLUSTER = """
name: two
nodes:
  - {name: a, accelerators: {T4: 2}}
emulate: {time_scale: 0}
"""
PROMPT, NEW, PLANNED_NEW, ROWS = 4, 12, 4, 300
SOON_S = 0.2


LENGTHS = Lengths((PROMPT,) * 100, (PLANNED_NEW,) * 99 + (NEW,))


@pytest.fixture(scope="module")
def planned(
    tiny: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., PlanSpec]:
    """Plans of the job by their slots, for `LENGTHS` unless others are given."""
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    path.write_text(CLUSTER)
    cluster = Cluster.from_yaml(path)
    options: dict[str, Any] = {"dtype": "float32", "bits": [16], "keep_all_devices": True}
    options["policy"] = "static"

    def with_slots(slots: int, lengths: Lengths = LENGTHS) -> PlanSpec:
        return cluster.plan(tiny[0], Job(ROWS, lengths), in_flight=slots, **options).spec

    return with_slots


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short windows of few rows, stages that are asked about often, and any saving is worth a
    switch.
    """
    monkeypatch.setattr("llmpq.run.monitor.monitor", partial(monitor, interval_s=SOON_S))
    monkeypatch.setattr("llmpq.run.switching.LOOK_S", SOON_S)
    monkeypatch.setattr("llmpq.run.drift.LEAST_S", SOON_S)
    monkeypatch.setattr("llmpq.run.drift.LEAST_ROWS", 24)
    monkeypatch.setattr("llmpq.run.switching.MARGIN", 0.0)


def run(plan: PlanSpec, count: int = ROWS, **options: Any) -> list[str]:
    """The texts of all events; every row must have one result of all its tokens."""
    events: list[RecoveryEvent] = []
    rows = [{"custom_id": str(i), "prompt": [3 + i % 90] * PROMPT} for i in range(count)]
    sampling = Sampling(ignore_eos=True, max_new_tokens=NEW)
    results = list(Plan(plan).run(rows, sampling, on_event=events.append, **options))
    assert sorted(int(result.custom_id) for result in results) == list(range(count))
    assert all(len(result.token_ids) == NEW for result in results)
    return [f"{event.kind}: {event.text}" for event in events]


@pytest.mark.usefixtures("quick")
def test_answers_thrice_as_long_lead_to_another_plan(
    planned: Callable[..., PlanSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is there at once, so that rows are left for it however slow planning is."""
    asked: list[Measured] = []
    first, larger = planned(8), planned(32, Lengths((PROMPT,) * 100, (NEW,) * 100))

    def again(plan: PlanSpec, measured: Measured, model: str | None) -> PlanSpec:
        asked.append(measured)
        return larger

    monkeypatch.setattr("llmpq.run.run.replan_measured", again)
    drift, switched = run(first, replan="auto")
    assert drift.startswith("drift: the run does not follow its plan: ")
    assert "12 tokens an output, planned 4.08 (+194%)" in drift
    assert switched.startswith("replanned: planned again from what was measured")
    (measured,) = asked
    assert measured.lengths is not None
    assert set(measured.lengths.output_tokens) == {NEW}
    assert 0 < measured.prompts_left <= ROWS
    assert not measured.slowdowns


SCHEDULE = RequestSchedule("rra", 4, 8, 3, 2, 2, float(PROMPT))
DIVIDED = RequestSchedule("waa-c", 2, 4, 1, 2, 2, float(PROMPT))


class Watch:
    """The groups that start, and the lengths for which another schedule is asked for; it is `ready`
    at once, or searched.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        group_class: type[Any],
        ready: PlanSpec | None = None,
    ) -> None:
        self.asked: list[RequestLengths] = []
        self.started: list[Any] = []
        enter = group_class.__enter__

        def entered(group: Any) -> Any:
            self.started.append(group)
            return enter(group)

        def again(plan: PlanSpec, lengths: RequestLengths, *others: Any) -> PlanSpec:
            self.asked.append(lengths)
            return ready or reschedule_measured(plan, lengths, *others)

        monkeypatch.setattr(group_class, "__enter__", entered)
        monkeypatch.setattr("llmpq.run.run.reschedule_measured", again)


def answers_of(tokens: int) -> RequestLengths:
    return RequestLengths(*(LengthDistribution((each,), (1.0,)) for each in (PROMPT, tokens)))


def expecting_short(spec: PlanSpec) -> PlanSpec:
    """A plan that was made for answers a third as long."""
    return replace(spec, latency=replace(FORECAST, lengths=answers_of(PLANNED_NEW)))


@pytest.mark.usefixtures("quick")
def test_another_schedule_is_followed_by_the_same_stages(
    planned: Callable[..., PlanSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself: nothing is loaded again, and no row waits. The other one is found before, so that
    rows are left for it however slow the search is.
    """
    spec = expecting_short(bounded(planned(8, Lengths((PROMPT,), (NEW,))), SCHEDULE))
    found = reschedule_measured(spec, answers_of(NEW))
    watch = Watch(monkeypatch, StageGroup, found)
    drift, followed = run(spec)
    assert "12 tokens an output, planned 4 (+200%); another schedule is looked for" in drift
    assert followed.startswith(
        "rescheduled: another schedule for the lengths that were measured: prefill_requests 4 to "
    )
    (lengths,), (group,) = watch.asked, watch.started
    assert (lengths.prompts.lengths, lengths.outputs.lengths) == ((PROMPT,), (NEW,))
    assert group.sizes.schedule != SCHEDULE
    assert group.sizes.schedule == group.plan.policy.schedule
    assert run(spec, 100, replan="never") == [
        "drift: the run does not follow its plan: 12 tokens an output, planned 4 (+200%); run with "
        "--replan auto, or plan again with --lengths and --profiles of what was measured"
    ]


@pytest.mark.rare
@pytest.mark.usefixtures("quick")
def test_stages_of_one_phase_each_follow_another_schedule(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests decode, as there are slots; both kinds of stages are the same."""
    spec = expecting_short(divided_plan(tiny[0], schedule=DIVIDED, lengths=(PROMPT, NEW)))
    watch = Watch(monkeypatch, DividedGroup)
    drift, followed = run(spec, 150, replan="auto")
    assert "12 tokens an output, planned 4 (+200%); another schedule is looked for" in drift
    assert followed.startswith("rescheduled: another schedule for the lengths that were measured: ")
    (lengths,), (group,) = watch.asked, watch.started
    assert (lengths.prompts.lengths, lengths.outputs.lengths) == ((PROMPT,), (NEW,))
    found = group.plan.policy.schedule
    assert found.kind == "waa-c"
    assert found.decode_requests > 4
    assert f"decode_requests 4 to {found.decode_requests}" in followed
    assert [each.sizes.schedule for each in (group.prefill, group.decode)] == [found, found]


@pytest.mark.rare  # `test_control.py` finds no other plan for a pretend run
@pytest.mark.usefixtures("quick")
def test_without_another_plan_the_run_goes_on(
    planned: Callable[..., PlanSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(*_: Any) -> PlanSpec:
        raise InfeasibleError("nothing fits")

    monkeypatch.setattr("llmpq.run.run.replan_measured", again)
    drift, none = run(planned(8), 3 * ROWS, replan="auto")
    assert "planned 4.08 (+194%)" in drift
    assert none == "drift: no other plan: nothing fits; the run goes on as it is"
