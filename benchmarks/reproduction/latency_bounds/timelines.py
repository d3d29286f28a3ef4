"""Timelines of random schedules beside simulations of their events.

Half of the cases are schedules of RRA, half of WAA, on random pipelines of one to eight stages with
random lengths, times shaped like a roofline's. Printed are the shares of cases in which requests
per second are within 5 % of the simulation and the 99th percentile of latencies within 10 %, the
median deviation and the worst, and the CPU seconds of either.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np

from benchmarks.lab import header, processor_name, table_row
from benchmarks.reproduction.latency_bounds.promises import LENGTHS
from benchmarks.reproduction.latency_bounds.setting import waa_decode_requests
from planner.costs.communication import COPY_LAUNCH_S
from planner.latency_bound import simulate
from planner.latency_bound.placed_layers import Handover, StageCopies, WaaSides
from planner.latency_bound.rra_timeline import rra_timeline
from planner.latency_bound.schedules import Completions, prefill_sizes, rra_schedule
from planner.latency_bound.simulate import (
    DrawnRequest,
    ObservedRequests,
    RequestWatch,
    simulate_rra,
    simulate_waa,
)
from planner.latency_bound.timeline import StageSeconds, Timeline
from planner.latency_bound.waa_timeline import waa_timeline
from planner.lengths import FloatArray, LengthDistribution, RequestLengths
from planner.scheduling import RequestSchedule

# Half-precision TFLOP/s and memory GB/s of data sheets: T4, P100, V100, A100, H100.
DEVICES = ((65.0, 320.0), (18.7, 732.0), (125.0, 900.0), (312.0, 1555.0), (990.0, 3350.0))
_REACHED = 0.5
_LAYER_OVERHEAD_S = 1e-4


@dataclass(frozen=True, eq=False)
class RandomTimes:
    """Times of stages of these numbers of `layers` [N], each of `hidden` width with `bits` a
    weight, on devices of these rates [N]; links have `link_latency_s` and `link_bytes_per_s` [N].
    """

    layers: FloatArray
    hidden: float
    bits: float
    flops: FloatArray
    bytes_per_s: FloatArray
    link_latency_s: FloatArray
    link_bytes_per_s: FloatArray

    @property
    def stages(self) -> int:
        """Number of stages, N."""
        return len(self.layers)

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """Compute seconds of the prompts of a micro-batch [N]."""
        tokens = requests * prompt_tokens
        pairs = tokens * prompt_tokens / 2
        return self._layers_s(tokens, 4 * pairs * self.hidden, 0.0)

    def attention_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """The part of those seconds that is attention's [N]."""
        flops = 2 * requests * prompt_tokens**2 * self.hidden
        return np.asarray(self.layers * flops / self.flops)

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        """Compute seconds of a decode step [N]."""
        read = requests * (context_tokens + 1)
        return self._layers_s(requests, 0.0, 4 * read * self.hidden)

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """Seconds of the transfers behind the stages for the prompts of a micro-batch [N]."""
        sent = np.full(self.stages, 2 * requests * prompt_tokens * self.hidden)
        sent[-1] = 4 * requests
        return np.asarray(self.link_latency_s + sent / self.link_bytes_per_s)

    def decode_hop_s(self, requests: float) -> FloatArray:
        """Seconds of the transfers behind the stages for a decode step [N]."""
        return self.prefill_hop_s(requests, 1.0)

    def _layers_s(self, tokens: float, attention_flops: float, kv_bytes: float) -> FloatArray:
        weights = 12 * self.hidden**2
        products_s = 2 * tokens * weights / self.flops
        read_s = weights * self.bits / 8 / self.bytes_per_s
        attention_s = np.maximum(attention_flops / self.flops, kv_bytes / self.bytes_per_s)
        layer_s = np.maximum(products_s, read_s) + attention_s + _LAYER_OVERHEAD_S
        return np.asarray(self.layers * layer_s)


def random_times(rng: np.random.Generator, stages: int) -> RandomTimes:
    """Stages of one to three kinds of devices, balanced with errors of some tens of percent."""
    kinds = np.array(DEVICES)[rng.choice(len(DEVICES), size=int(rng.integers(1, 4)))]
    rates = kinds[rng.integers(len(kinds), size=stages)] * [[1e12, 1e9]] * _REACHED
    hidden, bits = float(rng.choice([2048, 4096, 5120, 7168, 8192])), float(rng.choice([4, 8, 16]))
    balanced = rates[:, 1] ** rng.uniform(0, 1) * rates[:, 0] ** rng.uniform(0, 0.5)
    share = balanced * rng.lognormal(0, 0.25, stages)
    layers = np.maximum(1.0, np.round(share / share.sum() * rng.integers(24, 81)))
    return RandomTimes(
        layers,
        hidden,
        bits,
        rates[:, 0],
        rates[:, 1],
        np.exp(rng.uniform(np.log(1e-5), np.log(1e-3), stages)),
        np.exp(rng.uniform(np.log(1e9), np.log(1e11), stages)),
    )


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
        in_flight = round(newcomers * Completions(lengths.outputs, steps).phases)
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


QUANTILE, NEAR_RATE, NEAR_LATENCY = 0.99, 0.05, 0.10
SETTLING = 6
"""Times the requests in flight that begin before those which are observed: twice as many as where
plans are judged, as some queues settle slowly."""


@dataclass(frozen=True)
class Deviation:
    """A timeline's requests per second and latency over the simulation's, less 1; and the CPU
    seconds of both.
    """

    requests_per_s: float
    latency: float
    timeline_s: float
    events_s: float


