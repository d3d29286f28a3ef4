"""Throughput over bounds on the latency of requests as a table, and why each schedule is best."""

from __future__ import annotations

from functools import partial

from rich.console import Group, RenderableType
from rich.table import Table

from llmpq.report.formatting import per_second, plain, seconds
from llmpq.report.latency import kind_name
from llmpq.report.pictures.bounds import winners
from llmpq.tables.layout import Fitting, Notes, new_table
from planner.latency_bound.front import KindFronts, LatencyPoint


def latency_front_table(fronts: KindFronts) -> RenderableType:
    """Requests per second of each kind of schedule within each bound, the tightest first."""
    title = "requests per second over bounds on their latency"
    notes = Notes([plain(line) for line in winners(fronts)])
    return Group(Fitting(title, [partial(_table, fronts)]), notes)


def _table(fronts: KindFronts) -> Table:
    names = [kind_name(kind) for kind in fronts.kinds]
    table = new_table(["bound", *names, "best", "its latency"], (len(names) + 1,))
    for row in fronts.rows:
        table.add_row(
            plain(seconds(row.bound_s)),
            *(_requests(row.of(kind)) for kind in fronts.kinds),
            kind_name(row.best.schedule.kind),
            plain(seconds(row.best.latency_s)),
        )
    return table


def _requests(point: LatencyPoint | None) -> str:
    return "-" if point is None else per_second(point.requests_per_s)
