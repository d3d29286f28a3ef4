"""Prompts in parts, in real time: what `--prefill_chunk_tokens` does to tokens and their waits.

    python -m benchmarks.orca chunks --data REFERENCE_DATA [--passes 2]

The conversation trace at seven tenths of what is served when all come at once, on the stages of
part (a). Sizes take turns pass by pass; figures are medians over the passes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.machine import pace_probe, processor_name
from benchmarks.orca.contestants import Contestant
from benchmarks.orca.real_time import Timed, play
from benchmarks.orca.stages import MOST_BATCH, cpu_stages
from benchmarks.orca.traces import lengths_of, poisson
from benchmarks.turns import spread

SIZES = (0, 64, 128, 256, 512)
SHARE = 0.7


@dataclass(frozen=True)
class Pass:
    """Tokens a second, and percentiles in milliseconds."""

    tokens_per_s: float
    gap_ms: tuple[float, float]
    """50th and 99th percentile of the time between two tokens of a request."""
    first_ms: tuple[float, float]
    """The same of the time to the first token."""
    matmul_gflop_per_s: float

    @classmethod
    def of(cls, timed: Sequence[Timed], matmul_gflop_per_s: float) -> Pass:
        """The figures of a pass."""
        seconds = max(each.tokens_s[-1] for each in timed) - timed[0].arrived_s
        gaps = np.percentile([gap for each in timed for gap in each.gaps_s], (50, 99))
        first = np.percentile([each.first_s for each in timed], (50, 99))
        return cls(
            sum(each.lengths.new for each in timed) / seconds,
            (1e3 * float(gaps[0]), 1e3 * float(gaps[1])),
            (1e3 * float(first[0]), 1e3 * float(first[1])),
            matmul_gflop_per_s,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--requests", type=int, default=60, help="of a pass")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, required=True, help="folder of the reference data")
    parser.add_argument("--tiny", action="store_true", help="a small model: to try the command")


def run(options: argparse.Namespace) -> None:
    """Print a line for each size."""
    print(processor_name())
    lengths = lengths_of("conversation", options.requests, options.seed, options.data)
    probe = pace_probe()
    passes: dict[int, list[Pass]] = {size: [] for size in options.sizes}
    with cpu_stages(options.tiny) as group:
        for turn in (0, 1):  # the first one warms up
            all_at_once = play(group, Contestant(MOST_BATCH), poisson(lengths, 1e6, 0), turn)
        per_s = SHARE * len(lengths) / max(each.tokens_s[-1] for each in all_at_once)
        print(f"{per_s:.2f} requests/s, {SHARE:g} of what is served at most\n", flush=True)
        trace = poisson(lengths, per_s, options.seed)
        for number in range(options.passes):
            for size in options.sizes:
                turn += 1
                before = probe()
                timed = play(group, Contestant(MOST_BATCH, 0, size), trace, turn)
                pace = before.mean(probe()).matmul_gflop_per_s
                passes[size].append(Pass.of(timed, pace))
                print(number, size, passes[size][-1], file=sys.stderr, flush=True)
    print(
        "| tokens of a part | tokens/s | between tokens ms, p50 | p99 | to the first token ms, p50 "
        "| p99 | bf16 GFLOP/s |\n" + "|---" * 7 + "|"
    )
    for size, found in passes.items():
        cells = [
            str(size) if size else "0 (whole prompts)",
            spread([each.tokens_per_s for each in found], 0),
            *(f"{median(each.gap_ms[i] for each in found):.0f}" for i in (0, 1)),
            *(f"{median(each.first_ms[i] for each in found):.0f}" for i in (0, 1)),
            spread([each.matmul_gflop_per_s for each in found], 0),
        ]
        print(f"| {' | '.join(cells)} |")
