"""Part (b): large models on modelled A100 pipelines, in virtual time.

    python -m benchmarks.reproduction.orca emulated [--models 13B 175B 341B]
                                       [--at_ms 190] [--degree 1]
    python -m benchmarks.reproduction.orca emulated --models demo --profiles profile.csv

The product's scheduler and live run drive stages that take the seconds of the planner's latency
model. Nothing waits and nothing is random but by seed, so that the tables are the same everywhere.
Loads are read where latency is twice the least one, or `--at_ms`. With `--degree 1` each GPU is a
stage, where else eight of a node are one, by tensor parallelism.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean, median

import numpy as np

from actors.schedule.orca import OrcaScheduler, orca_sizes
from actors.schedule.scheduler import Scheduler
from benchmarks.lab import header, table_row
from benchmarks.reproduction.orca.pipelines import (
    CPUS,
    MOST_BATCH,
    SETTINGS,
    ModelledPipeline,
    Setting,
    modelled_pipeline,
)
from benchmarks.reproduction.orca.request_level import RequestLevelScheduler
from benchmarks.reproduction.orca.traces import KINDS, Lengths, lengths_of, poisson
from benchmarks.reproduction.orca.virtual_time import outcomes
from planner.scheduling import PolicyOptions

ALONE_PER_S = 1e-3
"""A load at which no request ever meets another one."""
BISECTIONS = 4
"""Of a factor of 1.5: to within 2.6 %."""
BETTER = 1.03
LEAST_BATCH = 8
"""The least max_bs of orca that is tried: the paper's best ones are larger."""
SIZES = (1, 2, 4, 8, 16, 32, 64, MOST_BATCH)


@dataclass(frozen=True)
class Policy:
    """A policy with its knobs: `sizes` are orca's (max_bs,) or the baseline's (max_bs, mbs)."""

    name: str
    sizes: tuple[int, ...]
    scheduler: Callable[[], Scheduler]

    @property
    def label(self) -> str:
        """The paper's label in fig. 10."""
        return f"{self.name}({', '.join(map(str, self.sizes))})"


def orca_policies(pipeline: ModelledPipeline) -> list[Policy]:
    """The product's own scheduler with every max_bs."""

    def make(max_bs: int) -> Scheduler:
        options = PolicyOptions("orca", max_batch_size=max_bs)
        return OrcaScheduler(orca_sizes(pipeline.plan, options), len(pipeline.times))

    return [Policy("orca", (size,), partial(make, size)) for size in SIZES if size >= LEAST_BATCH]


