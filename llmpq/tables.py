"""Plans and runs as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from actors.messages import StageStats
from llmpq.report.job_answers import job_answers, job_remarks, what_is_planned
from llmpq.report.sentences import search_outcome
from llmpq.run.monitoring.slow_stages import measured_s, slow_stages, work_of
from llmpq.run.summary import RunSummary
from planner.explanation.explain import StageLimits
from planner.phases import PHASES, Phase
from planner.plan.simulate import planned_s
from planner.plan.spec import Baseline, PerplexityForecast, PlanSpec, StagePlan
from planner.scheduling import TOKEN_POLICIES
from planner.search.tradeoffs.front import FrontPoint
from quant.common.units import GIB, MIB


def plan_table(plan: PlanSpec, limits: Sequence[StageLimits] = ()) -> RenderableType:
    """The stages of a plan, its prediction, its solver and its baselines.

    `limits`, where known, say which resource of a stage is used up.
    """
    table = Table(title=_headline(plan), title_justify="left", title_style="bold")
    for name, justify in (
        ("stage", "right"),
        ("device", "left"),
        ("layers", "left"),
        ("bits", "left"),
        ("memory", "right"),
        ("limit", "right"),
        ("prefill", "right"),
        ("decode", "right"),
        *((("binds", "left"),) if limits else ()),
    ):
        table.add_column(name, justify="right" if justify == "right" else "left")
    for stage in plan.stages:
        binds = [", ".join(limits[stage.index].binds) or "-"] if limits else []
        table.add_row(*_stage_cells(stage, plan), *binds)
    return Group(table, *(Text(line) for line in _notes(plan)))


def _headline(plan: PlanSpec) -> str:
    return (
        f"{plan.model.name} on {plan.cluster}: {what_is_planned(plan)}; micro-batches "
        f"{_micro_batches_text(plan)}"
    )


def _micro_batches_text(plan: PlanSpec) -> str:
    sizes, policy = plan.micro_batches, plan.policy
    if policy.name not in TOKEN_POLICIES:
        return f"{sizes.prefill} (prefill), {sizes.decode} (decode)"
    parts = f", prompts in parts of {policy.prefill_chunk_tokens} tokens"
    most = f"of up to {policy.max_batch_size} requests of both phases (policy {policy.name}"
    return f"{most}{parts if policy.prefill_chunk_tokens else ''})"


def _stage_cells(stage: StagePlan, plan: PlanSpec) -> Sequence[str]:
    slowest = plan.predicted
    mark = "*" if stage.index in (slowest.prefill_bottleneck, slowest.decode_bottleneck) else ""
    return (
        f"{stage.index}{mark}",
        stage.device + (" (emulated)" if stage.emulated else ""),
        f"{stage.layers.start}-{stage.layers.stop - 1} ({len(stage.layers)})",
        _bits(stage),
        size_text(stage.memory_bytes),
        size_text(stage.memory_limit_bytes),
        _seconds(stage.prefill_s),
        _seconds(stage.decode_s),
    )


def _bits(stage: StagePlan) -> str:
    """Runs of equal bits in layer order, or counts where there are too many runs to read."""
    runs = [(bits, len(list(group))) for bits, group in groupby(stage.bitwidths)]
    if len(runs) <= 6:
        return " ".join(f"{bits}x{count}" for bits, count in runs)
    counts = Counter(stage.bitwidths)
    return " ".join(f"{bits}x{counts[bits]}" for bits in sorted(counts)) + " (mixed)"


def _notes(plan: PlanSpec) -> list[str]:
    s = plan.solver
    lines = [
        *(answer.text for answer in job_answers(plan)),
        *job_remarks(plan),
        f"predicted: {_predicted(plan)}; * slowest stage of a phase",
        f"solver: {s.method} with {s.solver}, {search_outcome(plan)}, gap {s.gap:.2%}, "
        f"{s.seconds:.2f} s for {s.candidates} orders and micro-batches ({s.solved} solved); "
        f"theta {s.theta:g}, sensitivity {s.sensitivity:.4g} ({plan.sensitivity_source})",
        *_times(plan),
    ]
    if plan.perplexity is not None:
        lines.append(_perplexity(plan.perplexity))
    if plan.unused_devices:
        lines.append(f"not used: {', '.join(plan.unused_devices)}")
    lines += [_beside(plan, baseline) for baseline in plan.baselines if baseline.name == "uniform"]
    return lines


def _predicted(plan: PlanSpec) -> str:
    """Seconds and tokens per second; of the two phases where they follow one another."""
    p = plan.predicted
    text = f"{p.latency_s:.4g} {_seconds_of(plan.job is not None)}, {p.tokens_per_s:.4g} tokens/s"
    if plan.job is not None:
        return text
    return f"{text} (prefill {p.prefill_s:.4g} s, decode {p.decode_s:.4g} s)"


def _seconds_of(is_job: bool) -> str:
    """What a latency is of, as the head of a column."""
    return "s for the job" if is_job else "s a batch"


def _times(plan: PlanSpec) -> list[str]:
    """Lines that say where the stages' times come from; stages of one source share a line."""
    stages: dict[str, list[str]] = {}
    for stage in plan.stages:
        stages.setdefault(stage.provenance, []).append(str(stage.index))
    if len(stages) == 1:
        return [f"times: {source}" for source in stages]
    return [f"times of stage {', '.join(of)}: {source}" for source, of in stages.items()]


