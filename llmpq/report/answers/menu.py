"""The plans to choose from: this one, those of the other qualities, others that people ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from llmpq.report.formatting import listed
from llmpq.report.job_answers import beaten, most_bits
from llmpq.report.pictures.curve import plan_choice
from llmpq.report.sentences import LEAST_GAIN
from planner.plan.spec import PlanChoice, PlanSpec


@dataclass(frozen=True)
class Course:
    """A plan that can be had: its names, its figures, the seconds of the batch or the job, and the
    option or the device that gives it.
    """

    name: str
    plan: PlanChoice
    seconds: float
    how: str
    is_present: bool = False


def menu(plan: PlanSpec) -> list[Course]:
    """This plan and the others that are known; only this one where none is."""
    tokens = plan.predicted.tokens_per_s * plan.predicted.latency_s
    return [
        Course(name, choice, tokens / choice.tokens_per_s, how, is_present=index == 0)
        for index, (name, choice, how) in enumerate(_choices(plan))
    ]


def _choices(plan: PlanSpec) -> Iterator[tuple[str, PlanChoice, str]]:
    """Yield names, figures and the way to each plan."""
    present, beside = plan_choice(plan), plan.beside
    taken = next((each.plan for each in beside.qualities if each.quality == beside.quality), None)
    groups: dict[PlanChoice, list[str]] = {}
    for each in beside.qualities:
        groups.setdefault(each.plan, []).append(each.quality)
    own = groups.pop(taken, []) if taken is not None else []
    yield f"this plan{f' ({listed(own)})' if own else ''}", present, "taken"
    for choice, names in groups.items():
        yield listed(list(names)), choice, f"--quality {names[0]}"
    full = beside.full_precision
    if full is not None and full.mean_bits > present.mean_bits:
        bits = most_bits(plan)
        yield f"all layers at {bits} bit", full, f"--bits {bits}"
    if beaten(plan) and beside.beaten_by is not None:
        yield "fewer in flight", beside.beaten_by, "--input or --prompts in place of --global_bz"
    kinds = Counter(each.accelerator for each in beside.more_devices)
    for more in beside.more_devices:
        if more.plan.tokens_per_s < present.tokens_per_s * (1 + LEAST_GAIN):
            continue
        where = f" on {more.node}" if kinds[more.accelerator] > 1 else ""
        name = f"{more.count} more {more.accelerator}{where}"
        yield name, more.plan, "one more device" if more.count == 1 else "more devices"
