"""Fleets as tables: their pipelines by make-up, and all of them together."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from rich.console import Group, RenderableType
from rich.table import Table

from llmpq.report.formatting import (
    duration,
    mean_bits,
    per_second,
    percent,
    plain,
    seconds,
)
from llmpq.tables.layout import Fitting, Notes, new_table
from planner.fleet.fleet_spec import FleetSpec
from planner.plan.spec import PlanSpec

MOST_UNUSED = 8  # devices that are named; of more the first ones


def fleet_table(fleet: FleetSpec) -> RenderableType:
    """The make-ups of a fleet with what each of its pipelines does, and the forecast of all."""
    notes = [plain(note) for note in _notes(fleet)]
    return Group(Fitting(plain(_headline(fleet)), [lambda: _table(fleet)]), Notes(notes))


def _headline(fleet: FleetSpec) -> str:
    count = len(fleet.replicas)
    pipelines = "1 pipeline" if count == 1 else f"{count} pipelines"
    model = fleet.replicas[0].model.name
    return f"{model} on {fleet.cluster}: {pipelines}, {fleet.in_flight:,} prompts in flight"


def _table(fleet: FleetSpec) -> Table:
    heads = ["pipelines", "devices", "layers", "bits", "in flight", "tokens/s each"]
    table = new_table(heads, (1, 2))
    for make_up, plans in fleet.make_ups().items():
        first = plans[0]
        table.add_row(
            str(len(plans)),
            make_up,
            " ".join(str(len(stage.layers)) for stage in first.stages),
            mean_bits(_bits(first)),
            str(first.workload.global_batch),
            per_second(first.predicted.tokens_per_s),
        )
    return table


def _bits(plan: PlanSpec) -> float:
    return mean(bits for stage in plan.stages for bits in stage.bitwidths)


def _notes(fleet: FleetSpec) -> Iterator[str]:
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
