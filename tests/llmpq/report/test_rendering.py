"""A page says when and by what it was made, and the command that is named makes the plan again."""

from __future__ import annotations

import shlex
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from llmpq import Cluster, Job, Plan, Workload
from llmpq.cli import plan as plan_cli
from llmpq.report.page import report_page
from llmpq.report.rendering import making
from llmpq.version import llmpq_version
from planner.plan.spec import PlanSpec
from tests.llmpq.report.pages import Page
from tests.paths import DEMO_MODEL, SPECS

DEMO = SPECS / "demo_mixed_cpu.yaml"


def test_date_version_and_command_are_on_the_page() -> None:
    plan = Cluster.from_yaml(DEMO).plan(DEMO_MODEL, Workload(2, 16, 4), theta=1.0).spec
    east = datetime(2026, 11, 23, 14, 5, tzinfo=timezone(timedelta(hours=1)))
    made = making(plan, ["llmpq", "plan", "--model", "a model"], east)
    text = Page(report_page(plan, None, (), made)).text
    assert f"Plan of llmpq {llmpq_version()}, 2026-11-23 13:05 UTC" in text
    assert "llmpq plan --model 'a model'" in text
    assert abs(making(plan).written - datetime.now(UTC)) < timedelta(minutes=5)


@pytest.mark.parametrize(
    ("work", "options"),
    [
        (Workload(4, 64, 12), {"theta": 1.0, "bits": (4, 8, 16), "keep_all_devices": True}),
        (Job.of(12, 64, 12), {"in_flight": 4, "quality": "fast", "memory_margin": 0.05}),
    ],
)
def test_the_command_of_a_loaded_plan_makes_it_again(
    work: Workload | Job,
    options: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Cluster.from_yaml(DEMO).plan(DEMO_MODEL, work, **options).save(tmp_path / "first.json")
    first = Plan.load(tmp_path / "first.json").spec
    made = making(first)
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(made.cluster)
    program, command, *arguments = shlex.split(made.command)
    assert (program, command) == ("llmpq", "plan")
    assert plan_cli.main(arguments) == 0
    again = PlanSpec.load("plan.json")
    assert replace(again, solver=first.solver, importance=first.importance) == first
