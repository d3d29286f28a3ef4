"""Random schedules on random pipelines, on which timelines are held against event simulation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.reproduction.latency_bounds.random_times import RandomTimes, random_times
from planner.costs.preemption import COPY_LAUNCH_S
from planner.latency_bound.schedules import Completions, prefill_sizes, waa_decode_requests
from planner.latency_bound.stage_times import StageSeconds
from planner.latency_bound.waa_sides import Handover, StageCopies, WaaSides
from planner.length_distribution import LengthDistribution, RequestLengths
from planner.scheduling import RequestSchedule

MOST_STAGES = 8
MOST_IN_FLIGHT = 2048


@dataclass(frozen=True, eq=False)
class RraCase:
    """A schedule of RRA."""

    times: StageSeconds
    lengths: RequestLengths
    schedule: RequestSchedule


@dataclass(frozen=True, eq=False)
class WaaCase:
    """A schedule of WAA."""

    sides: WaaSides
    schedule: RequestSchedule


def random_lengths(rng: np.random.Generator) -> RequestLengths:
    """Lengths of a task: truncated normal ones, or those of a sample with a long tail."""
    return RequestLengths(_random_distribution(rng, 32, 600), _random_distribution(rng, 16, 260))


def _random_distribution(rng: np.random.Generator, low: int, high: int) -> LengthDistribution:
    mean = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    share = rng.uniform(0.2, 0.9)
    if rng.random() < 0.6:
        longest = int(mean * rng.uniform(1.6, 2.8)) + 1
        return LengthDistribution.truncated_normal(mean, share * mean, longest)
    sample = rng.lognormal(np.log(mean) - share**2 / 2, share, size=2000)
    return LengthDistribution.of_sample(np.clip(sample.astype(np.int64), 1, int(6 * mean)))


def random_rra(rng: np.random.Generator) -> RraCase:
    """A schedule of RRA on up to `MOST_STAGES` stages."""
    stages = int(rng.integers(1, MOST_STAGES + 1))
    groups = stages if rng.random() < 0.6 else int(rng.integers(1, 2 * stages + 1))
    while True:
        lengths = random_lengths(rng)
        newcomers, steps = _log_uniform(rng, 1, 128), _log_uniform(rng, 1, 300)
        in_flight = round(Completions(lengths.outputs, steps).decode_requests(newcomers))
        if in_flight <= MOST_IN_FLIGHT:
            break
    schedule = RequestSchedule(
        "rra",
        newcomers,
        max(1, in_flight),
        steps,
        groups,
        _log_uniform(rng, 1, 16),
        lengths.prompts.mean,
    )
    return RraCase(random_times(rng, stages), lengths, schedule)


def random_waa(rng: np.random.Generator) -> WaaCase:
    """A schedule of WAA on up to `MOST_STAGES` stages in all."""
    stages = int(rng.integers(2, MOST_STAGES + 1))
    prefill = int(rng.integers(1, max(2, stages // 2 + 1)))
    while True:
        lengths = random_lengths(rng)
        newcomers = _log_uniform(rng, 1, 64)
        in_flight = round(waa_decode_requests(lengths.outputs, newcomers))
        if in_flight <= MOST_IN_FLIGHT:
            break
    schedule = RequestSchedule(
        "waa-c" if rng.random() < 0.5 else "waa-m",
        newcomers,
        max(1, in_flight),
        1,
        int(rng.integers(1, stages - prefill + 2)),
        int(rng.choice(prefill_sizes(newcomers, lengths.prompts.mean))),
        lengths.prompts.mean,
    )
    decode = random_times(rng, stages - prefill)
    sent_s = float(np.exp(rng.uniform(np.log(1e-7), np.log(2e-5))))
    times = random_times(rng, prefill)
    copies = (_random_copies(rng, each) for each in (times, decode))
    handover = Handover(*copies, 0.0, sent_s)
    return WaaCase(WaaSides(times, decode, handover, lengths), schedule)


def _random_copies(rng: np.random.Generator, times: RandomTimes) -> StageCopies:
    """Copies of half-precision keys and values over PCI Express."""
    bytes_per_s = np.exp(rng.uniform(np.log(6e9), np.log(5e10), times.stages))
    return StageCopies(
        2 * times.layers * COPY_LAUNCH_S, 4 * times.hidden * times.layers / bytes_per_s
    )


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))
