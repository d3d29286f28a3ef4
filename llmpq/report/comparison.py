"""Against what the plan was held: what binds, what would change it, the baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llmpq.report.figures import change, listed, number, seconds, size
from llmpq.report.layers import NOT_KNOWN
from llmpq.report.markup import Content, Html, join, section, table, tag
from llmpq.report.overview import least_change_s
from llmpq.report.reasons import binding, difference, lever, question
from planner.explanation.explain import Explanation, Headroom, StageLimits
from planner.explanation.what_if import Answer
from planner.plan.spec import Baseline, PlanSpec


def what_binds(plan: PlanSpec, explanation: Explanation | None) -> Html:
    """Per stage what is used up, and what is left of the rest."""
    if explanation is None:
        return section("binds", "What binds", tag("p", NOT_KNOWN))
    rows = [_limits_row(plan, limits) for limits in explanation.stages]
    heads = [
        "stage",
        "used up",
        "memory left",
        "prefill left",
        "decode left",
        "1 ms prefill",
        "1 ms decode",
    ]
    text = (
        "A resource is used up where not even the smallest step fits any more: one more layer, or "
        "more bits for one layer (the step is in brackets). For times, what is left is how much "
        "longer a stage may compute per micro-batch before it holds up the others. The last "
        "columns say how much longer a batch takes if that stage computes 1 ms longer."
    )
    return section(
        "binds",
        "What binds",
        tag("p", text, class_="note"),
        table("What each stage has used up and what is left", heads, rows, words=(0, 1)),
    )


def _limits_row(plan: PlanSpec, limits: StageLimits) -> list[Content]:
    stage = plan.stages[limits.stage]
    return [
        f"{stage.index}: {stage.device}",
        tag("strong", binding(limits)),
        _left(limits.memory, size),
        _left(limits.prefill, seconds),
        _left(limits.decode, seconds),
        change(limits.prefill_price * 1e-3, 1e-9),
        change(limits.decode_price * 1e-3, 1e-9),
    ]


def _left(headroom: Headroom, text: Callable[[float], str]) -> Html:
    step = "none" if math.isinf(headroom.least_step) else text(headroom.least_step)
    return join([text(headroom.spare), tag("small", f" (step {step})")])


def what_if(plan: PlanSpec, explanation: Explanation | None) -> Html:
    """Plans that were really made anew under changed conditions."""
    if explanation is None:
        return Html("")
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
    parts = [tag("p", note, class_="note") for note in notes if note]
    if rows:
        parts.append(table("Plans under changed conditions", heads, rows, words=(0, 1)))
    return section("what-if", "What would change the answer", *parts)


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


def _answer_row(plan: PlanSpec, group: Sequence[Answer], least_s: float) -> list[Content]:
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


def baselines(plan: PlanSpec) -> Html:
    """Simpler plans for the same cluster, the fastest first."""
    if not plan.baselines:
        return Html("")
    present = plan.predicted
    ours: list[Content] = [
        tag("strong", "this plan"),
        _bits(sorted({bits for stage in plan.stages for bits in stage.bitwidths})),
        seconds(present.latency_s),
        number(present.tokens_per_s),
        number(plan.solver.sensitivity),
        "1",
    ]
    ordered = sorted(plan.baselines, key=lambda each: each.latency_s or math.inf)
    rows = [ours, *(_baseline_row(each, present.latency_s) for each in ordered)]
    heads = ["plan", "bits", "batch", "tokens/s", "sensitivity", "time against this plan"]
    caption = "Simpler plans for the same cluster and workload"
    return section("baselines", "Baselines", table(caption, heads, rows))


def _baseline_row(baseline: Baseline, latency_s: float) -> list[Content]:
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


def _bits(used: Sequence[int]) -> str:
    return ", ".join(map(str, used))
