"""Views of what users hold: tables and pictures as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llmpq.notebook.rendering import render
from llmpq.report.answers.verdict import verdict
from llmpq.report.formatting import per_second, percent, plural, rate, seconds, size
from llmpq.report.job_answers import job_answers, job_remarks, what_is_planned
from llmpq.report.pictures.schedule import Picture, cycle_pictures, schedule_pictures
from llmpq.report.sentences import bottlenecks
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.fleet.fleet_spec import FleetSpec
from planner.plan.spec import PlanSpec, StagePlan
from planner.simulation.simulation import Simulated

PICTURE_CHARACTERS = 100_000
"""Size of a picture that is shown: a notebook keeps it in its file."""


@dataclass(frozen=True)
class _Table:
    """Cells under their heads; the first `words` columns hold text, the others numbers."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


_STAGES = (
    "stage",
    "device",
    "layers",
    "layers × bits",
    "memory",
    "limit",
    "prefill",
    "decode",
    "busy",
)
_PIPELINES = ("pipeline of", "copies", "prompts in flight", "tokens/s alone")
_DEVICES = ("device", "node", "accelerator", "memory", "link", "to the host")


def plan_html(plan: PlanSpec, simulated: Simulated | str) -> str:
    """A plan's stages, what it predicts, and its `simulated` schedule, or why there is none; of a
    plan under a bound on latency some of its cycles.
    """
    picture = None
    if plan.latency is not None:
        picture = _small(cycle_pictures(plan))
    elif not isinstance(simulated, str):
        picture = _picture(plan, simulated)
    parts = [plan] if plan.prefill_plan is None else [plan.prefill_plan, plan]
    slowest = f" {bottlenecks(plan)}" if plan.latency is None else ""
    return render(
        "plan.html.j2",
        title=f"{plan.model.name} on {plan.cluster}: {what_is_planned(plan)}",
        table=_Table(
            _STAGES, tuple(_stage_cells(part, stage) for part in parts for stage in part.stages), 4
        ),
        lines=[
            f"{verdict(plan).sentence}{slowest}",
            *(answer.text for answer in job_answers(plan)),
            *job_remarks(plan),
        ],
        picture=picture,
        no_picture=f"No schedule is shown: {_no_picture(simulated)}",
    )


def fleet_html(fleet: FleetSpec) -> str:
    """The pipelines of a fleet by their make-up, and what they predict together."""
    rows = tuple(
        (
            make_up,
            str(len(plans)),
            str(sum(plan.workload.global_batch for plan in plans)),
            per_second(sum(plan.predicted.tokens_per_s for plan in plans)),
        )
        for make_up, plans in fleet.make_ups().items()
    )
    model = fleet.replicas[0].model.name
    return render(
        "table.html.j2",
        title=f"{model} on {fleet.cluster}: {plural(len(fleet.replicas), 'pipeline')}",
        table=_Table(_PIPELINES, rows),
        lines=[
            f"{fleet.in_flight} prompts in flight, predicted {seconds(fleet.latency_s)}, "
            f"{per_second(fleet.tokens_per_s)} tokens/s"
        ],
    )


def _no_picture(simulated: Simulated | str) -> str:
    if isinstance(simulated, str):
        return simulated
    return 'it is too large here; plan.trace("schedule.svg") writes it'


def _picture(plan: PlanSpec, simulated: Simulated) -> Picture | None:
    """The schedule, or the part of it that is not too large for a notebook's file."""
    devices = [stage.label for stage in plan.stages]
    return _small(schedule_pictures(simulated, devices, plan.job is not None))


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
    """Runs of layers that have the same bits, in their order."""
    runs = [(bits, len(list(alike))) for bits, alike in groupby(stage.bitwidths)]
    return ", ".join(f"{count} × {bits}" for bits, count in runs)


def cluster_html(cluster: ClusterSpec) -> str:
    """The devices of a cluster, with their memory and links."""
    network = f"{rate(cluster.internode_bytes_per_s)} between nodes"
    played = "; its devices are played on the CPU" if cluster.emulate is not None else ""
    return render(
        "table.html.j2",
        title=cluster.name,
        table=_Table(_DEVICES, tuple(map(_device_cells, cluster.devices)), 3),
        lines=[f"{network}{played}", *cluster.notes],
    )


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
    return render("result.html.j2", rows=[*rows, ("tokens", str(len(tokens)))])


def summary_html(figures: Mapping[str, str], busy: Mapping[str, str]) -> str:
    """The `figures` of a run by name, and how `busy` each device was."""
    return render(
        "table.html.j2",
        title="run",
        table=_Table(tuple(figures), (tuple(figures.values()),), 0),
        lines=[f"busy: {', '.join(f'{name} {share}' for name, share in busy.items())}"]
        if busy
        else [],
    )
