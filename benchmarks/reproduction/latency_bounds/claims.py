"""Whether schedules keep their bounds: the chosen ones simulated event by event, and plans that
run on this machine's CPU.

    python -m benchmarks.reproduction.latency_bounds claims [--models 13B] [--tasks S T]
    python -m benchmarks.reproduction.latency_bounds real [--runs 10] [--kinds rra waa-c]

`claims`: models, tasks and bounds of `throughput`. A schedule is chosen by its timeline, so that
99 % of all requests keep the bound. Then its events are simulated with random lengths; where they
do not keep it, a schedule is chosen for a tighter bound and for more of the requests. A second
simulation with other lengths is the judge.

`real`: two stages of one thread, and bounds that are multiples of the least one of each kind of
schedule. A plan is made for each, as `llmpq plan` makes it, and run again and again with other
prompts of token ids; tokens per second are of whole runs, with the filling and the draining.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.lab import header, processor_name, show, spread, table_row
from benchmarks.reproduction.latency_bounds.models import MODELS, TASKS, Model
from benchmarks.reproduction.latency_bounds.schedules import rra_of, waa_of
from benchmarks.reproduction.latency_bounds.setting import QUANTILE, Bounded, Placed, Setting
from llmpq import BoundNotMetError, Cluster, Plan, RequestLengths
from llmpq.report.latency import LatencyFigures
from planner.cluster.spec import ClusterSpec
from planner.latency_bound.simulate import ObservedRequests, RequestWatch
from planner.lengths import LengthDistribution
from planner.scheduling import SCHEDULE_KINDS
from quant.checkpoint.model_reference import DEMO

KINDS: dict[str, Callable[[Setting, float], Bounded]] = {"RRA": rra_of, "WAA": waa_of}
SETTLING = 3
"""Times the requests in flight that begin before those which are observed."""
CHOOSING, JUDGING = 4000, 8000
"""Requests of the simulation by which schedules are chosen, and of the one that judges them."""
CHECKS = ((1.0, 1.0), (0.998, 0.9), (0.99, 0.8), (0.98, 0.65), (0.95, 0.5), (0.9, 0.3), (0.8, 0.2))
"""Shares of the bound, and of the requests that may be later, with which schedules are chosen."""
SEEDS = 0, 1
"""Of these two."""
ROUNDING = 0.02
"""A share of the bound by which the quantile of so many random requests may exceed it."""


@dataclass(frozen=True, eq=False)
class Claim:
    """A schedule of a kind within a bound: `first` is what the timeline finds, `chosen` what is
    claimed after simulating, each with what was seen; None where no schedule is claimed.
    """

    model: Model
    task: str
    bound_s: float
    kind: str
    first: Placed
    first_seen: ObservedRequests
    chosen: Placed | None
    judged: ObservedRequests | None

    @property
    def kept(self) -> bool:
        """Whether the judge sees what is claimed within the bound."""
        return self.judged is not None and self.share <= 1

    @property
    def share(self) -> float:
        """The 99th percentile that the judge sees, as a share of the bound."""
        assert self.judged is not None
        return self.judged.latency_s(QUANTILE) / self.bound_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--models", nargs="+", default=["13B", "39B"], help="parts of names")
    parser.add_argument("--tasks", nargs="+", choices=TASKS)


def run(options: argparse.Namespace) -> None:
    """Print the tables."""
    found = [
        claim
        for model in MODELS
        if any(part in model.label for part in options.models)
        for task in model.tasks
        if not options.tasks or task in options.tasks
        for claim in claims(Setting(model, TASKS[task].lengths), task)
    ]
    show(summary(found))


def claims(setting: Setting, task: str) -> Iterator[Claim]:
    """Yield the claims of a setting at its finite bounds."""
    for kind, schedules_of in KINDS.items():
        by_quantile: dict[float, Bounded] = {}
        for bound_s in filter(math.isfinite, setting.bounds_s):
            first = seen = chosen = judged = None
            for share, late in CHECKS:
                quantile = 1 - late * (1 - QUANTILE)
                if quantile not in by_quantile:
                    by_quantile[quantile] = schedules_of(setting, quantile)
                placed = by_quantile[quantile].placed(share * bound_s)
                if placed is None:
                    break
                observed = simulated(placed, CHOOSING, SEEDS[0])
                if first is None:
                    first, seen = placed, observed
                if observed.latency_s(QUANTILE) <= bound_s:
                    chosen, judged = placed, simulated(placed, JUDGING, SEEDS[1])
                    break
            if first is not None and seen is not None:
                yield Claim(setting.model, task, bound_s, kind, first, seen, chosen, judged)


def simulated(placed: Placed, count: int, seed: int) -> ObservedRequests:
    """What is seen of so many requests under a schedule."""
    schedule = placed.schedules.schedule_at(placed.point)
    watch = RequestWatch(SETTLING * schedule.decode_requests, count)
    return placed.schedules.observed(schedule, watch, seed)


def summary(found: Sequence[Claim]) -> Iterator[str]:
    """Yield the lines of a table of counts and ratios by kind."""
    yield header(
        "kind | schedules | timeline's latency within 5 % of events | its throughput | "
        "within the bound at once | claimed | within | within 2 % | most | "
        "throughput kept"
    )
    for kind in KINDS:
        own = [each for each in found if each.kind == kind]
        if own:
            yield f"| {kind} | {' | '.join(_counts(own))} |"


def _counts(own: Sequence[Claim]) -> list[str]:
    planned = [each.first.performance for each in own]
    seen = [each.first_seen for each in own]
    latency = np.array(
        [p.latency_s / s.latency_s(QUANTILE) for p, s in zip(planned, seen, strict=True)]
    )
    rate = np.array(
        [p.requests_per_s / s.requests_per_s for p, s in zip(planned, seen, strict=True)]
    )
    claimed = [each for each in own if each.judged is not None]
    shares = np.array([each.share for each in claimed])
    at_once = sum(s.latency_s(QUANTILE) <= e.bound_s for e, s in zip(own, seen, strict=True))
    kept = [
        each.judged.requests_per_s / each.first_seen.requests_per_s
        for each in claimed
        if each.judged is not None
    ]
    return [
        str(len(own)),
        _near(latency),
        _near(rate),
        str(at_once),
        str(len(claimed)),
        str(int((shares <= 1).sum())),
        str(int((shares <= 1 + ROUNDING).sum())),
        f"{shares.max():.3f}" if claimed else "–",
        f"{np.mean(kept):.0%}" if kept else "–",
    ]


def _near(ratios: np.ndarray[tuple[int], np.dtype[np.float64]]) -> str:
    """How many ratios are within 5 % of 1, and the least and the most."""
    near = int((np.abs(ratios - 1) <= 0.05).sum())
    return f"{near} ({ratios.min():.2f} to {ratios.max():.2f})"


TWO_STAGES = {
    "name": "this_cpu",
    "nodes": [{"accelerators": {"CPU": 2}, "threads": 1, "memory_gib": 4}],
}
MEAN_LENGTHS = RequestLengths(
    LengthDistribution.truncated_normal(64, 16, 128), LengthDistribution.truncated_normal(24, 8, 48)
)


def real_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of plans that run."""
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--bits", type=int, nargs="+", default=[16])
    parser.add_argument("--kinds", nargs="+", default=["rra", "waa-c"], choices=SCHEDULE_KINDS)
    parser.add_argument("--multiples", type=float, nargs="+", default=[1.5, 3.0])
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--profiles", help="in place of what is measured at first use")


