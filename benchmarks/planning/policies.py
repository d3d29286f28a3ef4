"""Which policy is fastest for which job: forecasts of plans for `static`, `orca` and `auto`.

    python -m benchmarks.planning.policies [--model opt-6.7b] [--devices T4-16GB] [--seconds 10]

Ten shapes of job, drawn with a fixed seed; two stages unless the shape says otherwise. Each plan is
searched for so many seconds (of `auto` both together), and its tokens per second are those of the
whole job simulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.lab import header, processor_name
from llmpq import Cluster
from planner.lengths import IntArray, Lengths
from planner.workload import Job

ROWS, LONGEST = 2000, 1536
Draw = Callable[[np.random.Generator, int], tuple[IntArray, IntArray]]


def alike(prompt: int, output: int) -> Draw:
    """Rows that are all of these lengths."""
    return lambda _, rows: (np.full(rows, prompt), np.full(rows, output))


def even(prompts: tuple[int, int], outputs: tuple[int, int]) -> Draw:
    """Every length of these ranges as likely as every other."""
    return lambda random, rows: (random.integers(*prompts, rows), random.integers(*outputs, rows))


def long_tail(random: np.random.Generator, rows: int) -> tuple[IntArray, IntArray]:
    """Lengths as of chats: most are short, a few some twenty times as long."""
    prompts, outputs = random.lognormal(5, 1, rows), random.lognormal(4, 1.2, rows)
    return tuple(np.clip(each, 1, LONGEST / 3).astype(int) for each in (prompts, outputs))


@dataclass(frozen=True)
class Shape:
    """A kind of job; `stages` devices run it."""

    name: str
    draw: Draw
    rows: int = ROWS
    stages: int = 2

    def job(self) -> Job:
        """The job, of at most as many sampled rows as a plan keeps."""
        prompts, outputs = self.draw(np.random.default_rng(0), min(self.rows, 512))
        return Job(self.rows, Lengths(tuple(prompts.tolist()), tuple(outputs.tolist())))


MIXED = even((16, 512), (8, 200))
SHAPES = (
    Shape("equal lengths", alike(512, 100)),
    Shape("mixed", MIXED),
    Shape("long tail", long_tail),
    Shape("prefill-heavy", even((512, 1024), (8, 32))),
    Shape("decode-heavy", even((16, 64), (200, 500))),
    Shape("short answers", even((64, 512), (1, 8))),
    Shape("few rows", MIXED, rows=24),
    Shape("many rows", MIXED, rows=20_000),
    Shape("one stage", MIXED, stages=1),
    Shape("four stages", MIXED, stages=4),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan and print Markdown."""
    options = read_options(arguments)
    print(f"{processor_name()}; {options.model} on {options.devices}, at 16 and 8 bit\n")
    print(header(f"job | {' | '.join(options.policies)} | auto takes | auto of the better one"))
    for shape in SHAPES:
        cluster = Cluster.from_counts([options.devices], [shape.stages])
        rates: dict[str, float] = {}
        taken = ""
        for policy in options.policies:
            plan = cluster.plan(
                options.model,
                shape.job(),
                bits=(8, 16),
                policy=policy,
                search_time_limit=options.seconds,
            )
            rates[policy], taken = plan.predicted.tokens_per_s, plan.spec.policy.name
        cells = " | ".join(f"{rate:,.0f}" for rate in rates.values())
        share = rates[options.policies[-1]] / max(rates.values())
        print(f"| {shape.name} | {cells} | {taken} | {share:.3f} |", flush=True)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="opt-6.7b")
    parser.add_argument("--devices", default="V100-SXM2-16GB", help="the kind of all of them")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each search")
    parser.add_argument("--policies", nargs="+", default=["static", "orca", "auto"])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
