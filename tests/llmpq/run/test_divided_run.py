"""Runs of a plan whose stages do one phase each: the command, its journal, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.handover.group import DividedGroup
from llmpq import Plan
from llmpq.cli.jobs import main as jobs_main
from llmpq.cli.run import main
from llmpq.errors import SpecError
from planner.fleet.fleet_spec import FleetSpec
from planner.plan.spec import PlanSpec, undivided
from quant.common.errors import DeviceError
from tests.actors.models import random_prompts, references
from tests.llmpq.conftest import NEW_TOKENS, PROMPT_LENGTH
from tests.llmpq.divided_plans import divided_plan
from tests.llmpq.fake_jobs import write_prompts
from tests.quant.checkpoint.gguf.written import write_gguf

pytestmark = pytest.mark.usefixtures("local_ray")

KINDS = 12
PROMPTS = random_prompts([1 + (5 * i) % PROMPT_LENGTH for i in range(KINDS)])
ROWS = [list(PROMPTS[i % KINDS]) for i in range(40)]


@pytest.fixture(scope="module")
def spec(tiny: tuple[Path, Any]) -> PlanSpec:
    return divided_plan(tiny[0], (0.01,), (0.0009, 0.0005))


@pytest.fixture(scope="module")
def greedy(tiny: tuple[Path, Any]) -> list[list[int]]:
    return references(tiny[1], PROMPTS, NEW_TOKENS)


def test_the_command_runs_it_and_its_job_shows_all_stages(
    spec: PlanSpec,
    greedy: list[list[int]],
    tmp_path: Path,
    no_waiting: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, output = tmp_path / "plan.json", tmp_path / "out.jsonl"
    spec.save(path)
    assert PlanSpec.load(path) == spec
    rows = [{"custom_id": str(i), "prompt": row} for i, row in enumerate(ROWS)]
    write_prompts(tmp_path / "in.jsonl", *rows)
    command = ["--plan", str(path), "--input", str(tmp_path / "in.jsonl"), "--output", str(output)]
    assert main(command) == 0
    summary = capsys.readouterr().err
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    found = {line["custom_id"]: line["token_ids"] for line in lines}
    assert found == {str(i): greedy[i % KINDS] for i in range(len(ROWS))}
    assert jobs_main(["show", str(output)]) == 0
    for shown in (summary, capsys.readouterr().out):
        assert all(name in shown for name in ("p0/", "T4-16GB:0", "d0/", "d1/"))


def test_a_session_keeps_the_stages_from_run_to_run(
    spec: PlanSpec, greedy: list[list[int]]
) -> None:
    with Plan(spec).session() as session:
        group = session._shared.stages.of(session.spec)
        assert isinstance(group, DividedGroup)
        for rows in (ROWS, ROWS[:7]):
            results = session.run(rows)
            found = {result.custom_id: list(result.token_ids) for result in results}
            assert found == {f"row-{i}": greedy[i % KINDS] for i in range(len(rows))}
            summary = results.summary
            assert summary is not None
            assert summary.plan == undivided(spec)
            prompts = sum(map(len, rows))
            assert [stage.prefill_tokens for stage in summary.stages] == [prompts, 0, 0]
            assert summary.generated_tokens == sum(map(len, found.values()))
        left = session.run(ROWS)
        next(left)
        left.close()
        again = {result.custom_id: list(result.token_ids) for result in session.run(ROWS)}
        assert again == {f"row-{i}": greedy[i % KINDS] for i in range(len(ROWS))}
        assert session._shared.stages.of(session.spec) is group


def test_heads_are_computed_once_where_prompts_are_prefilled(
    tiny: tuple[Path, Any], tmp_path: Path
) -> None:
    """Of a GGUF file, which is no folder."""
    heads, tails = random_prompts((64, 80)), random_prompts(range(2, 17, 2), seed=1)
    rows = [list(heads[i % 2] + tail) for i, tail in enumerate(tails)]
    model = tiny[1]
    file = write_gguf(model, tmp_path / "tiny.gguf")
    spec = divided_plan(file, (0.01,), (0.01,), lengths=(96, NEW_TOKENS))
    expected = references(model, [tuple(row) for row in rows], NEW_TOKENS)
    with Plan(spec).session() as session:
        for again in (False, True):
            results = session.run(rows)
            found = {result.custom_id: list(result.token_ids) for result in results}
            assert found == {f"row-{i}": tokens for i, tokens in enumerate(expected)}
            summary = results.summary
            assert summary is not None
            computed = sum(map(len, tails)) + (0 if again else 64 + 80)
            assert [stage.prefill_tokens for stage in summary.stages] == [computed, 0]


def test_all_stages_of_a_plan_are_shown_in_the_order_of_a_prompts_way(spec: PlanSpec) -> None:
    shown = undivided(spec)
    assert [stage.index for stage in shown.stages] == [0, 1, 2]
    assert [stage.role for stage in shown.stages] == ["prefill", "decode", "decode"]
    assert len(shown.predicted.busy_share) == 3
    assert shown.stages[shown.predicted.decode_bottleneck].role == "decode"
    assert undivided(shown) is shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trace": "t.json"}, "trace has no effect with a plan of stages that only decode"),
        ({"policy": "orca"}, "policy orca needs stages that do both phases"),
    ],
)
def test_options_that_need_stages_that_do_both_phases_are_refused(
    spec: PlanSpec, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        Plan(spec).run(ROWS, **options)


def changed(spec: PlanSpec, **fields: Any) -> PlanSpec:
    """The plan with other fields of its stages that prefill."""
    assert spec.prefill_plan is not None
    return replace(spec, prefill_plan=replace(spec.prefill_plan, **fields))


def test_plans_whose_parts_do_not_go_together_are_refused(spec: PlanSpec) -> None:
    assert spec.prefill_plan is not None
    (stage,) = spec.prefill_plan.stages
    cases = {
        r"field prefill_plan\.stages\.0\.device: 'd0/.*' stands in stages\.\d\.device already": [
            replace(stage, device="d0/A100-SXM4-40GB:0")
        ],
        r"prefill_plan: stages hold 4 of 5 layers": [
            replace(stage, layers=range(4), bitwidths=(16,) * 4)
        ],
        "a stage that should only prefill has another role": [replace(stage, role="both")],
    }
    for words, stages in cases.items():
        with pytest.raises(SpecError, match=words):
            Plan(changed(spec, stages=tuple(stages))).run(ROWS)
    with pytest.raises(SpecError, match=r"prefill_plan\.kv_bits: 8 where .* that decode have 16"):
        Plan(changed(spec, kv_bits=8)).run(ROWS)
    with pytest.raises(SpecError, match="it is run as it is"):
        DividedGroup(spec.prefill_plan, "model")


def test_no_fleet_has_such_pipelines(spec: PlanSpec, fleet: Any) -> None:
    plans = (fleet.spec.replicas[0], spec)
    mixed: FleetSpec = replace(fleet.spec, replicas=plans)
    with pytest.raises(SpecError, match=r"replicas\.1\.prefill_plan: pipelines of a fleet have"):
        type(fleet)(mixed).run(ROWS)


def test_no_host_memory_for_a_prompt_is_refused_before_anything_is_loaded(
    spec: PlanSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.plan.kv_copies.UNSTATED_BYTES", 10_000)
    with pytest.raises(DeviceError, match=r"keys and values of \d+ tokens, but prompts have up to"):
        DividedGroup(spec, "model")
