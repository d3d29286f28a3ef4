"""How much the seconds of a stage vary from turn to turn and from step to step (table 7).

    python -m benchmarks.reproduction.latency_bounds variance [--update docs/latency_bounds.md]

OPT 13B, task S, for the schedules of RRA at the third bound and of WAA at the second.
As in the paper's table nothing is adjusted: every turn has the same number of newcomers, whatever
their prompts, and whoever ends leaves the others fewer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.planning.planner import update_page
from benchmarks.reproduction.latency_bounds.bounded import Placed
from benchmarks.reproduction.latency_bounds.models import MODELS
from benchmarks.reproduction.latency_bounds.rra_schedules import RraSchedules, rra_of
from benchmarks.reproduction.latency_bounds.setting import Setting
from benchmarks.reproduction.latency_bounds.tasks import TASKS
from benchmarks.reproduction.latency_bounds.waa_schedules import WaaSchedules, waa_of
from planner.latency_bound.stage_times import StageSeconds
from planner.length_distribution import FloatArray, RequestLengths
from planner.scheduling import RequestSchedule

SECTION = "variance"
TURNS = 400
WARM_UP = 0.25
"""The share of turns that is left out at the beginning, from which on groups are full."""
PAPER = {
    "RRA": ("1.68 (±0.12, ±7.1%)", "0.038 (±0.001, ±2.4%)"),
    "WAA": ("0.85 (±0.10, ±11.8%)", "0.041 (±0.002, ±5.5%)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--update", type=Path, help="page whose table is replaced")


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    lines = list(table())
    print("\n".join(lines))
    if options.update is not None:
        update_page(options.update, SECTION, lines)


def table() -> Iterator[str]:
    """Yield the lines of the table: mean seconds of the slowest stage, and half of the range that
    99 % of them lie in.
    """
    setting = Setting(MODELS[0], TASKS["S"].lengths)
    chosen = {
        "RRA": rra_of(setting).placed(setting.bounds_s[2]),
        "WAA": waa_of(setting).placed(setting.bounds_s[1]),
    }
    yield "| schedule | prefill of a turn, s | the paper | decode step, s | the paper |"
    yield "|---" * 5 + "|"
    for name, placed in chosen.items():
        assert placed is not None
        prefill_s, decode_s = sampled(placed, setting.lengths)
        cells = (_spread(prefill_s, 3), PAPER[name][0], _spread(decode_s, 3), PAPER[name][1])
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
