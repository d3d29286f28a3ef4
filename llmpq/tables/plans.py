"""Plans as tables: their stages, the baselines beside them, the front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Group, RenderableType
from rich.table import Table

from llmpq.report import figures
from llmpq.report.answers.verdict import quality_word
from llmpq.report.formatting import (
    duration,
    mean_bits,
    number,
    per_second,
    plain,
    seconds,
    size,
    times,
)
from llmpq.report.job_answers import job_answers, job_remarks, what_is_planned
from llmpq.report.pictures.front import front_beside
from llmpq.report.sentences import RESOURCES
from llmpq.tables.layout import Fitting, Notes, broken_name, new_table, stacked
from planner.explanation.explain import StageLimits
from planner.plan.spec import PlanSpec, StagePlan
from planner.scheduling import Phase
from planner.search.find import FrontPoint

_SLOWEST = "* slowest stage of a phase"
PHASES: tuple[Phase, ...] = ("prefill", "decode")
BITS_WIDTH = 10  # of the runs of bits in a line, where the terminal is narrow


def plan_table(plan: PlanSpec, limits: Sequence[StageLimits] = ()) -> RenderableType:
    """The stages of a plan, its prediction, its solver and its baselines.

    `limits`, where known, say which resource of a stage is used up.
    """
    notes = Notes([plain(note) for note in _notes(plan)])
    if plan.prefill_plan is None:
        return Group(Fitting(_headline(plan), stage_tables(plan, limits)), notes)
    return Group(
        Fitting(_headline(plan), ()),
        Fitting("stages that prefill:", stage_tables(plan.prefill_plan, phases=("prefill",))),
        Fitting("stages that decode:", stage_tables(plan, phases=("decode",))),
        notes,
    )


def stage_tables(
    plan: PlanSpec, limits: Sequence[StageLimits] = (), phases: Sequence[Phase] = PHASES
) -> tuple[Callable[[], Table], ...]:
    """The stages as a table, a wide one and a narrow one, with their seconds in these phases."""
    return partial(_wide, plan, limits, phases), partial(_narrow, plan, limits, phases)


def _headline(plan: PlanSpec) -> str:
    return plain(
        f"{plan.model.name} on {plan.cluster}: {what_is_planned(plan)}; micro-batches "
        f"{figures.micro_batches(plan)}"
    )


def _wide(plan: PlanSpec, limits: Sequence[StageLimits], phases: Sequence[Phase]) -> Table:
    heads = ["stage", "device", "layers", "bits", "memory", "limit", *phases]
    table = new_table([*heads, *(["binds"] if limits else [])], (1, 2, 3, 8))
    for stage in plan.stages:
        emulated = " (emulated)" if stage.emulated else ""
        table.add_row(
            _number(plan, stage, phases),
            stage.label + emulated,
            f"{_span(stage)} ({len(stage.layers)})",
            " ".join(figures.bits_of(stage)),
            size_text(stage.memory_bytes),
            size_text(stage.memory_limit_bytes),
            *(_seconds(stage_s(stage, phase)) for phase in phases),
            *([", ".join(_binding(limits[stage.index]))] if limits else []),
        )
    return table


def _narrow(plan: PlanSpec, limits: Sequence[StageLimits], phases: Sequence[Phase]) -> Table:
    """Two lines for a stage, so that 80 columns have room for its device and all its figures."""
    heads = ["#", "device", "layers", "bits", "memory,\nlimit", *phases]
    table = new_table([*heads, *(["binds"] if limits else [])], (1, 2, 3, 7))
    for stage in plan.stages:
        emulated = "\n(emulated)" if stage.emulated else ""
        table.add_row(
            _number(plan, stage, phases),
            broken_name(stage.label) + emulated,
            _span(stage),
            stacked(figures.bits_of(stage), BITS_WIDTH),
            f"{size_text(stage.memory_bytes)}\n{size_text(stage.memory_limit_bytes)}",
            *(_seconds(stage_s(stage, phase)) for phase in phases),
            *([_stacked_binding(limits[stage.index])] if limits else []),
        )
    return table


def stage_s(stage: StagePlan, phase: Phase) -> float:
    """Seconds of a stage for a full micro-batch of a phase."""
    return stage.prefill_s if phase == "prefill" else stage.decode_s


def _number(plan: PlanSpec, stage: StagePlan, phases: Sequence[Phase]) -> str:
    predicted = plan.predicted
    of_phase = {"prefill": predicted.prefill_bottleneck, "decode": predicted.decode_bottleneck}
    slowest = [of_phase[phase] for phase in phases]
    return f"{stage.index}{'*' if stage.index in slowest else ''}"


def _span(stage: StagePlan) -> str:
    return f"{stage.layers.start}-{stage.layers.stop - 1}"


def _binding(limits: StageLimits) -> Sequence[str]:
    return limits.binds or ("-",)


def _stacked_binding(limits: StageLimits) -> str:
    """The resources below each other; "all" for all three, so that two lines are enough."""
    names = _binding(limits)
    return "all" if len(names) == len(RESOURCES) else ",\n".join(names)


def _notes(plan: PlanSpec) -> list[str]:
    lines = [
        *(answer.text for answer in job_answers(plan)),
        *job_remarks(plan),
        f"predicted: {figures.predicted(plan)}; {_SLOWEST}" if plan.latency is None else _SLOWEST,
        _quality(plan),
        f"solver: {figures.searched(plan)}; {figures.priced(plan)}",
        *figures.times_from(plan),
    ]
    if plan.unused_devices:
        lines.append(f"not used: {', '.join(plan.unused_devices)}")
    lines += [figures.beside(plan, each) for each in plan.baselines if each.name == "uniform"]
    return lines


def _quality(plan: PlanSpec) -> str:
    quality = quality_word(plan)
    return (
        quality.basis if plan.perplexity else f"expected quality: {quality.word} ({quality.basis})"
    )


def _time_head(is_job: bool) -> str:
    """What the seconds are of, as the head of a column."""
    return "time of the job" if is_job else "time a batch"


def comparison_table(plan: PlanSpec) -> RenderableType:
    """The plan beside the paper's baselines for the same cluster."""
    return Fitting("comparison", [partial(_comparison, plan)])


