"""Rows that the plan has no room for run last, with a plan of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.recovery.policy import RecoveryEvent
from llmpq import Cluster, Plan, Sampling, Workload
from llmpq.cli.run import main
from llmpq.run.replan import replan
from planner.cluster.spec import ClusterSpec
from planner.plan.spec import PlanSpec
from quant.common.errors import SpecError
from tests.actors.models import random_prompts, reference

pytestmark = pytest.mark.usefixtures("local_ray")

CLUSTER = """
name: played
nodes: [{{name: a, accelerators: {{T4: {}}}}}]
emulate: {{time_scale: 0}}
"""
SHORT, LONG = Workload(6, 8, 4), Workload(2, 24, 12)
LENGTHS = (3, 20, 8, 9, 1, 24, 25, 5)
LIMITS = {4: 12, 7: 13}


def planned(model: Path, devices: int, workload: Workload) -> PlanSpec:
    cluster = Cluster(ClusterSpec.from_dict(yaml.safe_load(CLUSTER.format(devices))))
    options: dict[str, Any] = {"dtype": "float32", "bits": [16], "keep_all_devices": True}
    return cluster.plan(model, workload, **options).spec


@pytest.fixture(scope="module")
def spec(tiny: tuple[Path, Any]) -> PlanSpec:
    """Two plans of one stage each."""
    return replace(planned(tiny[0], 1, SHORT), long_rows=planned(tiny[0], 1, LONG))


PROMPTS = random_prompts(LENGTHS)


def rows() -> list[dict[str, Any]]:
    """Prompts of `LENGTHS`; rows of `LIMITS` may get more tokens than the plan has room for."""
    made: list[dict[str, Any]] = []
    for i, prompt in enumerate(PROMPTS):
        row: dict[str, Any] = {"custom_id": str(i), "prompt": list(prompt), "topic": {"of": i}}
        made.append(row | ({"max_new_tokens": LIMITS[i]} if i in LIMITS else {}))
    return made


def test_long_rows_come_last_with_the_same_tokens(tiny: tuple[Path, Any], spec: PlanSpec) -> None:
    events: list[RecoveryEvent] = []
    run = Plan(spec).run(rows(), Sampling(ignore_eos=True), on_event=events.append)
    results = {each.custom_id: each for each in run}
    assert {i: each.columns for i, each in results.items()} == {
        str(i): {"topic": {"of": i}} for i in range(len(PROMPTS))
    }
    good = {i: result for i, result in results.items() if result.error is None}
    assert set(list(good)[:3]) == {"0", "2"} | set(list(good)[2:3])
    assert set(list(good)[2:]) == {"1", "3", "4", "5"}, "after the others"
    for i, result in good.items():
        most = LIMITS.get(int(i), SHORT.new_tokens)
        expected = reference(tiny[1], PROMPTS[int(i)], most, ignore_eos=True)
        assert list(result.token_ids) == expected
    assert "25 tokens, the plan has room for 24" in str(results["6"].error)
    assert "13, the plan has room for 12" in str(results["7"].error)
    (event,) = events
    assert event.kind == "long rows"
    assert event.text.startswith("4 long prompts (of more than 8 tokens, 4 new ones) run now")
    summary = run.summary
    assert summary is not None
    assert (summary.prompts, summary.errors, len(summary.stages)) == (8, 2, 1)
    assert summary.generated_tokens == sum(len(each.token_ids) for each in good.values())


def test_a_limit_that_only_long_rows_have_sends_all_rows_there(spec: PlanSpec) -> None:
    events: list[RecoveryEvent] = []
    sampling = Sampling(ignore_eos=True, max_new_tokens=9)
    results = list(Plan(spec).run([[5, 6], [7]], sampling, on_event=events.append))
    assert [len(each.token_ids) for each in results] == [9, 9]
    assert [event.kind for event in events] == ["long rows"]
    with pytest.raises(SpecError, match="room for 12"):
        Plan(spec).run([[5]], Sampling(max_new_tokens=13))


@pytest.mark.parametrize("has_long", [True, False])
def test_slots_hold_a_row_of_just_their_tokens_and_none_more(
    tiny: tuple[Path, Any], spec: PlanSpec, has_long: bool
) -> None:
    """Neither of the rows is beyond the longest prompt or the longest output."""
    made = planned(tiny[0], 1, Workload(2, 8, 6, slot_tokens=10))
    plan = replace(made, long_rows=spec.long_rows if has_long else None)
    prompts = random_prompts((4, 8, 5, 8))
    limits = (6, 2, 6, 3)
    rows = [
        {"custom_id": str(i), "prompt": list(prompts[i]), "max_new_tokens": limits[i]}
        for i in range(4)
    ]
    events: list[RecoveryEvent] = []
    run = Plan(plan).run(rows, Sampling(ignore_eos=True), on_event=events.append)
    results = {each.custom_id: each for each in run}
    good = range(4) if has_long else range(2)
    for i in good:
        expected = reference(tiny[1], prompts[i], limits[i], ignore_eos=True)
        assert list(results[str(i)].token_ids) == expected
    if has_long:
        assert events[0].text.startswith("2 long prompts (of more than 8 tokens, ")
        assert "6 new ones, or 10 of both" in events[0].text
    else:
        assert (
            "5 tokens and max_new_tokens is 6, the plan has room for 8 and 6, together 10"
            in str(results["2"].error)
        )
        assert results["3"].error


def test_the_plan_for_long_rows_is_checked_too(spec: PlanSpec) -> None:
    assert spec.long_rows is not None
    stage = spec.long_rows.stages[0]
    broken = replace(stage, memory_bytes=stage.memory_bytes + 1)
    stages = (broken, *spec.long_rows.stages[1:])
    plan = Plan(replace(spec, long_rows=replace(spec.long_rows, stages=stages)))
    with pytest.raises(SpecError, match=r"the plan: field long_rows: field stages\.0\.memory"):
        plan.run([[3]])


def test_devices_that_are_lost_are_in_neither_plan(tiny: tuple[Path, Any]) -> None:
    spec = replace(planned(tiny[0], 2, SHORT), long_rows=planned(tiny[0], 2, LONG))
    left = replan(PlanSpec.from_json(spec.to_json()), ["a/T4-16GB:1"])
    assert left.long_rows is not None
    for plan, workload in ((left, SHORT), (left.long_rows, LONG)):
        assert [stage.device for stage in plan.stages] == ["a/T4-16GB:0"]
        assert plan.workload == workload


def test_a_job_with_long_rows_ends_once_and_goes_on_after_a_stop(
    spec: PlanSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The stop comes when the first long row has ended."""
    spec.save(tmp_path / "plan.json")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    files = {"plan": "plan.json", "input": "in.jsonl", "output": "out.jsonl"}
    command = [f"--{name}={tmp_path / file}" for name, file in files.items()]
    command += ["--ignore_eos", "--address=auto", "--shard_rows=1"]
    monkeypatch.setattr("llmpq.cli.run._write_all", stopped_at(5))
    assert main(command) == 130
    assert "interrupted" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(command) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "5 of 8 rows are done, 3 are left" in said
    assert "long prompts (of more than 8 tokens" in said
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(row["custom_id"] for row in written) == [str(i) for i in range(8)]
    failed = {row["custom_id"] for row in written if row["error"]}
    assert failed == {"6", "7"}


def stopped_at(count: int) -> Any:
    """Writes so many results, and is then interrupted."""

    def write(run: Any, job: Any, *_: Any) -> None:
        results = run.results(job.todo())
        for _ in range(count):
            job.write(next(results))
        results.close()
        raise KeyboardInterrupt

    return write


def test_a_session_goes_back_to_the_plan_of_the_others(
    tiny: tuple[Path, Any], spec: PlanSpec
) -> None:
    with Plan(spec).session(Sampling(ignore_eos=True)) as session:
        for _ in range(2):
            good = [result for result in session.run(rows()) if result.error is None]
            assert {result.custom_id for result in good} == {"0", "1", "2", "3", "4", "5"}
            for result in good:
                most = LIMITS.get(int(result.custom_id), SHORT.new_tokens)
                prompt = PROMPTS[int(result.custom_id)]
                expected = reference(tiny[1], prompt, most, ignore_eos=True)
                assert list(result.token_ids) == expected
            assert session.spec is spec
