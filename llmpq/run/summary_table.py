"""A finished run as a table: what each stage did, and its times beside the planned ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from rich.console import Group, RenderableType
from rich.table import Table

from actors.stage_figures import StageStats
from llmpq.report.formatting import per_second, plain, seconds, size
from llmpq.report.layout import Fitting, Notes, broken_name, new_table
from llmpq.run.slow_stages import measured_s, slow_stages, work_of
from llmpq.run.summary import RunSummary
from planner.plan.simulate import planned_s
from planner.plan.spec import PlanSpec, StagePlan
from planner.scheduling import Phase


def summary_table(plan: PlanSpec, summary: RunSummary) -> RenderableType:
    """A run's throughput, the busy share of every stage, and its times beside the planned ones.

    A stage that is clearly slower than planned has a line of its own.
    """
    notes = Notes(
        [
            _in_all(summary),
            *([] if summary.latency is None else [plain(f"latency: {summary.latency}")]),
            *_supervised(summary),
            *map(str, slow_stages(plan, summary.stages)),
        ]
    )
    if not summary.stages:
        return notes
    rows = list(_rows(plan, summary))
    return Group(Fitting("stages", [partial(_wide, rows), partial(_narrow, rows)]), notes)


@dataclass(frozen=True)
class _Row:
    """The figures of a stage; a phase has the measured and the planned time."""

    stage: str
    device: str
    busy: str
    share: str
    micro_batches: str
    prefill: tuple[str, str]
    decode: tuple[str, str]
    weights: str
    kv_cache: str


def _rows(plan: PlanSpec, summary: RunSummary) -> Iterator[_Row]:
    stages_s = summary.seconds if summary.stages_s is None else summary.stages_s
    for stage, stats in zip(plan.stages, summary.stages, strict=False):
        yield _Row(
            str(stage.index),
            stage.label,
            _seconds(stats.busy_s),
            f"{stats.busy_s / stages_s:.0%}" if stages_s else "",
            str(stats.micro_batches),
            _measured_and_planned(plan, stats, stage, "prefill"),
            _measured_and_planned(plan, stats, stage, "decode"),
            plain(size(stats.weight_bytes)),
            plain(size(stats.kv_cache_bytes)),
        )


def _wide(rows: list[_Row]) -> Table:
    table = new_table(
        [
            "stage", "device", "busy", "share", "micro-batches", "prefill", "planned",
            "decode step", "planned", "weights", "KV cache",
        ],
        (1,),
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.stage, row.device, row.busy, row.share, row.micro_batches, *row.prefill,
            *row.decode, row.weights, row.kv_cache,
        )  # fmt: skip
    return table


def _narrow(rows: list[_Row]) -> Table:
    """Two lines for a stage: measured above planned, weights above keys and values."""
    heads = ("#", "device", "busy", "micro-\nbatches", "prefill,\nplanned", "decode,\nplanned")
    table = new_table([*heads, "weights,\nKV cache"], (1,))
    for row in rows:
        table.add_row(
            row.stage, broken_name(row.device), f"{row.busy}\n{row.share}", row.micro_batches,
            "\n".join(row.prefill), "\n".join(row.decode), f"{row.weights}\n{row.kv_cache}",
        )  # fmt: skip
    return table


def _in_all(summary: RunSummary) -> str:
    answered = summary.prompts - summary.errors
    rate = f", {answered / summary.seconds:.3g} prompts/s" if summary.seconds else ""
    planned = summary.planned_tokens_per_s
    beside = "" if planned is None else f", planned {per_second(planned)}"
    return (
        f"{summary.prompts} prompts ({summary.errors} with errors), {summary.generated_tokens} "
        f"tokens in {summary.seconds:.2f} s: {per_second(summary.tokens_per_s)} tokens/s{beside}"
        f"{rate} (loading {summary.load_s:.1f} s)"
    )


def _supervised(summary: RunSummary) -> list[str]:
    """A line about requests that outgrew their reservations, where there were any."""
    queues = [stats.queue for stats in summary.stages if stats.queue is not None]
    return [
        f"{counts.doublings} reservations were too short: {counts.grown} grew, {counts.parked} "
        f"requests were parked in host memory ({counts.parked_tokens} tokens), "
        f"{counts.recomputed} computed again ({counts.recomputed_tokens} tokens)"
        for counts in (queue.supervision for queue in queues)
        if counts.doublings
    ]


def _measured_and_planned(
    plan: PlanSpec, stats: StageStats, stage: StagePlan, phase: Phase
) -> tuple[str, str]:
    """Times of a micro-batch: the mean of full ones, or of all (~) where none was full, and the
    planned time, left out where the run does not follow it.
    """
    work, planned = work_of(stats, phase), planned_s(plan, stage, phase)
    full_s = measured_s(work)
    if full_s is not None:
        text = _seconds(full_s)
    else:
        text = f"~{_seconds(work.seconds / work.micro_batches)}" if work.micro_batches else ""
    return text, _seconds(planned) if planned else ""


def _seconds(value: float) -> str:
    return plain(seconds(value))
