"""Plans, clusters and results in a notebook: tables and pictures as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmpq.report.answers import what_is_planned
from llmpq.report.formatting import bit_runs, per_second, percent, plural, rate, seconds, size
from llmpq.report.plan_charts import Picture, cycle_pictures, schedule_pictures
from llmpq.report.plan_facts import bottlenecks, facts_of
from llmpq.report.rendering import render
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.fleet.fleet_spec import FleetSpec
from planner.plan.spec import PlanSpec, StagePlan
from planner.simulation.simulation import Simulated

PICTURE_CHARACTERS = 100_000
"""Size of a picture that is shown: a notebook keeps it in its file."""


_STAGES = (
    "stage", "device", "layers", "layers × bits", "memory", "limit", "prefill", "decode", "busy",
)  # fmt: skip
_PIPELINES = ("pipeline of", "copies", "prompts in flight", "tokens/s alone")
_DEVICES = ("device", "node", "accelerator", "memory", "link", "to the host")


def _table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: int,
    lines: Sequence[str],
    template: str = "cell_table.html.j2",
    **more: object,
) -> str:
    """Cells under heads, of which the first `words` columns hold text, and lines below."""
    named = {"title": title, "heads": heads, "rows": list(rows), "words": words, "lines": lines}
    return render(template, **named, **more)


def plan_html(plan: PlanSpec, simulated: Simulated | str) -> str:
    """A plan's stages, prediction and `simulated` schedule, or why there is none."""
    picture = None
    if plan.latency is not None:
        picture = _small(cycle_pictures(plan))
    elif not isinstance(simulated, str):
        devices = [stage.label for stage in plan.stages]
        picture = _small(schedule_pictures(simulated, devices, plan.job is not None))
    parts = [plan] if plan.prefill_plan is None else [plan.prefill_plan, plan]
    slowest = f" {bottlenecks(plan)}" if plan.latency is None else ""
    facts = facts_of(plan)
    answers = [answer for _, answer in facts.answers]
    return _table(
        f"{facts.title}: {what_is_planned(plan)}",
        _STAGES,
        (_stage_cells(part, stage) for part in parts for stage in part.stages),
        words=4,
        lines=[f"{facts.sentence}{slowest}", *answers, *facts.remarks],
        template="cell_plan.html.j2",
        picture=picture,
        no_picture=f"No schedule is shown: {_no_picture(simulated)}",
    )


def fleet_html(fleet: FleetSpec) -> str:
    """The pipelines of a fleet by their make-up, and what they predict together."""
    rows = (
        (
            make_up,
            str(len(plans)),
            str(sum(plan.workload.global_batch for plan in plans)),
            per_second(sum(plan.predicted.tokens_per_s for plan in plans)),
        )
        for make_up, plans in fleet.make_ups().items()
    )
    model = fleet.replicas[0].model.name
    title = f"{model} on {fleet.cluster}: {plural(len(fleet.replicas), 'pipeline')}"
    predicted = (
        f"{fleet.in_flight} prompts in flight, predicted {seconds(fleet.latency_s)}, "
        f"{per_second(fleet.tokens_per_s)} tokens/s"
    )
    return _table(title, _PIPELINES, rows, 1, [predicted])


def _no_picture(simulated: Simulated | str) -> str:
    if isinstance(simulated, str):
        return simulated
    return 'it is too large here; plan.trace("schedule.svg") writes it'


def _small(pictures: Sequence[Picture]) -> Picture | None:
    """The first picture that is not too large for a notebook's file."""
    return next((each for each in pictures if len(each.svg) <= PICTURE_CHARACTERS), None)


def _stage_cells(plan: PlanSpec, stage: StagePlan) -> tuple[str, ...]:
    role = "" if stage.role == "both" else f"{stage.role} "
    return (
        f"{role}{stage.index}",
        stage.label + (" (emulated)" if stage.emulated else ""),
        f"{stage.layers.start} to {stage.layers.stop - 1}",
        bits_text(stage),
        size(stage.memory_bytes),
        size(stage.memory_limit_bytes),
        seconds(stage.prefill_s),
        seconds(stage.decode_s),
        percent(plan.predicted.busy_share[stage.index]),
    )


def bits_text(stage: StagePlan) -> str:
    return ", ".join(f"{count} × {bits}" for bits, count in bit_runs(stage.bitwidths))


def cluster_html(cluster: ClusterSpec) -> str:
    network = f"{rate(cluster.internode_bytes_per_s)} between nodes"
    played = "; its devices are played on the CPU" if cluster.emulate is not None else ""
    lines = [f"{network}{played}", *cluster.notes]
    return _table(cluster.name, _DEVICES, map(_device_cells, cluster.devices), 3, lines)


def _device_cells(device: Device) -> tuple[str, ...]:
    return (
        device.name,
        device.node,
        device.accelerator.name,
        size(device.memory_bytes),
        rate(device.link_bytes_per_s),
        rate(device.host_link_bytes_per_s),
    )


def result_html(fields: Mapping[str, Any]) -> str:
    """A result by its fields, of which those that are not set are left out."""
    shown = {name: value for name, value in fields.items() if value is not None}
    tokens = shown.pop("token_ids", ())
    rows = [(name, str(value)) for name, value in shown.items()]
    return render("cell_result.html.j2", rows=[*rows, ("tokens", str(len(tokens)))])


def summary_html(figures: Mapping[str, str], busy: Mapping[str, str]) -> str:
    shares = ", ".join(f"{name} {share}" for name, share in busy.items())
    lines = [f"busy: {shares}"] if busy else []
    return _table("run", tuple(figures), [tuple(figures.values())], 0, lines)
