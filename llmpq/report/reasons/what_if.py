"""Plans made anew under changed conditions, as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.report.formatting import change, listed, number
from llmpq.report.sentences import LEAST_GAIN, difference, question
from planner.explanation.what_if import WhatIfAnswer
from planner.plan.spec import PlanSpec, StagePlan


@dataclass(frozen=True)
class ChangedPlan:
    """A condition, `asked`, and the plan made under it; `quality` is a range for several thetas."""

    asked: str
    answer: WhatIfAnswer
    quality: str


@dataclass(frozen=True)
class ChangedPlans:
    """The plans that are worth a row, and what else was tried."""

    rows: Sequence[ChangedPlan]
    left_out: str


def changed_plans(
    answers: Sequence[WhatIfAnswer], plan: PlanSpec, least_s: float, tip_s: float
) -> ChangedPlans:
    """A row for each answer that changes enough, thetas that lead to the same plan in one.

    Differences up to `least_s` are within the accuracy of the search, gains below `tip_s` no tip.
    """
    told = [each for each in answers if _is_told(each, plan, tip_s)]
    rows = [
        ChangedPlan(_asked(group, plan.stages), group[0], _quality_range(group, least_s))
        for group in _grouped(told, least_s)
    ]
    return ChangedPlans(rows, _left_out([each for each in answers if each not in told]))


def _is_told(answer: WhatIfAnswer, plan: PlanSpec, tip_s: float) -> bool:
    """Whether a plan gains enough; at another theta, whether speed or quality are others."""
    if answer.question.kind != "theta":
        return -answer.objective_change_s >= tip_s
    least_s = LEAST_GAIN * plan.predicted.latency_s
    return max(abs(answer.latency_change_s), abs(answer.quality_change_s)) >= max(least_s, tip_s)


def _left_out(answers: Sequence[WhatIfAnswer]) -> str:
    """What was asked without gain, in a few words."""
    stages = [str(each.question.stage) for each in answers if each.question.kind == "memory"]
    thetas = [number(each.theta) for each in answers if each.question.kind == "theta"]
    links = [each for each in answers if each.question.kind == "links"]
    parts = [
        f"more memory on stage {listed(stages, 'or')}" if stages else "",
        "faster links" if links else "",
        f"theta {listed(thetas, 'or')}" if thetas else "",
        "the default method" if any(each.question.kind == "same" for each in answers) else "",
    ]
    return "; ".join(part for part in parts if part)


def _grouped(answers: Sequence[WhatIfAnswer], least_s: float) -> list[list[WhatIfAnswer]]:
    """Thetas that lead to the same plan together, ascending; all else by itself."""
    groups: dict[object, list[WhatIfAnswer]] = {}
    for answer in answers:
        key: object = answer.question
        if answer.question.kind == "theta":
            changes = (answer.latency_change_s, answer.sensitivity)
            key = (difference(answer), answer.sizes, *changes)
            if abs(answer.objective_change_s) <= least_s and answer.latency_change_s == 0:
                key = (difference(answer), answer.sizes)
        groups.setdefault(key, []).append(answer)
    return [sorted(group, key=lambda each: each.theta) for group in groups.values()]


def _asked(group: Sequence[WhatIfAnswer], stages: Sequence[StagePlan]) -> str:
    if len(group) > 1:
        return f"theta {listed([number(each.theta) for each in group], 'or')}"
    return question(group[0].question, stages)


def _quality_range(group: Sequence[WhatIfAnswer], least_s: float) -> str:
    """One change, or those at the least and the greatest theta."""
    ends = [change(answer.quality_change_s, least_s) for answer in (group[0], group[-1])]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
