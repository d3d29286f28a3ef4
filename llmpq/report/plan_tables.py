"""Plans, fronts and fleets as tables of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import mean

from rich.console import Group, RenderableType
from rich.table import Table

from llmpq.report.bound_charts import winners
from llmpq.report.formatting import (
    duration,
    mean_bits,
    number,
    per_second,
    percent,
    plural,
    seconds,
    size,
    times,
)
from llmpq.report.latency import kind_name
from llmpq.report.layout import Fitting, Notes, broken_name, stacked, table_of
from llmpq.report.plan_charts import front_beside
from llmpq.report.plan_facts import PlanFacts, bits_of, facts_of, times_from
from llmpq.report.quality import loss, loss_head, rise
from llmpq.report.reasons import RESOURCES
from planner.explanation.explain import StageLimits
from planner.fleet.fleet_spec import FleetSpec
from planner.latency_bound.bounded_plan import KindFronts
from planner.plan.spec import PlanSpec, StagePlan
from planner.scheduling import PHASES, Phase
from planner.search.find import FrontPoint

_SLOWEST = "* slowest stage of a phase"
BITS_WIDTH = 10  # of the runs of bits in a line, where the terminal is narrow
MOST_UNUSED = 8  # devices of a fleet that are named; of more the first ones


def plan_table(plan: PlanSpec, limits: Sequence[StageLimits] = ()) -> RenderableType:
    """Stages, prediction, solver and baselines of a plan; `limits`: what a stage has used up."""
    facts = facts_of(plan)
    headline, notes = f"{facts.title}: {facts.planned}", Notes(_notes(plan, facts))
    if plan.prefill_plan is None:
        return Group(Fitting(headline, _stages(plan, limits)), notes)
    return Group(
        Fitting(headline, ()),
        Fitting("stages that prefill:", _stages(plan.prefill_plan, phases=("prefill",))),
        Fitting("stages that decode:", _stages(plan, phases=("decode",))),
        notes,
    )


def _stages(
    plan: PlanSpec, limits: Sequence[StageLimits] = (), phases: Sequence[Phase] = PHASES
) -> tuple[Callable[[], Table], ...]:
    """The stages as a wide table, and as a narrow one that has two lines for a stage, so that 80
    columns have room for its device and all its figures.
    """

    def made(is_wide: bool) -> Table:
        first, rooms = ("stage", ["memory", "limit"]) if is_wide else ("#", ["memory,\nlimit"])
        heads = [first, "device", "layers", "bits", *rooms, *phases]
        rows = [
            [
                f"{stage.index}{'*' if _is_slowest(plan, stage, phases) else ''}",
                *(_wide_cells(stage) if is_wide else _narrow_cells(stage)),
                *(
                    seconds(stage.prefill_s if phase == "prefill" else stage.decode_s)
                    for phase in phases
                ),
                *([_binding(limits[stage.index], is_wide)] if limits else []),
            ]
            for stage in plan.stages
        ]
        return table_of([*heads, *(["binds"] if limits else [])], rows, (1, 2, 3, len(heads)))

    return partial(made, True), partial(made, False)


def _is_slowest(plan: PlanSpec, stage: StagePlan, phases: Sequence[Phase]) -> bool:
    predicted = plan.predicted
    of_phase = {"prefill": predicted.prefill_bottleneck, "decode": predicted.decode_bottleneck}
    return stage.index in [of_phase[phase] for phase in phases]


def _wide_cells(stage: StagePlan) -> list[str]:
    return [
        stage.label + (" (emulated)" if stage.emulated else ""),
        f"{_span(stage)} ({len(stage.layers)})",
        " ".join(bits_of(stage)),
        size(stage.memory_bytes),
        size(stage.memory_limit_bytes),
    ]


def _narrow_cells(stage: StagePlan) -> list[str]:
    return [
        broken_name(stage.label) + ("\n(emulated)" if stage.emulated else ""),
        _span(stage),
        stacked(bits_of(stage), BITS_WIDTH),
        f"{size(stage.memory_bytes)}\n{size(stage.memory_limit_bytes)}",
    ]


def _span(stage: StagePlan) -> str:
    return f"{stage.layers.start}-{stage.layers.stop - 1}"


def _binding(limits: StageLimits, is_wide: bool) -> str:
    """The resources, below each other and "all" for all three where the table is narrow."""
    names = limits.binds or ("-",)
    if is_wide:
        return ", ".join(names)
    return "all" if len(names) == len(RESOURCES) else ",\n".join(names)


def _notes(plan: PlanSpec, facts: PlanFacts) -> list[str]:
    quality = facts.quality
    return [
        *(answer for _, answer in facts.answers),
        *facts.remarks,
        _SLOWEST if plan.latency is not None else f"predicted: {facts.predicted}; {_SLOWEST}",
        f"expected quality: {quality.word} ({quality.basis})",
        f"solver: {facts.searched}" + (f"; {facts.priced}" if plan.beside.quality is None else ""),
        *times_from(plan),
        *([f"not used: {', '.join(plan.unused_devices)}"] if plan.unused_devices else []),
        *facts.baselines,
    ]


def _time_head(is_job: bool) -> str:
    return "time of the job" if is_job else "time a batch"


def comparison_table(plan: PlanSpec) -> RenderableType:
    heads = ("scheme", "bits", _time_head(plan.job is not None), "tokens/s", loss_head(plan))
    p = plan.predicted
    used = sorted({bits for stage in plan.stages for bits in stage.bitwidths})
    speed = duration(p.latency_s), per_second(p.tokens_per_s)
    rows = [("llmpq", "/".join(map(str, used)), *speed, loss(plan, plan.solver.sensitivity), "")]
    for b in plan.baselines:
        if b.latency_s is None or b.tokens_per_s is None or b.sensitivity is None:
            rows.append((b.name, "", "no plan with one bitwidth", "", "", ""))
            continue
        speed = duration(b.latency_s), per_second(b.tokens_per_s)
        faster = times(b.latency_s / p.latency_s)
        rows.append((b.name, str(b.bitwidth or "mixed"), *speed, loss(plan, b.sensitivity), faster))
    return Fitting("comparison", [partial(table_of, [*heads, "plan is faster"], rows)])


def front_table(
    points: Sequence[FrontPoint], is_job: bool = False, plan: PlanSpec | None = None
) -> RenderableType:
    """The Pareto front, fastest first, of a batch or job; with `plan` the front of its page."""
    is_known = all(point.divergence is not None for point in points)
    lost = "perplexity" if is_known else "sensitivity"
    heads = ("theta", _time_head(is_job), "tokens/s", lost, "bits a layer")
    rows = [
        (
            number(point.theta),
            duration(point.latency_s),
            per_second(point.tokens_per_s),
            number(point.omega) if point.divergence is None else rise(point.divergence),
            mean_bits(point.bits),
        )
        for point in (points if plan is None else front_beside(plan, points))
    ]
    return Fitting("latency against perplexity", [partial(table_of, heads, rows, ())])


def latency_front_table(fronts: KindFronts) -> RenderableType:
    """Requests per second of each kind of schedule within each bound, and why one is best."""
    names = [kind_name(kind) for kind in fronts.kinds]
    rows = []
    for row in fronts.rows:
        points = [row.of(kind) for kind in fronts.kinds]
        found = ["-" if each is None else per_second(each.requests_per_s) for each in points]
        best = kind_name(row.best.schedule.kind), seconds(row.best.latency_s)
        rows.append([seconds(row.bound_s), *found, *best, mean_bits(row.best.bits)])
    heads = ["bound", *names, "best", "its latency", "bits a layer"]
    words = (len(names) + 1,)
    title = "requests per second over bounds on their latency"
    return Group(Fitting(title, [partial(table_of, heads, rows, words)]), Notes(winners(fronts)))


def fleet_table(fleet: FleetSpec) -> RenderableType:
    """The make-ups of a fleet with what each of its pipelines does, and the forecast of all."""
    heads = ["pipelines", "devices", "layers", "bits", "in flight", "tokens/s each"]
    rows = [
        (
            str(len(plans)),
            make_up,
            " ".join(str(len(stage.layers)) for stage in plans[0].stages),
            mean_bits(mean(bits for stage in plans[0].stages for bits in stage.bitwidths)),
            str(plans[0].workload.global_batch),
            per_second(plans[0].predicted.tokens_per_s),
        )
        for make_up, plans in fleet.make_ups().items()
    ]
    headline = (
        f"{fleet.replicas[0].model.name} on {fleet.cluster}: "
        f"{plural(len(fleet.replicas), 'pipeline')}, {fleet.in_flight:,} prompts in flight"
    )
    fitting = Fitting(headline, [partial(table_of, heads, rows, (1, 2))])
    return Group(fitting, Notes(list(_fleet_notes(fleet))))


def _fleet_notes(fleet: FleetSpec) -> Iterator[str]:
    record = fleet.record
    yield (
        f"predicted: {duration(fleet.latency_s)} at {per_second(fleet.tokens_per_s)} tokens/s for "
        "all pipelines together, by simulating rows that are handed out as slots become free "
        "(without loading)"
    )
    if unused := fleet.unused_devices:
        more = f" and {len(unused) - MOST_UNUSED} more" if len(unused) > MOST_UNUSED else ""
        yield f"unused: {', '.join(unused[:MOST_UNUSED])}{more}"
    yield (
        f"search: {record.priced} make-ups priced and one choice of them within "
        f"{percent(record.gap)} of the best in {seconds(record.seconds)}; no division of the "
        f"cluster exceeds {per_second(record.ceiling_tokens_per_s)} tokens/s"
    )