def run_real(options: argparse.Namespace) -> None:
    """Plan, run, and print the table."""
    print(processor_name())
    show(_real_rows(options))


def _real_rows(options: argparse.Namespace) -> Iterator[str]:
    yield header(
        "kind | bound | margin | planned 99 % | runs (least to most) | kept | planned tokens/s | "
        "runs | of the plan"
    )
    for kind in options.kinds:
        least_s = _least_bound_s(kind, options)
        for multiple in options.multiples:
            plan = _plan(kind, multiple * least_s, options)
            forecast = plan.spec.latency
            assert forecast is not None
            found = [_run(plan, options.rows, turn) for turn in range(options.runs)]
            latencies_s = [each.quantile_s for each, _ in found]
            rates = [rate for _, rate in found]
            kept = sum(each <= multiple * least_s for each in latencies_s)
            yield table_row(
                [
                    kind.upper(),
                    f"{multiple * least_s:.2f} s",
                    f"{forecast.margin:.0%}",
                    f"{forecast.latency_s:.2f} s",
                    spread(latencies_s, 2),
                    f"{kept} of {len(found)}",
                    f"{forecast.tokens_per_s:.1f}",
                    spread(rates, 1),
                    f"{median(rates) / forecast.tokens_per_s:.2f}",
                ]
            )


def _plan(kind: str, bound_s: float, options: argparse.Namespace) -> Plan:
    return Cluster(ClusterSpec.from_dict(TWO_STAGES)).plan(
        options.model,
        MEAN_LENGTHS,
        bits=options.bits,
        keep_all_devices=True,
        max_request_latency_s=bound_s,
        schedule=kind,
        profiles=options.profiles,
    )


def _least_bound_s(kind: str, options: argparse.Namespace) -> float:
    """The least bound that a schedule of this kind keeps by its plan."""
    try:
        _plan(kind, 1e-3, options)
    except BoundNotMetError as error:
        return error.reachable
    raise AssertionError("nothing is done within a millisecond")


def _run(plan: Plan, rows: int, turn: int) -> tuple[LatencyFigures, float]:
    """Latencies and tokens per second of a run of its own prompts."""
    draw = np.random.default_rng(turn)
    lengths = zip(
        *(each.drawn(rows, draw).tolist() for each in (MEAN_LENGTHS.prompts, MEAN_LENGTHS.outputs)),
        strict=True,
    )
    prompts = [
        {
            "prompt": draw.integers(1000, 40000, prompt).tolist(),
            "max_new_tokens": output,
            "ignore_eos": True,
        }
        for prompt, output in lengths
    ]
    with plan.run(prompts, temperature=0.0) as results:
        list(results)
        summary = results.summary
    assert summary is not None
    assert summary.latency is not None
    return summary.latency, summary.tokens_per_s
