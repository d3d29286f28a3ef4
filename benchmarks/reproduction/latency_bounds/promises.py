"""What plans promise beside the runtime's own schedulers in virtual time.

    python -m benchmarks.reproduction.latency_bounds promises [--cases 36] [--named]

A case is a schedule of RRA, WAA-C or WAA-M, taken at random, on a random cluster with lengths of
one kind and one to eight newcomers a turn, where layers are placed for a start of the search. Both
have the same requests, so that what differs is what they decide. With `--named` plans come first
that are searched for within a bound; the runtime's requests are drawn with another seed there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.lab import PAPER_BITS, ROOT, header, processor_name, table_row
from benchmarks.reproduction.latency_bounds.runtime import OTHER_SEED, SEED, seen_by_runtime
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.latency_bound.alternation import KindPlanner, ScheduleSpace
from planner.latency_bound.bounded_plan import bounded_options, bounded_plan, costs_beside_bound
from planner.latency_bound.bounded_search import BoundedSearch
from planner.latency_bound.judged import Scheduled
from planner.latency_bound.rra import RraPlanner
from planner.latency_bound.schedules import BoundRequest, job_of
from planner.latency_bound.simulate import ObservedRequests
from planner.latency_bound.waa import WaaPlanner
from planner.lengths import LengthDistribution, RequestLengths
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.scheduling import SCHEDULE_KINDS, RequestSchedule, ScheduleKind
from planner.search.request import PlanningRequest
from quant.common.errors import BoundNotMetError, InfeasibleError


def _mixture(*parts: tuple[float, LengthDistribution]) -> LengthDistribution:
    chances: dict[int, float] = {}
    for share, each in parts:
        for length, chance in zip(each.lengths, each.probabilities, strict=True):
            chances[length] = chances.get(length, 0.0) + share * chance
    return LengthDistribution(*zip(*sorted(chances.items()), strict=True))


_normal = LengthDistribution.truncated_normal


def _lognormal(mean: float, sigma: float, longest: int) -> LengthDistribution:
    sample = np.random.default_rng(5).lognormal(np.log(mean) - sigma**2 / 2, sigma, 20_000)
    return LengthDistribution.of_sample(np.clip(sample.astype(np.int64), 1, longest))


def _constant(length: int) -> LengthDistribution:
    return LengthDistribution((length,), (1.0,))


LENGTHS = {
    "constant": RequestLengths(_constant(512), _constant(100)),
    "normal": RequestLengths(_normal(256, 252, 512), _normal(32, 13, 80)),
    "short answers": RequestLengths(_lognormal(512, 0.7, 1536), _lognormal(12, 0.8, 64)),
    "bimodal": RequestLengths(
        _mixture((0.5, _normal(96, 32, 192)), (0.5, _normal(900, 128, 1200))),
        _mixture((0.5, _normal(16, 6, 32)), (0.5, _normal(200, 40, 320))),
    ),
    "long tail": RequestLengths(_lognormal(200, 1.0, 1024), _lognormal(60, 1.1, 1024)),
}

NAMED = (
    ("opt-66b", "paper_06", "bimodal", "rra", 10.7, PAPER_BITS),
    ("opt-66b", "paper_06", "bimodal", "rra", 25.0, PAPER_BITS),
    ("opt-66b", "paper_09", "short answers", "rra", 16.2, PAPER_BITS),
    ("opt-30b", "paper_09", "short answers", "rra", 4.29, PAPER_BITS),
    ("opt-30b", "paper_09", "constant", "waa-c", 5.24, PAPER_BITS),
    ("opt-13b", "paper_10", "long tail", "rra", 32.6, PAPER_BITS),
    ("opt-13b", "paper_10", "long tail", "rra", 32.6, (16,)),
    ("opt-13b", "paper_10", "long tail", "rra", 33.9, (16,)),
)
"""Models, clusters, lengths, kinds of schedules, bounds in seconds, and bits of layers."""


def costs_of_case(
    model: str, cluster: ClusterSpec, request: BoundRequest, **given: object
) -> CostModel:
    """What a search for these schedules goes by."""
    options = bounded_options(PlanOptions.of(given))
    planned = PlanningRequest.of(cluster, model_shape(model), job_of(request), options)
    return costs_beside_bound(planned)[0]


def named_rows(requests: int, limit_s: float) -> Iterator[str]:
    """Yield a row for each plan that is searched for, and why there is none."""
    for model, name, lengths, kind, bound_s, bits in NAMED:
        cluster = ClusterSpec.from_yaml(ROOT / "cluster_specs" / f"{name}.yaml")
        request = BoundRequest(LENGTHS[lengths], bound_s, kinds=(kind,))
        costs = costs_of_case(model, cluster, request, search_time_limit=limit_s, bits=bits)
        began_s = time.process_time()
        try:
            found = BoundedSearch(costs, request, time.process_time).within(bound_s)
        except BoundNotMetError as error:
            yield table_row([model, name, lengths, f"{bound_s:g}", error])
            continue
        took_s = time.process_time() - began_s
        bounded = f"{found.latency_s / bound_s:.2f} of {bound_s:g} s in {took_s:.1f} s"
        seen = seen_by_runtime(bounded_plan(found, costs, model, ""), found, requests, OTHER_SEED)
        yield table_row([model, name, lengths, bounded, *cells_of(found, seen)])


NEWCOMERS, DEVICES = 8, (2, 4)
"""The most newcomers of a turn, and the fewest and the most devices of a cluster."""
ACCELERATORS = "T4-16GB", "P100-12GB", "V100-SXM2-32GB", "A100-SXM4-40GB"
MODELS = "opt-1.3b", "opt-6.7b", "opt-13b"
PLACING_S = 2.0


def random_rows(cases: range, requests: int) -> Iterator[str]:
    """Yield a row for each random plan."""
    for number in cases:
        rng = np.random.default_rng(number)
        kind, newcomers = SCHEDULE_KINDS[number % 3], 1 + number // 3 % NEWCOMERS
        found = None
        while found is None:
            model, lengths = str(rng.choice(MODELS)), str(rng.choice(list(LENGTHS)))
            cluster = _random_cluster(rng)
            costs = costs_of_case(model, cluster, BoundRequest(LENGTHS[lengths], None))
            found = _random_plan(kind, newcomers, costs, LENGTHS[lengths], requests, rng)
        seen = seen_by_runtime(bounded_plan(found, costs, model, ""), found, requests, SEED)
        names = ", ".join(device.name.partition("/")[2] for device in cluster.devices)
        yield table_row([model, names, lengths, "–", *cells_of(found, seen)])


def _random_cluster(rng: np.random.Generator) -> ClusterSpec:
    """Devices of one or two kinds, each kind on a node."""
    least, most = DEVICES
    kinds = rng.choice(ACCELERATORS, int(rng.integers(1, 3)), replace=False).tolist()
    counts = np.bincount(np.arange(int(rng.integers(least, most + 1))) % len(kinds)).tolist()
    nodes = [
        {"name": f"n{place}", "accelerators": {kind: count}}
        for place, (kind, count) in enumerate(zip(kinds, counts, strict=True))
    ]
    network = {"internode_gbit_per_s": 100}
    return ClusterSpec.from_dict({"name": "random", "nodes": nodes, "network": network})


def _random_plan(
    kind: ScheduleKind,
    newcomers: int,
    costs: CostModel,
    lengths: RequestLengths,
    requests: int,
    rng: np.random.Generator,
) -> Scheduled | None:
    """A schedule of so many newcomers a turn, by the events of so many requests; None where none
    has room.
    """
    request, job = BoundRequest(lengths, None), costs.job
    assert job is not None
    planner_of: type[KindPlanner] = RraPlanner if kind == "rra" else WaaPlanner
    planner = planner_of(kind, costs, job, request, time.process_time)
    starts = list(planner.starts())
    try:
        placed = planner.placed(starts[int(rng.integers(len(starts)))], 0.0, PLACING_S)
    except InfeasibleError:
        return None
    schedule, fits = placed.fitted(_random_point(placed, newcomers, lengths, rng))
    return Scheduled(placed, schedule, 0.0, placed.observed(schedule, requests)) if fits else None


def _random_point(
    placed: ScheduleSpace, newcomers: int, lengths: RequestLengths, rng: np.random.Generator
) -> tuple[int, ...]:
    if placed.kind != "rra":
        return (max(1, round(newcomers * (lengths.outputs.mean - 1) * rng.uniform(0.9, 1.1))),)
    steps = round(float(np.exp(rng.uniform(0.0, np.log(lengths.outputs.mean)))))
    return newcomers, placed.ranges[1].stop - steps, int(rng.choice(placed.ranges[2]))


def cells_of(found: Scheduled, seen: ObservedRequests) -> list[str]:
    """What a plan promises, and what the runtime has of it."""
    latency_s = seen.latency_s(found.placed.request.quantile)
    return [
        found.schedule.kind,
        controls(found.schedule),
        f"{found.latency_s:.3g} s ± {found.error_s / found.latency_s:.1%}",
        f"{latency_s / found.latency_s:.3f}",
        f"{found.requests_per_s:.3g}",
        f"{seen.requests_per_s / found.requests_per_s:.3f}",
    ]


def controls(s: RequestSchedule) -> str:
    return f"{s.prefill_requests}/{s.decode_requests}/{s.decode_steps}/{s.decode_micro_batches}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=36)
    parser.add_argument("--first", type=int, default=0, help="the number of the first of them")
    parser.add_argument("--named", action="store_true")
    parser.add_argument("--requests", type=int, default=200, help="that count, of each")
    parser.add_argument("--search_time_limit", type=float, default=20.0)


def run(options: argparse.Namespace) -> None:
    print(processor_name())
    print(
        header(
            "model | cluster | lengths | planned over bound | kind | B_E/B_D/N_D/groups | "
            "planned 99 % | runtime over planned | planned req/s | runtime over planned"
        ),
        flush=True,
    )
    if options.named:
        for line in named_rows(options.requests, options.search_time_limit):
            print(line, flush=True)
    cases = range(options.first, options.first + options.cases)
    for line in random_rows(cases, options.requests):
        print(line, flush=True)
