"""Runs of plans under a bound on latency: their requests, what is measured, and a table's rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmpq import Plan, RequestLengths, Sampling

FIRST_TOKEN = 3
"""Tokens before it have a meaning of their own."""

HEAD = (
    "| case | kind | planned req/s | run | ratio | bound s | planned p99 s | run | kept |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Measured:
    """Results a second while stages are full, and the latency at the plan's quantile."""

    requests_per_s: float
    latency_s: float
    errors: int


def rows(
    lengths: RequestLengths, vocabulary: int, count: int, seed: int = 0
) -> list[dict[str, object]]:
    """So many requests with lengths in their proportions, in random order: else a few hundred have
    other means than the distributions, by some percent.
    """
    generator = np.random.default_rng(seed)
    prompts, outputs = (
        [each.quantile(share) for share in generator.permutation((np.arange(count) + 0.5) / count)]
        for each in (lengths.prompts, lengths.outputs)
    )
    span = vocabulary - FIRST_TOKEN
    return [
        {
            "custom_id": str(i),
            "prompt": [FIRST_TOKEN + (i + k) % span for k in range(prompt)],
            "max_new_tokens": output,
        }
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def measure(plan: Plan, requests: list[dict[str, object]]) -> Measured:
    """Run the requests; raises SystemExit where some have no result."""
    ended_s: list[float] = []
    with plan.run(requests, sampling=Sampling(ignore_eos=True), replan="never") as results:
        for _ in results:
            ended_s.append(time.perf_counter())
        summary = results.summary
    if summary is None or summary.latency is None or len(ended_s) != len(requests):
        raise SystemExit(f"{len(ended_s)} of {len(requests)} requests ended")
    schedule = plan.spec.policy.followed_schedule
    in_flight = schedule.most_in_flight
    window = slice(min(2 * in_flight, len(ended_s) // 3), len(ended_s) - in_flight)
    return Measured(slope(ended_s, window), summary.latency.quantile_s, summary.errors)


def slope(ended_s: Sequence[float], window: slice) -> float:
    """Results a second by the least squares of their number over time in a window of them."""
    chosen = ended_s[window]
    if len(chosen) < 2:
        raise SystemExit("too few requests for a steady state; give more --requests")
    return float(np.polyfit(chosen, np.arange(len(chosen)), 1)[0])


def line(name: str, plan: Plan, found: Measured, time_scale: float = 1.0) -> str:
    """A row of the table, in seconds of the devices."""
    forecast, kind = plan.spec.latency, plan.spec.policy.followed_schedule.kind
    assert forecast is not None
    rate, latency_s = found.requests_per_s * time_scale, found.latency_s / time_scale
    ratio = rate / forecast.requests_per_s
    kept = "yes" if latency_s <= forecast.bound_s else "**no**"
    return (
        f"| {name} | {kind} | {forecast.requests_per_s:.3f} | {rate:.3f} | {ratio:.3f} "
        f"| {forecast.bound_s:.3g} | {forecast.latency_s:.2f} | {latency_s:.2f} | {kept} |"
    )