def of_rra(seed: int, requests: int) -> Deviation:
    """The deviation of a random schedule of RRA."""
    case: RraCase = random_rra(np.random.default_rng([1, seed]))
    parts = case.times, case.lengths, case.schedule
    watch = RequestWatch(SETTLING * case.schedule.decode_requests, requests)
    return _deviation(
        lambda: rra_timeline(*parts, QUANTILE),
        lambda: simulate_rra(*parts, watch, np.random.default_rng(seed)),
    )


def of_waa(seed: int, requests: int) -> Deviation:
    """The deviation of a random schedule of WAA."""
    case: WaaCase = random_waa(np.random.default_rng([7, seed]))
    watch = RequestWatch(SETTLING * case.schedule.decode_requests, requests)
    return _deviation(
        lambda: waa_timeline(case.sides, case.schedule, QUANTILE),
        lambda: simulate_waa(case.sides, case.schedule, watch, np.random.default_rng(seed)),
    )


def _deviation(
    timeline: Callable[[], Timeline], events: Callable[[], ObservedRequests]
) -> Deviation:
    began_s = time.process_time()
    found = timeline().performance
    between_s = time.process_time()
    seen = events()
    return Deviation(
        found.requests_per_s / seen.requests_per_s - 1,
        found.latency_s / seen.latency_s(QUANTILE) - 1,
        between_s - began_s,
        time.process_time() - between_s,
    )


def line(name: str, found: Sequence[Deviation]) -> str:
    """A row of the table."""
    cells = [name, str(len(found))]
    rates, latencies = [each.requests_per_s for each in found], [each.latency for each in found]
    for values, limit in ((rates, NEAR_RATE), (latencies, NEAR_LATENCY)):
        off = np.array(values)
        near, median = np.mean(np.abs(off) <= limit), np.median(np.abs(off))
        cells += [f"{near:.0%}", f"{median:.1%}", f"{off.min():+.0%} to {off.max():+.0%}"]
    seconds = [np.mean([each.timeline_s for each in found]) * 1e3]
    seconds.append(np.mean([each.events_s for each in found]) * 1e3)
    return table_row([*cells, *(f"{each:.1f}" for each in seconds)])


OF_KIND = {"RRA": of_rra, "WAA": of_waa}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is tried."""
    parser.add_argument("--cases", type=int, default=200, help="of both kinds together")
    parser.add_argument("--requests", type=int, default=4000, help="simulated of each")
    parser.add_argument("--kinds", nargs="+", choices=OF_KIND, default=list(OF_KIND))


def run(options: argparse.Namespace) -> None:
    """Print the table, and below it each case that is not near."""
    print(f"{options.cases} cases, {options.requests} requests each; {processor_name()}")
    print(
        header(
            "kind | cases | requests/s within 5 % | median | worst | latency within 10 % | "
            "median | worst | timeline ms | events ms"
        ),
        flush=True,
    )
    far = list[str]()
    for name in options.kinds:
        found = [OF_KIND[name](seed, options.requests) for seed in range(options.cases // 2)]
        print(line(name, found), flush=True)
        far += [
            f"{name} {seed}: requests/s {each.requests_per_s:+.1%}, latency {each.latency:+.1%}"
            for seed, each in enumerate(found)
            if abs(each.requests_per_s) > NEAR_RATE or abs(each.latency) > NEAR_LATENCY
        ]
    print("\n".join(far))


ROWS, MANY, COUNTED = 500, 20_000, 4_000


def draws_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=6)


def run_draws(options: argparse.Namespace) -> None:
    """Print p99 by seeds, of requests drawn each for itself and counted alike, as they were once,
    and as plans are judged. Of 500 rows exactly 1 % are the longest five: whether a draw has a few
    more or fewer of these decides between two rows' lengths.
    """
    print(processor_name())
    print(header("requests | p99 over that of many | stated error | within it"), flush=True)
    many = float(np.quantile(_seen(MANY, 100, each_alone=True).latencies_s, QUANTILE))
    seeds = range(options.seeds)
    alone = [_seen(COUNTED, seed, each_alone=True).latencies_s for seed in seeds]
    ratios = [float(np.quantile(each, QUANTILE)) / many for each in alone]
    print(table_row(["each for itself", f"{min(ratios):.3f} to {max(ratios):.3f}", "–", "–"]))
    seen = [_seen(COUNTED, seed) for seed in seeds]
    ratios = [each.latency_s(QUANTILE) / many for each in seen]
    errors = [each.latency_error_s(QUANTILE) / many for each in seen]
    cells = f"{min(ratios):.3f} to {max(ratios):.3f}", f"{min(errors):.1%} to {max(errors):.1%}"
    within = sum(abs(r - 1) <= error for r, error in zip(ratios, errors, strict=True))
    print(table_row(["as plans are judged", *cells, f"{within} of {len(ratios)}"]))


def _seen(counted: int, seed: int, each_alone: bool = False) -> ObservedRequests:
    """A schedule in turns of a few requests, which have many phases; answers of a long tail."""
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
        return simulate_rra(times, lengths, schedule, watch, generator)


def _alone(
    lengths: RequestLengths, count: int, generator: np.random.Generator
) -> list[DrawnRequest]:
    prompts, outputs = (
        each.drawn(count, generator).tolist() for each in (lengths.prompts, lengths.outputs)
    )
    return list(map(DrawnRequest, prompts, outputs))
