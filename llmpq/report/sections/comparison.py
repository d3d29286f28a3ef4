"""What the plan is compared with: its limits, plans under changed conditions, simpler plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmpq.report.elements import Cell, Table
from llmpq.report.formatting import change, listed, number, seconds, size
from llmpq.report.sections.overview import least_change_s
from llmpq.report.sentences import binding, difference, lever, question
from planner.explanation.explain import Explanation, Headroom, StageLimits
from planner.explanation.what_if import Answer
from planner.plan.plan import Baseline, Plan


def what_binds(plan: Plan, explanation: Explanation) -> Table:
    """Per stage what is used up, and what is left of the other resources."""
    heads = [
        "stage",
        "used up",
        "memory left",
        "prefill left",
        "decode left",
        "1 ms prefill",
        "1 ms decode",
    ]
    rows = [_limits_row(plan, limits) for limits in explanation.stages]
    return Table("What each stage has used up and what is left", heads, rows, words=(0, 1))


def _limits_row(plan: Plan, limits: StageLimits) -> list[Cell | str]:
    stage = plan.stages[limits.stage]
    return [
        f"{stage.index}: {stage.device}",
        Cell(binding(limits), "strong"),
        _left(limits.memory, size),
        _left(limits.prefill, seconds),
        _left(limits.decode, seconds),
        change(limits.prefill_price * 1e-3, 1e-9),
        change(limits.decode_price * 1e-3, 1e-9),
    ]


def _left(headroom: Headroom, text: Callable[[float], str]) -> Cell:
    step = "none" if math.isinf(headroom.least_step) else text(headroom.least_step)
    return Cell(text(headroom.spare), small=f" (step {step})")


@dataclass(frozen=True)
class WhatIf:
    """Plans made under changed conditions; `table` is None where there was time for none."""

    notes: Sequence[str]
    table: Table | None


def what_if(plan: Plan, explanation: Explanation) -> WhatIf:
    """Plans that were really made anew under changed conditions."""
    least_s, answers = least_change_s(plan), explanation.answers
    rows = [_answer_row(plan, group, least_s) for group in _grouped(answers.given, least_s)]
    heads = ["if there were", "new plan", "batch", "quality", "micro-batches", "proven"]
    notes = [
        "Each line is a plan made anew, on the same devices in the same order, against this one. "
        f"Differences below {seconds(least_s)} are within the accuracy of the search. They are "
        "those of the closed form that plans are ranked by, not simulated.",
        lever(plan, explanation, least_s),
    ]
    if answers.left_out:
        asked = [question(each, plan.stages) for each in answers.left_out]
        notes.append(f"There was no time to ask for {listed(asked)}.")
    table = Table("Plans under changed conditions", heads, rows, words=(0, 1)) if rows else None
    return WhatIf([note for note in notes if note], table)


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


def _answer_row(plan: Plan, group: Sequence[Answer], least_s: float) -> list[Cell | str]:
    answer, sizes = group[0], group[0].sizes
    asked = question(answer.question, plan.stages)
    if len(group) > 1:
        asked = f"theta {listed([number(each.theta) for each in group], 'or')}"
    return [
        asked,
        difference(answer),
        change(answer.latency_change_s, least_s),
        _quality_range(group, least_s),
        f"{sizes.prefill}, {sizes.decode}",
        "yes" if answer.proven else "no",
    ]


def _quality_range(group: Sequence[Answer], least_s: float) -> str:
    """One change, or those at the least and the greatest theta."""
    ends = [change(answer.quality_change_s, least_s) for answer in (group[0], group[-1])]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def baselines(plan: Plan) -> Table | None:
    """Simpler plans for the same cluster, the fastest first; None where none were made."""
    if not plan.baselines:
        return None
    present = plan.predicted
    ours: list[Cell | str] = [
        Cell("this plan", "strong"),
        ", ".join(map(str, sorted({b for stage in plan.stages for b in stage.bitwidths}))),
        seconds(present.latency_s),
        number(present.tokens_per_s),
        number(plan.solver.sensitivity),
        "1",
    ]
    ordered = sorted(plan.baselines, key=lambda each: each.latency_s or math.inf)
    rows = [ours, *(_baseline_row(each, present.latency_s) for each in ordered)]
    heads = ["plan", "bits", "batch", "tokens/s", "sensitivity", "time against this plan"]
    return Table("Simpler plans for the same cluster and workload", heads, rows)


def _baseline_row(baseline: Baseline, latency_s: float) -> list[Cell | str]:
    if baseline.latency_s is None or baseline.tokens_per_s is None:
        return [baseline.name, "does not fit", "–", "–", "–", "–"]
    return [
        baseline.name,
        "–" if baseline.bitwidth is None else str(baseline.bitwidth),
        seconds(baseline.latency_s),
        number(baseline.tokens_per_s),
        "–" if baseline.sensitivity is None else number(baseline.sensitivity),
        f"{baseline.latency_s / latency_s:.2f} times",
    ]
