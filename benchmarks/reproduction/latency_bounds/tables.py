"""Tables of ExeGPT's evaluation on OPT 13B: rivals on all tasks (fig. 7), schedules of task S
(table 6), outputs unlike those that a schedule is for (fig. 11), and the variance of a stage's
seconds (table 7).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.lab import header, show, table_row
from benchmarks.reproduction.latency_bounds.models import (
    A40,
    MODELS,
    TASKS,
    Layout,
    Pipeline,
    skewed_normal_of,
    truncated_normal_of,
)
from benchmarks.reproduction.latency_bounds.schedulers import ORCA, VLLM
from benchmarks.reproduction.latency_bounds.schedules import (
    RraSchedules,
    WaaSchedules,
    divided_of,
    rra_of,
    waa_of,
)
from benchmarks.reproduction.latency_bounds.setting import (
    Chosen,
    IterationLevelSizes,
    Placed,
    Scheduler,
    Setting,
    rivals_of,
)
from benchmarks.reproduction.latency_bounds.throughput import RIVALS, rate_of
from planner.latency_bound.timeline import DOES_NOT_FIT, Performance, StageSeconds
from planner.lengths import FloatArray, LengthDistribution, RequestLengths
from planner.scheduling import RequestSchedule

HOST_S = 0.03
"""Seconds between two passes, an assumption: in vLLM 0.5, a year younger than the version of the
paper, the GPU was busy for 38 % of the time with LLaMA 8B (vLLM's blog on version 0.6, 2024)."""


def existing_table() -> Iterator[str]:
    """Yield the lines of the table: requests per second of each."""
    waits = f"{1e3 * HOST_S:.0f} ms"
    yield header(f"task | bound, s | {' | '.join(RIVALS)} | ORCA, {waits} | vLLM, {waits} | first")
    for name, task in TASKS.items():
        setting = Setting(MODELS[0], task.lengths)
        schedulers: dict[str, Scheduler] = {
            **rivals_of(setting),
            f"ORCA, {waits}": IterationLevelSizes(setting, ORCA, HOST_S),
            f"vLLM, {waits}": IterationLevelSizes(setting, VLLM, HOST_S),
        }
        for bound_s in setting.bounds_s:
            found = {key: each.best(bound_s) for key, each in schedulers.items()}
            rates = {key: each.requests_per_s for key, each in found.items() if each is not None}
            bound = f"{bound_s:.1f}" if math.isfinite(bound_s) else "none"
            first = max(rates, key=lambda key: rates[key], default="–")
            cells = " | ".join(map(rate_of, found.values()))
            yield f"| {name} | {bound} | {cells} | {first} |"


@dataclass(frozen=True)
class PaperRow:
    """A row of table 6. `newcomers` is B_E, `steps` is N_D (None: WAA), `degree` that of T_P."""

    bound_s: float
    newcomers: int
    steps: int | None
    degree: int
    latency_s: float
    requests_per_s: float

    @property
    def label(self) -> str:
        """The schedule in the paper's words."""
        if self.steps is None:
            return f"WAA: B_E={self.newcomers}, T_P={self.degree}"
        return f"RRA: B_E={self.newcomers}, N_D={self.steps}, T_P={self.degree}"


PAPER_SCHEDULES = (
    PaperRow(3.1, 4, None, 2, 3.01, 22.41),
    PaperRow(5.9, 10, None, 2, 4.11, 23.76),
    PaperRow(11.5, 52, 13, 4, 10.23, 25.23),
    PaperRow(math.inf, 49, 7, 4, 16.87, 26.15),
)


def selected_table() -> Iterator[str]:
    """Yield the lines of the table: latency in seconds and requests per second of the paper's
    schedules, by the paper and by our simulation, and of ours.
    """
    setting = Setting(MODELS[0], TASKS["S"].lengths)
    rra, waa = rra_of(setting), waa_of(setting)
    yield header(
        "bound, s | the paper's | it states | our simulation of it | RRA | WAA | ours | "
        "FT here: bound, s"
    )
    for row, own_bound_s in zip(PAPER_SCHEDULES, setting.bounds_s, strict=True):
        both = {"RRA": rra.best(row.bound_s), "WAA": waa.best(row.bound_s)}
        known = {name: each for name, each in both.items() if each is not None}
        best = max(known, key=lambda name: known[name].requests_per_s)
        cells = [
            _seconds(row.bound_s),
            row.label,
            f"{row.latency_s:.2f}: {row.requests_per_s:.1f}",
            _performance(as_published(setting, row)),
            *(_chosen(each) for each in both.values()),
            best,
            _seconds(own_bound_s),
        ]
        yield table_row(cells)


GROUPED = ((0.0, 1), (0.005, 1), (0.01, 1), (0.03, 1), (0.01, 2), (0.01, 4))
"""Seconds of hosts beside each pass of a stage, and how many times the rate of data sheets links in
nodes have, by which sums of groups are faster.
"""


def groups_table() -> Iterator[str]:
    """Yield the lines of the table: RRA's choice at the bounds at which the paper has groups, where
    hosts take time beside passes, of which pipelines have more than groups, and links are faster.
    """
    rows = PAPER_SCHEDULES[2:]
    columns = [f"{row.label}, {_seconds(row.bound_s)} s | RRA here" for row in rows]
    yield header(f"host, ms a pass | links | FT's bounds here, s | {' | '.join(columns)}")
    for host_s, times in GROUPED:
        gpus = replace(A40, link_gbyte_per_s=times * A40.link_gbyte_per_s)
        setting = Setting(replace(MODELS[0], gpus=gpus), TASKS["S"].lengths, host_s)
        rra, bounds = rra_of(setting), ", ".join(map(_seconds, setting.bounds_s[:-1]))
        cells = [f"{1e3 * host_s:.0f}", f"x{times}", bounds]
        for row in rows:
            cells += [_performance(as_published(setting, row)), _chosen(rra.best(row.bound_s))]
        yield table_row(cells)


def as_published(setting: Setting, row: PaperRow) -> Performance:
    """The performance of the paper's schedule by our simulation. Of WAA it does not say how GPUs
    are divided: the best way is taken, with one group.
    """
    costs = setting.model.costs
    if row.steps is not None:
        layout = Layout(row.degree, setting.model.count)
        pipeline = Pipeline.of(
            costs, costs.cluster.devices, layout, setting.lengths, setting.host_s
        )
        assert pipeline is not None
        return RraSchedules(setting, layout, pipeline).performance_of(row.newcomers, row.steps)
    found = []
    for grouped in range(row.degree, setting.model.count + 1, row.degree):
        layout = Layout(row.degree, grouped)
        for gpus in range(1, setting.model.count):
            divided = divided_of(setting, layout, gpus)
            if divided is not None:
                schedules = WaaSchedules(setting, "waa-c", layout, divided)
                found.append(schedules.performance(schedules.point_of(row.newcomers)))
    fitting = [each for each in found if math.isfinite(each.latency_s)]
    return max(fitting, key=lambda each: each.requests_per_s, default=DOES_NOT_FIT)


def _performance(found: Performance) -> str:
    if found == DOES_NOT_FIT:
        return "no room"
    return f"{found.latency_s:.2f}: {found.requests_per_s:.1f}"


def _chosen(found: Chosen | None) -> str:
    if found is None:
        return "NS"
    return f"{found.latency_s:.2f}: {found.requests_per_s:.1f} ({found.label})"


def _seconds(bound_s: float) -> str:
    return f"{bound_s:.1f}" if math.isfinite(bound_s) else "none"


CHANGED = "changed lengths"
TASK = TASKS["T"]
FACTORS = (0.7, 0.85, 1.0, 1.15, 1.3)
SKEWNESS = (-0.4, -0.2, 0.0, 0.2, 0.4)
PAPER_CHANGES = (
    "mean 1.15: latency 1.13 (all), 1.10 (one length); deviation 1.3: 1.05, 1.00; RRA: throughput "
    "within 28 %, latency within 12.6 % for means, 11 % and 17 % for the others"
)


@dataclass(frozen=True)
class Changed:
    """A change of the outputs: requests per second and latencies of the schedule that stays, and
    requests per second of the one that is adjusted. `all_s` is the 99th percentile of all requests,
    `one_s` that of the output at which the schedule was bounded.
    """

    kind: str
    what: str
    value: float
    kept_per_s: float
    adjusted_per_s: float
    all_s: float
    one_s: float


def changed_lengths_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--update", type=Path, help="page whose table is replaced")


def run_changed_lengths(options: argparse.Namespace) -> None:
    """Print the table."""
    found = [*changes("WAA"), *changes("RRA")]
    show(changed_table(found), options.update, CHANGED)


def changes(kind: str) -> Iterator[Changed]:
    """Yield all changes for the schedule that is best at the least bound that it can keep of those
    of 30 and 70 % of FasterTransformer's latencies.
    """
    setting = Setting(MODELS[0], TASK.lengths)
    find = rra_of if kind == "RRA" else waa_of
    for bound_s in setting.bounds_s[1:3]:
        placed = find(setting).placed(bound_s)
        if placed is not None:
            break
    assert placed is not None
    schedule = placed.schedules.schedule_at(placed.point)
    for what, value, outputs in distributions():
        lengths = RequestLengths(setting.lengths.prompts, outputs)
        kept = placed.schedules.timeline(schedule, lengths)
        anew = Setting(setting.model, lengths)
        adjusted = find(anew).best(bound_s)
        yield Changed(
            kind,
            what,
            value,
            kept.performance.requests_per_s,
            0.0 if adjusted is None else adjusted.requests_per_s,
            kept.performance.latency_s,
            kept.latency_of(setting.bounded_output),
        )


def distributions() -> Iterator[tuple[str, float, LengthDistribution]]:
    """Yield changed outputs; where their mean grows, so does the longest."""
    mean, deviation, longest = TASK.outputs.mean, TASK.outputs.deviation, TASK.outputs.longest
    for factor in FACTORS:
        most = round(longest * max(1.0, factor))
        yield "mean", factor, truncated_normal_of(factor * mean, deviation, most)
    for factor in FACTORS:
        yield "deviation", factor, truncated_normal_of(mean, factor * deviation, longest)
    for skewness in SKEWNESS:
        yield "skewness", skewness, skewed_normal_of(mean, deviation, longest, skewness)


def changed_table(found: Sequence[Changed]) -> Iterator[str]:
    """Yield the lines of the table; latencies are multiples of those without a change."""
    yield header(
        "schedule | changed | by | stays, req/s | adjusted, req/s | 99 % of all | one length"
    )
    usual = {each.kind: each for each in found if each.what == "mean" and each.value == 1.0}
    for each in found:
        base = usual[each.kind]
        cells = [
            each.kind,
            each.what,
            f"{each.value:g}",
            f"{each.kept_per_s:.2f}",
            f"{each.adjusted_per_s:.2f}" if each.adjusted_per_s else "NS",
            f"{each.all_s / base.all_s:.2f}",
            f"{each.one_s / base.one_s:.2f}",
        ]
        yield table_row(cells)


TURNS = 400
WARM_UP = 0.25
"""The share of turns that is left out at the beginning, from which on groups are full."""
PAPER_VARIANCE = {
    "RRA": ("1.68 (±0.12, ±7.1%)", "0.038 (±0.001, ±2.4%)"),
    "WAA": ("0.85 (±0.10, ±11.8%)", "0.041 (±0.002, ±5.5%)"),
}


def variance_table() -> Iterator[str]:
    """Yield the lines of the table: mean seconds of the slowest stage, and half of the range that
    99 % of them lie in.
    """
    setting = Setting(MODELS[0], TASKS["S"].lengths)
    chosen = {
        "RRA": rra_of(setting).placed(setting.bounds_s[2]),
        "WAA": waa_of(setting).placed(setting.bounds_s[1]),
    }
    yield header("schedule | prefill of a turn, s | the paper | decode step, s | the paper")
    for name, placed in chosen.items():
        assert placed is not None
        prefill_s, decode_s = sampled(placed, setting.lengths)
        cells = (
            _spread(prefill_s, 3),
            PAPER_VARIANCE[name][0],
            _spread(decode_s, 3),
            PAPER_VARIANCE[name][1],
        )
        label = placed.schedules.label(placed.point)
        yield f"| {name}: {label} | {' | '.join(cells)} |"


def sampled(placed: Placed, lengths: RequestLengths) -> tuple[FloatArray, FloatArray]:
    """Seconds of the slowest stage for the prompts of turns, and for decode steps of a group."""
    schedules = placed.schedules
    schedule = schedules.schedule_at(placed.point)
    generator = np.random.default_rng(0)
    if isinstance(schedules, RraSchedules):
        times = schedules.pipeline.times
        return _sampled(times, times, schedule, lengths, generator)
    assert isinstance(schedules, WaaSchedules)
    both = schedules.divided
    return _sampled(both.prefill.times, both.decode.times, schedule, lengths, generator)


def _sampled(
    prefill: StageSeconds,
    decode: StageSeconds,
    schedule: RequestSchedule,
    lengths: RequestLengths,
    generator: np.random.Generator,
) -> tuple[FloatArray, FloatArray]:
    """Seconds of turns [turns, 1] and of the steps after each [turns, steps], of one group with
    random requests.
    """
    share = schedule.prefill_requests / schedule.decode_micro_batches
    left, tokens = np.zeros((2, 0), dtype=np.int64)
    turns: list[list[float]] = []
    steps: list[list[float]] = []
    owed = 0.0
    for turn in range(TURNS):
        owed += share
        count = int(owed)
        owed -= count
        prompts = lengths.prompts.drawn(count, generator)
        kept = turn >= WARM_UP * TURNS
        if kept and count:
            turns.append([_turn_s(prefill, prompts, schedule.prefill_micro_batch)])
        left = np.concatenate([left, lengths.outputs.drawn(count, generator) - 1])
        tokens = np.concatenate([tokens, prompts + 1])
        row: list[float] = []
        for _ in range(schedule.decode_steps):
            left, tokens = left[left > 0], tokens[left > 0]
            if kept:
                context = round(tokens.mean()) if len(left) else 1
                row.append(float(decode.decode_s(max(1, len(left)), context).max()))
            left, tokens = left - 1, tokens + 1
        if kept:
            steps.append(row)
    return np.array(turns), np.array(steps)


def _turn_s(times: StageSeconds, prompts: FloatArray, most: int) -> float:
    """Seconds of the slowest stage for prompts in micro-batches of at most `most`."""
    parts = np.array_split(prompts, -(-len(prompts) // most))
    seconds = [
        np.mean([times.prefill_s(len(part), each) for each in part.tolist()], axis=0)
        for part in parts
    ]
    return float(np.sum(seconds, axis=0).max())


def _spread(seconds: FloatArray, digits: int) -> str:
    """Mean and half of the range of 99 %, by how far each differs from others at its place."""
    low, high = np.quantile(seconds / seconds.mean(axis=0), (0.005, 0.995))
    mean = float(seconds.mean())
    half = mean * float(high - low) / 2
    return f"{mean:.{digits}f} (±{half:.{digits}f}, ±{half / mean:.1%})"
