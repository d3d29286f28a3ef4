"""The policy of a job that names none: that of the better forecast, and which plans keep theirs."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llmpq import Cluster, Workload
from llmpq.report.answers import job_answers
from llmpq.run.options import RunOptions
from llmpq.run.replan import replan
from llmpq.workload.input_job import InputJob, LongRows
from llmpq.workload.long_rows import NamedRows
from planner.lengths import Lengths
from planner.options import PlanOptions
from planner.plan.parts import PlansBeside
from planner.plan.spec import PlanSpec
from planner.search.find import _best_of
from planner.workload import Job
from tests.llmpq.jobs_of_prompts import job_plan
from tests.planner.plan_alone import alone

MODEL, OPTIONS = "opt-1.3b", {"bits": (16,)}
UNLIKE = Job(400, Lengths((200,) * 31 + (1500,), (40,) * 31 + (400,)))
"""So unlike that a slot of the longest for each holds far fewer (of `orca` 2.6 times as many)."""
SHORT_ANSWERS = Job(400, Lengths((1024, 600, 800), (4, 8, 6)))
"""Prefill decides, and parts of prompts have no company."""


def planned(workload: Workload | Job | InputJob, **options: Any) -> PlanSpec:
    with alone():
        cluster = Cluster.from_counts(["T4"], [2])
        return cluster.plan(MODEL, workload, **(OPTIONS | options)).spec


@pytest.fixture(scope="module")
def unlike() -> PlanSpec:
    return planned(UNLIKE)


def test_a_job_of_unlike_lengths_has_the_policy_of_the_better_forecast(unlike: PlanSpec) -> None:
    static = planned(UNLIKE, policy="static")
    assert (unlike.policy.name, static.policy.name) == ("orca", "static")
    rate, other = unlike.predicted.tokens_per_s, static.predicted.tokens_per_s
    assert rate > 1.1 * other
    assert static.beside.other_policy is None
    said = [answer for _, answer in job_answers(unlike) if answer.startswith("policy")]
    assert said == [
        f"policy orca: forecast {rate / other:.2f} times static, {other:.0f} tokens/s "
        "(--policy static)"
    ]


@pytest.mark.parametrize(
    ("workload", "options"),
    [
        (SHORT_ANSWERS, {}),
        (Job.of(400, 200, 40), {}),
        (Workload(8, 1500, 400), {}),
        (UNLIKE, {"decode_micro_batch": 8}),
        (UNLIKE, {"method": "uniform"}),
    ],
    ids=["short answers", "alike", "one batch", "its micro-batches", "a baseline"],
)
def test_the_others_are_planned_for_static(
    workload: Workload | Job, options: dict[str, Any]
) -> None:
    assert planned(workload, **options).policy.name == "static"


def test_long_rows_have_the_policy_of_the_others() -> None:
    """By themselves they would be planned for `static`, as they are alike."""
    long = LongRows(Job.of(8, 1600, 400), NamedRows(8, ""), 0.5)
    plan = planned(InputJob(UNLIKE, long))
    assert plan.long_rows is not None
    assert (plan.policy.name, plan.long_rows.policy.name) == ("orca", "orca")


def test_a_plan_keeps_its_policy_when_it_is_run_and_planned_again(unlike: PlanSpec) -> None:
    """Also a file from before policies were compared, whose options and policy name none."""
    content = json.loads(planned(UNLIKE, policy="static").to_json())
    del content["origin"]["options"]["policy"], content["policy"], content["digest"]
    for plan in (PlanSpec.from_json(json.dumps(content)), unlike):
        again = PlanSpec.from_json(plan.to_json())
        assert RunOptions().scheduling(again) == plan.policy
        with alone():
            fewer = replan(again, ["node0/T4-16GB:1"])
        assert fewer.policy.name == plan.policy.name


def priced(policy: str, rate: float, omega: float, kv_bits: int = 16) -> Any:
    plan = job_plan()
    return SimpleNamespace(
        plan=replace(
            plan,
            predicted=replace(plan.predicted, tokens_per_s=rate),
            solver=replace(plan.solver, sensitivity=omega),
            beside=PlansBeside(),
            kv_bits=kv_bits,
        ),
        costs=SimpleNamespace(generated_tokens=300_000.0, theta=0.0),
        policy=policy,
    )


@pytest.mark.parametrize(
    ("orca_rate", "asked", "taken"),
    [
        (105.0, {"quality": "fast"}, "orca"),
        (105.0, {"quality": "balanced"}, "static"),
        (105.0, {"quality": "high"}, "static"),
        (120.0, {"quality": "balanced"}, "orca"),
        (120.0, {"quality": "high"}, "orca"),
        (120.0, {"theta": 10_000.0}, "static"),
        (120.0, {"max_omega": 1.0}, "orca"),
        (120.0, {"max_latency_s": 9e9}, "static"),
        (100.5, {"quality": "fast"}, "static"),
    ],
)
def test_what_is_asked_for_decides_between_policies(
    orca_rate: float, asked: dict[str, Any], taken: str
) -> None:
    """300,000 tokens at 100 a second without any loss, or faster with all of it: a tenth of the
    time in `balanced`, and of it in `high`.
    """

    found = [priced("static", 100.0, 0.0), priced("orca", orca_rate, 0.2)]
    best: Any = _best_of(found, PlanOptions.of(asked))
    assert best.policy == taken


def test_keys_and_values_have_16_bits_under_the_policy_that_has_room_for_them() -> None:
    found = [priced("static", 200.0, 0.0, kv_bits=8), priced("orca", 100.0, 0.0)]
    best: Any = _best_of(found, PlanOptions.of({"kv_bits": "auto"}))
    assert best.policy == "orca"
