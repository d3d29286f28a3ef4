"""Why fewer bits are not faster, and which changed conditions are worth a row."""

from __future__ import annotations

from functools import cache

from llmpq import Cluster, Plan, Workload
from llmpq.report.formatting import seconds
from llmpq.report.kernels import kernel_reasons
from llmpq.report.page import report_page
from llmpq.report.reasons import changed_plans
from planner.explanation.planned_assignment import planned_assignment
from planner.explanation.what_if import Kind, Question, WhatIfAnswer, WhatIfOptions
from planner.workload import MicroBatches
from tests.llmpq.jobs_of_prompts import small_plan
from tests.llmpq.report.pages import Page


def answer(
    kind: Kind, change_s: float, quality_s: float = 0.0, stage: int = 0, theta: float = 1.0
) -> WhatIfAnswer:
    asked = Question(kind, theta if kind == "theta" else 2.0**30, stage)
    return WhatIfAnswer(
        question=asked,
        theta=theta,
        sizes=MicroBatches(1, 1),
        latency_s=1.0,
        predicted_s=1.0,
        sensitivity=1.0,
        latency_change_s=change_s,
        quality_change_s=quality_s,
        layers_with_other_bits=1,
        layers_moved=0,
        proven=True,
    )


def test_only_what_gains_enough_has_a_row() -> None:
    seconds = small_plan().predicted.latency_s
    answers = (
        answer("memory", -0.009 * seconds),
        answer("memory", -0.5 * seconds, stage=1),
        answer("memory", 0.0, stage=2),
        answer("links", -0.001 * seconds),
        answer("theta", 0.0, 0.0, theta=4.0),
        answer("theta", 0.5 * seconds, -0.4 * seconds, theta=8.0),
    )
    stage = small_plan().stages[0]
    plan = small_plan().__class__(**{**vars(small_plan()), "stages": (stage, stage, stage)})
    rows, left_out = changed_plans(answers, plan, 1e-9, 0.01 * seconds)
    assert [answer for _, _, answer, _ in rows] == [answers[1], answers[5]]
    assert left_out == "more memory on stage 0 or 2; faster links; theta 4"


@cache
def on_t4() -> Plan:
    """OPT-6.7B at 8 bit on a T4, whose 4-bit kernel restores weights."""
    return Cluster.from_counts(["T4"], [1]).plan("opt-6.7b", Workload(8, 128, 32), theta=1.0)


def test_a_t4_says_why_4_bit_is_slower_than_8() -> None:
    plan = on_t4()
    assert {bits for stage in plan.stages for bits in stage.bitwidths} == {8}
    (reason,) = kernel_reasons(plan.spec, plan.costs)
    assert reason.device == "T4-16GB"
    start = "On T4-16GB these are slower than 8 bit: 6, 5, 4 and 3 bit in prefill. A "
    assert reason.sentence.startswith(start)
    assert "restores weights to 16 bit in memory" in reason.sentence
    assert "(cuda_w8a8) multiplies the codes themselves, at the rate of its int8" in reason.sentence
    page = Page(report_page(plan.spec, plan.explain(WhatIfOptions(budget_s=0.0)))).text
    assert " ".join(reason.sentence.split()) in page


def test_its_seconds_are_those_that_plans_are_made_with() -> None:
    plan = on_t4()
    problem = planned_assignment(plan.spec, plan.costs).problem
    (reason,) = kernel_reasons(plan.spec, plan.costs)
    assert [each.bits for each in reason.times] == [16, 8, 6, 5, 4, 3]
    for each in reason.times:
        choice = problem.bitwidths.index(each.bits)
        assert each.prefill_s == problem.prefill_s[0, choice]
        assert each.decode_s == problem.decode_s[0, choice]
        assert seconds(each.prefill_s) in reason.sentence or each.bits == 16


def test_nothing_is_told_where_fewer_bits_are_faster() -> None:
    plan = Cluster.from_counts(["A100-40GB"], [1]).plan(
        "opt-6.7b", Workload(1, 8, 32), theta=0.0, bits=(3, 16)
    )
    assert {bits for stage in plan.stages for bits in stage.bitwidths} == {3}
    assert kernel_reasons(plan.spec, plan.costs) == []
