"""Whether schedules keep their bounds: the chosen ones, simulated event by event.

    python -m benchmarks.reproduction.latency_bounds claims [--models 13B] [--tasks S T]

Models, tasks and bounds of `throughput`. A schedule is chosen by its timeline, so that 99 % of all
requests keep the bound. Then its events are simulated with random lengths; where they do not keep
it, a schedule is chosen for a tighter bound and for more of the requests. A second simulation with
other lengths is the judge.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.lab import header, show
from benchmarks.reproduction.latency_bounds.models import MODELS, TASKS, Model
from benchmarks.reproduction.latency_bounds.schedules import rra_of, waa_of
from benchmarks.reproduction.latency_bounds.setting import QUANTILE, Bounded, Placed, Setting
from planner.latency_bound.simulate import ObservedRequests, RequestWatch

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
