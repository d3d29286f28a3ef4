"""Fleets on Ray: pipelines of unequal make-up give the tokens of one, also when one is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import ray

from actors.messages import Request, Sampling
from actors.recovery.policy import OnEvent, Recovery, RecoveryEvent
from actors.replicas.pool import ReplicaPool
from actors.replicas.replica import Restarts
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Fleet, Plan
from llmpq.cli.run import main
from llmpq.errors import SpecError
from planner.fleet.fleet_spec import shown_plan
from planner.plan.spec import PlanSpec
from tests.actors.models import random_prompts, references
from tests.llmpq.conftest import NEW_TOKENS, PROMPT_LENGTH
from tests.llmpq.fake_jobs import write_prompts

pytestmark = pytest.mark.usefixtures("local_ray")

KINDS = 12
PROMPTS = random_prompts([1 + (5 * i) % PROMPT_LENGTH for i in range(KINDS)])
ROWS = [list(PROMPTS[i % KINDS]) for i in range(60)]
COUNT, PAUSE_AT = 240, 160


@pytest.fixture(scope="module")
def greedy(tiny: tuple[Path, Any]) -> list[list[int]]:
    """What transformers' `generate` gives for each prompt."""
    return references(tiny[1], PROMPTS, NEW_TOKENS)


def test_a_session_gives_the_tokens_of_generate_by_all_pipelines(
    fleet: Fleet, greedy: list[list[int]]
) -> None:
    events: list[RecoveryEvent] = []
    assert [len(plan.stages) for plan in fleet.plans] == [1, 2]
    with fleet.session(on_event=events.append) as session:
        pool = session._shared.stages.of(session.spec)
        assert isinstance(pool, ReplicaPool)
        wait_all_ready(pool)
        for rows in (ROWS, ROWS[:7]):
            results = session.run(rows)
            found = {result.custom_id: list(result.token_ids) for result in results}
            assert found == {f"row-{i}": greedy[i % KINDS] for i in range(len(rows))}
            summary = results.summary
            assert summary is not None
            assert summary.prompts == len(rows)
            assert sum(stage.prefill_tokens for stage in summary.stages[:2]) == sum(map(len, rows))
            assert summary.stages[1].prefill_tokens == summary.stages[2].prefill_tokens
            if rows is ROWS:
                assert all(stage.prefill_tokens > 0 for stage in summary.stages)
        left = session.run(ROWS)
        next(left)
        left.close()
        again = {result.custom_id: list(result.token_ids) for result in session.run(ROWS)}
        assert again == {f"row-{i}": greedy[i % KINDS] for i in range(len(ROWS))}
    assert events == []


def wait_all_ready(pool: ReplicaPool) -> None:
    changed = pool._board.changed
    with changed:
        assert changed.wait_for(
            lambda: all(replica.status == "ready" for replica in pool.replicas), 60
        )


def test_a_pipeline_that_is_killed_returns_and_no_row_is_lost(
    tiny: tuple[Path, Any], fleet: Fleet, greedy: list[list[int]]
) -> None:
    """With no retries of its own; the source waits until it is back."""
    events: list[RecoveryEvent] = []
    is_back = Event()

    def hear(event: RecoveryEvent) -> None:
        events.append(event)
        if "is back" in event.text:
            is_back.set()

    def make(plan: PlanSpec, on_event: OnEvent) -> StageGroup:
        options = GroupOptions(recovery=Recovery(retries=0), on_event=on_event)
        return StageGroup(plan, str(tiny[0]), options)

    def source() -> Iterator[Request]:
        for i in range(COUNT):
            if i == PAUSE_AT:
                assert is_back.wait(120)
            yield Request(str(i), PROMPTS[i % KINDS], NEW_TOKENS, Sampling())

    restarts = Restarts(pause_s=0.1)
    pool = ReplicaPool(shown_plan(fleet.spec), fleet.spec.replicas, make, hear, restarts)
    found: dict[str, list[int]] = {}
    with pool:
        wait_all_ready(pool)
        for finished in pool.generate(source()):
            for each in finished:
                assert each.custom_id not in found
                found[each.custom_id] = list(each.token_ids)
            if len(found) >= COUNT // 8 and not events:
                kill_last_stage(pool.replicas[1].group)
        assert pool.unfinished() == ()
        figures = pool.observer.figures()
    assert found == {str(i): greedy[i % KINDS] for i in range(COUNT)}
    assert {event.kind for event in events} == {"replica"}
    assert "replica 1 (1 V100-SXM2-16GB + 1 A100-SXM4-40GB) is lost" in events[0].text
    assert "rows go to the others" in events[0].text
    assert figures is not None
    assert figures[1].prefill_tokens > 0, "of its second life"


def kill_last_stage(group: Any) -> None:
    if group is not None:
        ray.kill(group.stages[-1].actor)


def test_the_command_runs_a_fleet_and_keeps_its_journal(
    fleet: Fleet, greedy: list[list[int]], tmp_path: Path, no_waiting: None
) -> None:
    path, output = tmp_path / "fleet.json", tmp_path / "out.jsonl"
    fleet.save(path)
    assert Fleet.load(path).spec == fleet.spec
    rows = [{"custom_id": str(i), "prompt": row} for i, row in enumerate(ROWS)]
    write_prompts(tmp_path / "in.jsonl", *rows)
    command = ["--plan", str(path), "--input", str(tmp_path / "in.jsonl"), "--output", str(output)]
    assert main(command) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    found = {line["custom_id"]: line["token_ids"] for line in lines}
    assert len(lines) == len(ROWS)
    assert found == {str(i): greedy[i % KINDS] for i in range(len(ROWS))}
    assert main(command) == 0, "all is done"


@pytest.mark.parametrize(
    ("options", "words"),
    [({"replan": "auto"}, "replan auto has no effect"), ({"trace": "t.json"}, "trace has no")],
)
def test_what_a_fleet_cannot_do_is_refused(
    fleet: Fleet, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        fleet.run(ROWS, **options)


def test_a_fleet_is_no_plan(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    fleet.save(path)
    with pytest.raises(SpecError, match="a fleet of pipelines where one plan belongs"):
        Plan.load(path)
    assert "2 pipelines" in repr(fleet)
    assert "V100" in fleet._repr_html_()
