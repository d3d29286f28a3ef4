"""Plans under changed conditions: gains below a percent are named, and have no row."""

from __future__ import annotations

from llmpq.report.reasons.what_if import changed_plans
from planner.explanation.what_if import Kind, Question, WhatIfAnswer
from planner.micro_batches import MicroBatches
from tests.llmpq.jobs_of_prompts import small_plan


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
    found = changed_plans(answers, plan, 1e-9, 0.01 * seconds)
    assert [row.answer for row in found.rows] == [answers[1], answers[5]]
    assert found.left_out == "more memory on stage 0 or 2; faster links; theta 4"