def _comparison(plan: PlanSpec) -> Table:
    heads = ("scheme", "bits", _time_head(plan.job is not None), "tokens/s", "sensitivity")
    table = new_table([*heads, "plan is faster"])
    p = plan.predicted
    used = sorted({bits for stage in plan.stages for bits in stage.bitwidths})
    table.add_row(
        "llmpq", "/".join(map(str, used)), _duration(p.latency_s), per_second(p.tokens_per_s),
        _figure(plan.solver.sensitivity), "",
    )  # fmt: skip
    for b in plan.baselines:
        if b.latency_s is None or b.tokens_per_s is None or b.sensitivity is None:
            table.add_row(b.name, "", "does not fit", "", "", "")
            continue
        table.add_row(
            b.name, str(b.bitwidth or "mixed"), _duration(b.latency_s), per_second(b.tokens_per_s),
            _figure(b.sensitivity), times(b.latency_s / p.latency_s),
        )  # fmt: skip
    return table


def front_table(
    points: Sequence[FrontPoint], is_job: bool = False, plan: PlanSpec | None = None
) -> RenderableType:
    """The Pareto front, fastest first; `is_job`: of plans for a whole job. With `plan` it is
    the front that the plan's page has.
    """
    points = points if plan is None else front_beside(plan, points)
    return Fitting("latency against quality", [partial(_front, points, is_job)])


def _front(points: Sequence[FrontPoint], is_job: bool) -> Table:
    heads = ("theta", _time_head(is_job), "tokens/s", "sensitivity", "bits a layer")
    table = new_table(heads, ())
    for point in points:
        table.add_row(
            _figure(point.theta), _duration(point.latency_s), per_second(point.tokens_per_s),
            _figure(point.omega), mean_bits(point.bits),
        )  # fmt: skip
    return table


def size_text(count: float) -> str:
    """`count` bytes in the unit that keeps them short, for a terminal."""
    return plain(size(count))


def _duration(value: float) -> str:
    return plain(duration(value))


def _seconds(value: float) -> str:
    return plain(seconds(value))


def _figure(value: float) -> str:
    return plain(number(value))
