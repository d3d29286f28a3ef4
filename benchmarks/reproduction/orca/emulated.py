"""Part (b): large models on modelled A100 pipelines, in virtual time.

    python -m benchmarks.reproduction.orca emulated [--models opt-13b opt-66b opt-175b]
                                       [--at_ms 190] [--degree 1]

The product's scheduler and live run drive stages that take the seconds of the planner's latency
model. Nothing waits and nothing is random but by seed, so that the tables are the same everywhere.
Loads are read where latency is twice the least one, or `--at_ms`. With `--degree 1` each GPU is a
stage, where else eight of a node are one, by tensor parallelism.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.reproduction.orca.curves import (
    ALONE_PER_S,
    Curve,
    best_curve,
    orca_policies,
    request_level_policies,
)
from benchmarks.reproduction.orca.pipelines import SETTINGS, Setting, modelled_pipeline
from benchmarks.reproduction.orca.traces import KINDS, Lengths, lengths_of

LOADS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0)
"""Of the curves, in multiples of the load that request-level batching carries."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    names = [setting.model for setting in SETTINGS]
    parser.add_argument("--models", nargs="+", default=names, choices=names)
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
        "| model, A100-40GB | trace | stages | token slots | least ms | at ms | orca(max_bs) "
        "| req/s | ft(max_bs, mbs) | req/s | ratio | at most req/s | ratio |\n" + "|---" * 13 + "|"
    )
    curves: list[str] = []
    for setting in SETTINGS:
        if setting.model not in options.models:
            continue
        if options.degree is not None:
            setting = replace(setting, degree=options.degree)
        for kind in options.traces:
            lengths = lengths_of(kind, options.requests, options.seed, options.data)
            line, more = compared(setting, kind, lengths, options)
            print(line, flush=True)
            curves += more if kind == "uniform" else []
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
    return f"| {' | '.join(cells)} |", list(curve_lines(setting, kind, orca, baseline, loads[1]))


def curve_lines(
    setting: Setting, kind: str, orca: Curve, baseline: Curve, unit_per_s: float
) -> Iterator[str]:
    """Markdown: median normalized latency of both by load."""
    yield f"{setting.model} (beside the paper's {setting.paper}), {kind}:\n"
    yield f"| req/s | {orca.policy.label} ms a token | {baseline.policy.label} ms a token |"
    yield "|---|---|---|"
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
