"""Plans made anew under changed conditions, as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.report.formatting import change, listed, number
from llmpq.report.sentences import difference, question
from planner.explanation.what_if import Answer
from planner.plan.spec import StagePlan


@dataclass(frozen=True)
class ChangedPlan:
    """A condition, `asked`, and the plan made under it; `quality` is a range for several thetas."""

    asked: str
    answer: Answer
    quality: str


def changed_plans(
    answers: Sequence[Answer], stages: Sequence[StagePlan], least_s: float
) -> list[ChangedPlan]:
    """A row for each answer, thetas that lead to the same plan in one.

    Differences up to `least_s` are within the accuracy of the search.
    """
    return [
        ChangedPlan(_asked(group, stages), group[0], _quality_range(group, least_s))
        for group in _grouped(answers, least_s)
    ]


def _grouped(answers: Sequence[Answer], least_s: float) -> list[list[Answer]]:
    """Thetas that lead to the same plan together, ascending; all else by itself."""
    groups: dict[object, list[Answer]] = {}
    for answer in answers:
        key: object = answer.question
        if answer.question.kind == "theta":
            changes = (answer.latency_change_s, answer.sensitivity)
            key = (difference(answer), answer.sizes, *changes)
            if abs(answer.objective_change_s) <= least_s and answer.latency_change_s == 0:
                key = (difference(answer), answer.sizes)
        groups.setdefault(key, []).append(answer)
    return [sorted(group, key=lambda each: each.theta) for group in groups.values()]


def _asked(group: Sequence[Answer], stages: Sequence[StagePlan]) -> str:
    if len(group) > 1:
        return f"theta {listed([number(each.theta) for each in group], 'or')}"
    return question(group[0].question, stages)


def _quality_range(group: Sequence[Answer], least_s: float) -> str:
    """One change, or those at the least and the greatest theta."""
    ends = [change(answer.quality_change_s, least_s) for answer in (group[0], group[-1])]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