def request_level_policies(pipeline: ModelledPipeline) -> list[Policy]:
    """Every max_bs that memory has room for, with two mbs: that of the whole batch, and that of as
    many micro-batches as there are stages.
    """
    slot_tokens = pipeline.plan.workload.total_length

    def make(max_bs: int, mbs: int) -> Scheduler:
        return RequestLevelScheduler(max_bs, mbs, slot_tokens, pipeline.kv_tokens)

    return [
        Policy("ft", (max_bs, mbs), partial(make, max_bs, mbs))
        for max_bs in SIZES
        if max_bs * slot_tokens <= pipeline.kv_tokens
        for mbs in sorted({max_bs, -(-max_bs // len(pipeline.times))}, reverse=True)
    ]


@dataclass(frozen=True)
class Point:
    """What a load leads to: median normalized latency, and requests and tokens served a second."""

    per_s: float
    normalized_s: float
    served_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, eq=False)
class Curve:
    """Latency by load of `policy` on requests of these lengths; every point is computed once."""

    pipeline: ModelledPipeline
    policy: Policy
    lengths: Sequence[Lengths]
    seed: int = 0
    _points: dict[float, Point] = field(default_factory=dict)

    def at(self, per_s: float) -> Point:
        """The point of this load."""
        if per_s not in self._points:
            trace = poisson(self.lengths, per_s, self.seed)
            found = outcomes(self.policy.scheduler(), self.pipeline.times, trace)
            seconds = max(each.ended_s for each in found) - trace[0].at_s
            self._points[per_s] = Point(
                per_s,
                median(each.normalized_s for each in found),
                len(found) / seconds,
                sum(each.lengths.new for each in found) / seconds,
            )
        return self._points[per_s]

    @property
    def peak(self) -> Point:
        """All requests at once: the most that is served a second."""
        return self.at(1e6)

    def carries(self, per_s: float, normalized_s: float) -> bool:
        """Whether latency at this load is at most this."""
        return self.at(per_s).normalized_s <= normalized_s

    def load_at(self, normalized_s: float) -> float:
        """The load at which latency goes beyond this, by bisection.

        It is at most what is served when all requests come at once: where the trace is too short
        for a queue, latency would stay low beyond that.
        """
        most = self.peak.served_per_s
        low = high = most / 2
        while high < most and self.carries(high, normalized_s):
            low, high = high, min(high * 1.5, most)
        if high == most and self.carries(most, normalized_s):
            return most
        while not self.carries(low, normalized_s):
            low, high = low / 1.5, low
        for _ in range(BISECTIONS):
            middle = (low * high) ** 0.5
            carried = self.carries(middle, normalized_s)
            low, high = (middle, high) if carried else (low, middle)
        return low


def best_curve(curves: Sequence[Curve], normalized_s: float) -> Curve:
    """The one that carries the most load at this latency; one that does not carry `BETTER` times
    the load of the best so far is not looked at further.
    """
    chosen, load = curves[0], 0.0
    for curve in curves:
        if not load or curve.carries(BETTER * load, normalized_s):
            found = curve.load_at(normalized_s)
            if found > load:
                chosen, load = curve, found
    return chosen


LOADS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0)
"""Of the curves, in multiples of the load that request-level batching carries."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    names = [setting.model for setting in SETTINGS]
    parser.add_argument("--models", nargs="+", default=names, choices=[*names, CPUS.model])
    parser.add_argument("--profiles", help="file of `llmpq profile`, for the model on two CPUs")
    parser.add_argument("--traces", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--requests", type=int, default=1000, help="of orca's trace")
    parser.add_argument("--fewer", type=int, default=300, help="of the baseline's, its beginning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at_ms", type=float, help="a token, where loads are read")
    parser.add_argument("--degree", type=int, help="GPUs of a stage; as in the paper by default")
    parser.add_argument("--data", type=Path, help="folder of the reference data (conversation)")


def run(options: argparse.Namespace) -> None:
    """Print a line for each model and trace, and the curves behind it."""
    print(
        header(
            "model, A100-40GB | trace | stages | token slots | least ms | at ms | orca(max_bs) "
            "| req/s | ft(max_bs, mbs) | req/s | ratio | at most req/s | ratio"
        )
    )
    curves: list[str] = []
    for setting in (*SETTINGS, replace(CPUS, profiles=options.profiles)):
        if setting.model not in options.models:
            continue
        if options.degree is not None and not setting.is_cpu:
            setting = replace(setting, degree=options.degree)
        for kind in options.traces:
            lengths = lengths_of(kind, options.requests, options.seed, options.data)
            line, more = compared(setting, kind, lengths, options)
            print(line, flush=True)
            curves += more if kind == "uniform" or setting.is_cpu else []
    print("\n".join(["", *curves]))


def compared(
    setting: Setting, kind: str, lengths: Sequence[Lengths], options: argparse.Namespace
) -> tuple[str, list[str]]:
    """The line of the table, and the curves of both policies' best configurations."""
    longest = Lengths(max(each.prompt for each in lengths), max(each.new for each in lengths))
    pipeline = modelled_pipeline(setting, longest)
    few = lengths[: options.fewer]
    curves = [
        [Curve(pipeline, policy, over, options.seed) for policy in policies]
        for policies, over in (
            (orca_policies(pipeline), lengths),
            (request_level_policies(pipeline), few),
        )
    ]
    least_s = min(each[0].at(ALONE_PER_S).normalized_s for each in curves)
    at_s = 2 * least_s if options.at_ms is None else options.at_ms / 1e3
    orca, baseline = (best_curve(each, at_s) for each in curves)
    loads = [curve.load_at(at_s) for curve in (orca, baseline)]
    peaks = [curve.peak.served_per_s for curve in (orca, baseline)]
    cells = [
        f"{setting.model} × {setting.gpus}",
        kind,
        f"{len(pipeline.times)} of {setting.degree}",
        f"{pipeline.kv_tokens}",
        f"{1e3 * least_s:.0f}",
        f"{1e3 * at_s:.0f}",
        orca.policy.label,
        f"{loads[0]:.3g}",
        baseline.policy.label,
        f"{loads[1]:.3g}",
        f"**{loads[0] / loads[1]:.1f}**",
        f"{peaks[0]:.3g}, {peaks[1]:.3g}",
        f"{peaks[0] / peaks[1]:.1f}",
    ]
    lines = curve_lines(setting, kind, orca, baseline, loads[1])
    return table_row(cells), [*lines, work_line(pipeline, lengths)]


def work_line(pipeline: ModelledPipeline, lengths: Sequence[Lengths]) -> str:
    """What a request of mean lengths costs the slower stage, alone and beside others."""
    prompt, new = (round(mean(each)) for each in zip(*map(astuple, lengths), strict=True))
    prefill_s = max(each.compute_s(False, np.array([prompt])) for each in pipeline.times)
    parts = [f"its prompt {1e3 * prefill_s:.0f} ms"]
    for size in (1, 8, pipeline.setting.most_batch):
        contexts = np.full(size, prompt + new // 2)
        step_s = max(each.compute_s(True, contexts) for each in pipeline.times)
        parts.append(f"its {new - 1} steps {1e3 * step_s * (new - 1) / size:.0f} ms among {size}")
    return f"A request of {prompt} and {new} tokens on the slower stage: {', '.join(parts)}.\n"


def curve_lines(
    setting: Setting, kind: str, orca: Curve, baseline: Curve, unit_per_s: float
) -> Iterator[str]:
    """Markdown: median normalized latency of both by load."""
    beside = f" (beside the paper's {setting.paper})" if setting.paper else ""
    yield f"{setting.model}{beside}, {kind}:\n"
    yield header(f"req/s | {orca.policy.label} ms a token | {baseline.policy.label} ms a token")
    for factor in LOADS:
        per_s = factor * unit_per_s
        cells = []
        for curve in (orca, baseline):
            point = curve.at(per_s)
            saturated = point.served_per_s < 0.9 * per_s
            cells.append(
                f"serves {point.served_per_s:.2g} req/s"
                if saturated
                else f"{1e3 * point.normalized_s:.0f}"
            )
        yield f"| {per_s:.3g} | {' | '.join(cells)} |"
    yield ""