def _perplexity(forecast: PerplexityForecast) -> str:
    text = (
        f"perplexity: {forecast.increase:+.3g} over {forecast.baseline:.4g} at 16 bit expected "
        f"({forecast.low:+.3g} to {forecast.high:+.3g}, from {forecast.points} measured points)"
    )
    if forecast.max_increase is None:
        return text
    return (
        f"{text}; at most {forecast.max_increase:+.3g} asked for, which is a sensitivity of "
        f"{forecast.max_omega:.4g}"
    )


def _beside(plan: PlanSpec, baseline: Baseline) -> str:
    if baseline.latency_s is None:
        return f"{baseline.name}: does not fit at any bitwidth"
    ratio = baseline.latency_s / plan.predicted.latency_s
    seconds = f"{baseline.latency_s:.4g} {_seconds_of(plan.job is not None)}"
    return (
        f"{baseline.name} ({baseline.bitwidth} bit): {seconds}, "
        f"sensitivity {baseline.sensitivity:.4g}; this plan is {ratio:.2f} times as fast"
    )


def comparison_table(plan: PlanSpec) -> RenderableType:
    """The plan beside the paper's baselines for the same cluster."""
    table = Table(title="comparison", title_justify="left", title_style="bold")
    table.add_column("scheme")
    seconds = _seconds_of(plan.job is not None)
    for name in ("bits", seconds, "tokens/s", "sensitivity", "plan is faster by"):
        table.add_column(name, justify="right")
    p = plan.predicted
    used = sorted({bits for stage in plan.stages for bits in stage.bitwidths})
    mixed = "/".join(map(str, used))
    table.add_row(
        "llmpq", mixed, f"{p.latency_s:.4g}", f"{p.tokens_per_s:.4g}",
        f"{plan.solver.sensitivity:.4g}", "",
    )  # fmt: skip
    for b in plan.baselines:
        if b.latency_s is None or b.tokens_per_s is None or b.sensitivity is None:
            table.add_row(b.name, "", "does not fit", "", "", "")
            continue
        table.add_row(
            b.name, str(b.bitwidth or "mixed"), f"{b.latency_s:.4g}", f"{b.tokens_per_s:.4g}",
            f"{b.sensitivity:.4g}", f"{b.latency_s / p.latency_s:.2f}x",
        )  # fmt: skip
    return table


def front_table(points: Sequence[FrontPoint], is_job: bool = False) -> RenderableType:
    """The Pareto front, fastest first; `is_job`: of plans for a whole job."""
    table = Table(title="latency against quality", title_justify="left", title_style="bold")
    for name in ("theta", _seconds_of(is_job), "tokens/s", "sensitivity", "bits a layer"):
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(
            f"{point.theta:.4g}", f"{point.latency_s:.4g}", f"{point.tokens_per_s:.4g}",
            f"{point.omega:.4g}", f"{point.bits:.2f}",
        )  # fmt: skip
    return table


def summary_table(plan: PlanSpec, summary: RunSummary) -> RenderableType:
    """A run's throughput, the busy share of every stage, and its times beside the planned ones.

    A stage that is clearly slower than planned has a line of its own.
    """
    table = Table(title="stages", title_justify="left", title_style="bold")
    for name in (
        "stage", "device", "busy", "share", "micro-batches", "prefill", "planned", "decode step",
        "planned", "weights", "KV cache",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "device" else "right")
    stages_s = summary.seconds if summary.stages_s is None else summary.stages_s
    for stage, stats in zip(plan.stages, summary.stages, strict=False):
        table.add_row(
            str(stage.index),
            stage.device,
            _seconds(stats.busy_s),
            f"{stats.busy_s / stages_s:.0%}" if stages_s else "",
            str(stats.micro_batches),
            *(
                text
                for phase in PHASES
                for text in _measured_and_planned(plan, stats, stage, phase)
            ),
            size_text(stats.weight_bytes),
            size_text(stats.kv_cache_bytes),
        )
    answered = summary.prompts - summary.errors
    rate = f", {answered / summary.seconds:.3g} prompts/s" if summary.seconds else ""
    planned = summary.planned_tokens_per_s
    beside = "" if planned is None else f", planned {planned:.1f}"
    lines = [
        f"{summary.prompts} prompts ({summary.errors} with errors), {summary.generated_tokens} "
        f"tokens in {summary.seconds:.2f} s: {summary.tokens_per_s:.1f} tokens/s{beside}{rate} "
        f"(loading {summary.load_s:.1f} s)",
        *_supervised(summary),
        *map(str, slow_stages(plan, summary.stages)),
    ]
    text = Text("\n".join(lines))
    return Group(table, text) if summary.stages else text


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


def size_text(count: int) -> str:
    """`count` bytes in GiB, or MiB where that is less than one."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.2f} MiB"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
