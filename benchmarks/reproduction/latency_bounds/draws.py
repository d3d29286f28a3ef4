"""The 99th percentile of one simulation of 4,000 requests, over that of many: drawn each for itself
and counted alike, as they were once, and as plans are judged.

Answers are 500 rows with a long tail, of which exactly 1 % are the longest five: whether a draw has
a few more or fewer of these decides between two rows' lengths.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np

from benchmarks.lab import header, processor_name, table_row
from benchmarks.reproduction.latency_bounds.promises import LENGTHS
from benchmarks.reproduction.latency_bounds.timelines import QUANTILE, SETTLING, random_times
from planner.latency_bound import simulate
from planner.latency_bound.schedules import rra_schedule
from planner.latency_bound.simulate import DrawnRequest, ObservedRequests, RequestWatch
from planner.lengths import LengthDistribution, RequestLengths

ROWS, MANY, COUNTED = 500, 20_000, 4_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=6)


def run(options: argparse.Namespace) -> None:
    print(processor_name())
    print(header("requests | p99 over that of many | stated error"), flush=True)
    many = float(np.quantile(_seen(MANY, 100, each_alone=True).latencies_s, QUANTILE))
    seeds = range(options.seeds)
    alone = [_seen(COUNTED, seed, each_alone=True).latencies_s for seed in seeds]
    ratios = [float(np.quantile(each, QUANTILE)) / many for each in alone]
    print(table_row(["each for itself", f"{min(ratios):.3f} to {max(ratios):.3f}", "–"]))
    seen = [_seen(COUNTED, seed) for seed in seeds]
    ratios = [each.latency_s(QUANTILE) / many for each in seen]
    errors = [each.latency_error_s(QUANTILE) / many for each in seen]
    cells = f"{min(ratios):.3f} to {max(ratios):.3f}", f"{min(errors):.1%} to {max(errors):.1%}"
    print(table_row(["as plans are judged", *cells]))


def _seen(counted: int, seed: int, each_alone: bool = False) -> ObservedRequests:
    """A schedule in turns of a few requests, which have many phases."""
    tail = np.random.default_rng(3).lognormal(np.log(60) - 0.6, 1.1, ROWS)
    outputs = LengthDistribution.of_sample(np.clip(tail.astype(np.int64), 1, 1024))
    lengths, rng = RequestLengths(LENGTHS["long tail"].prompts, outputs), np.random.default_rng(0)
    times = random_times(rng, int(rng.integers(1, 5)))
    newcomers, steps = int(rng.integers(4, 40)), int(rng.integers(30, 80))
    schedule = rra_schedule(lengths, newcomers, steps, times.stages, 4)
    watch = RequestWatch(SETTLING * schedule.decode_requests, counted)
    drawn = patch.object(simulate, "drawn_requests", _alone) if each_alone else nullcontext()
    with drawn:
        generator = np.random.default_rng(seed)
        return simulate.simulate_rra(times, lengths, schedule, watch, generator)


def _alone(
    lengths: RequestLengths, count: int, generator: np.random.Generator
) -> list[DrawnRequest]:
    prompts, outputs = (
        each.drawn(count, generator).tolist() for each in (lengths.prompts, lengths.outputs)
    )
    return list(map(DrawnRequest, prompts, outputs))
