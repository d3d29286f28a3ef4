"""Part (a): a LLaMA of 168 million parameters on two cores, in real time.

    python -m benchmarks.orca real [--requests 60] [--rounds 3]

Both policies run on the same two stages of one thread each. A trace is played at loads that a short
calibration finds: requests one by one give the least latency, all at once the most that is served.
Loads go up or down until latency crosses twice the least one. The policies take turns, with a fixed
product and copy of memory beside them that tell the machine's pace.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median

from benchmarks.machine import pace_probe, processor_name
from benchmarks.orca.contestants import Contestant, TurnsGroup
from benchmarks.orca.real_time import play
from benchmarks.orca.stages import MOST_BATCH, cpu_stages
from benchmarks.orca.traces import Lengths, lengths_of, poisson

STEP = 1.4
"""Between two loads."""
POINTS = 5
"""Most loads of a policy."""
ALL_AT_ONCE_PER_S = 1e6
ALONE = 5
"""Requests that are played one by one for the least latency."""
BASELINES = (Contestant(1, 1),)
"""The best one in virtual time, on all models with this trace."""
ORCAS = (Contestant(8), Contestant(MOST_BATCH))


@dataclass(frozen=True)
class Load:
    """What came of a load: median normalized latency in multiples of the least one."""

    per_s: float
    times_least: float
    served_per_s: float
    tokens_per_s: float
    matmul_gflop_per_s: float


@dataclass
class Search:
    """The search for the load at which a policy's latency is twice the least one."""

    contestant: Contestant
    next_per_s: float
    most_per_s: float = math.inf
    loads: list[Load] = field(default_factory=list)

    def add(self, load: Load) -> None:
        """Take in what came of `next_per_s`, and choose the next load."""
        self.loads.append(load)
        self.next_per_s *= STEP if load.times_least <= 2 else 1 / STEP

    @property
    def is_done(self) -> bool:
        """Whether loads on both sides of it are known, or enough were tried."""
        sides = {load.times_least <= 2 for load in self.loads}
        return len(sides) == 2 or len(self.loads) >= POINTS

    @property
    def load_per_s(self) -> float:
        """The load, by interpolation of logarithms; the nearest one that was tried where all were
        on one side. At most `most_per_s`: short traces end before a queue is long.
        """
        below = max((x for x in self.loads if x.times_least <= 2), key=_load, default=None)
        above = min((x for x in self.loads if x.times_least > 2), key=_load, default=None)
        if below is None or above is None:
            return min(self.most_per_s, (below or above or self.loads[0]).per_s)
        share = math.log(2 / below.times_least) / math.log(above.times_least / below.times_least)
        return min(self.most_per_s, below.per_s * (above.per_s / below.per_s) ** share)


def _load(load: Load) -> float:
    return load.per_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--requests", type=int, default=80, help="of orca's trace at each load")
    parser.add_argument("--fewer", type=int, default=24, help="of the baseline's, its beginning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small model: to try the command")


def run(options: argparse.Namespace) -> None:
    """Print every load that was tried, and the ratio."""
    print(processor_name())
    lengths = lengths_of("uniform", options.requests, options.seed)
    with cpu_stages(options.tiny) as group:
        searches = searched(group, lengths, options)
    print("\n".join(report(searches)))


def report(searches: Sequence[Search]) -> Iterator[str]:
    """Markdown: every load that was tried, and how the best of both policies compare."""
    yield "| policy | req/s | times the least latency | served req/s | tokens/s | bf16 GFLOP/s |"
    yield "|---|---|---|---|---|---|"
    for search in searches:
        for load in sorted(search.loads, key=_load):
            yield (
                f"| {search.contestant.label} | {load.per_s:.3g} | {load.times_least:.2f} "
                f"| {load.served_per_s:.3g} | {load.tokens_per_s:.0f} "
                f"| {load.matmul_gflop_per_s:.0f} |"
            )
    found = {s.contestant: s.load_per_s for s in searches}
    baseline, orca = (max(each, key=lambda c: found[c]) for each in (BASELINES, ORCAS))
    yield (
        f"\nAt twice the least latency {orca.label} carries {found[orca]:.3g} req/s, "
        f"{baseline.label} {found[baseline]:.3g}: {found[orca] / found[baseline]:.1f} times."
    )


def searched(
    group: TurnsGroup, lengths: Sequence[Lengths], options: argparse.Namespace
) -> list[Search]:
    """All policies, each until its load is found; they take turns."""
    probe = pace_probe()
    turns = count(1)

    def measured(contestant: Contestant, requests: int, per_s: float, least_s: float) -> Load:
        pace = probe()
        trace = poisson(lengths[:requests], per_s, options.seed)
        timed = play(group, contestant, trace, next(turns))
        seconds = max(t.tokens_s[-1] for t in timed) - trace[0].at_s
        load = Load(
            per_s,
            median(t.normalized_s for t in timed) / least_s,
            len(timed) / seconds,
            sum(t.lengths.new for t in timed) / seconds,
            pace.mean(probe()).matmul_gflop_per_s,
        )
        print(contestant.label, load, file=sys.stderr, flush=True)
        return load

    def alone() -> tuple[float, float]:
        """Median normalized latency, and mean latency, of requests that are played one by one."""
        singles = [
            play(group, ORCAS[-1], poisson([each], ALL_AT_ONCE_PER_S, 0), next(turns))[0]
            for each in lengths[:ALONE]
        ]
        return median(x.normalized_s for x in singles), sum(x.latency_s for x in singles) / ALONE

    alone()  # compiles
    least_s, service_s = alone()
    peak = measured(ORCAS[-1], min(options.requests, 2 * MOST_BATCH), ALL_AT_ONCE_PER_S, least_s)
    print(
        f"alone {1e3 * least_s:.1f} ms a token and {service_s:.2f} s a request; orca serves at "
        f"most {peak.served_per_s:.2f} req/s\n",
        flush=True,
    )
    most_per_s = peak.served_per_s
    searches = [Search(each, 0.4 / service_s) for each in BASELINES]
    searches += [Search(each, 0.7 * most_per_s, most_per_s) for each in ORCAS]
    while pending := [each for each in searches if not each.is_done]:
        least_s, _ = alone()  # again in every round, as the machine's pace changes
        for search in pending:
            few = search.contestant.micro_batch_size > 0
            requests = options.fewer if few else options.requests
            search.add(measured(search.contestant, requests, search.next_per_s, least_s))
    return searches
