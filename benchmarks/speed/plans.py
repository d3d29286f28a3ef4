"""Tokens per second that plans foretell without a profile, and those that come, on this CPU.

    python -m benchmarks.speed.plans [--cases …] [--passes 3] [--workload 32 128 64]

Every case is planned as `llmpq plan` does it, with the kernels measured at first use or without
(`--no_measuring`), and run in one session: a pass that warms up, then those that are timed, each of
new prompts of token ids.
`168M` is `benchmarks.speed.throughput`'s LLaMA of random weights, SmolLM2-135M that of the demo.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.lab import PAPER_BITS, header, processor_name, table_row
from benchmarks.speed.throughput_contestants import CLUSTER, CORES, Case
from llmpq import Cluster, Workload
from quant.checkpoint.model_reference import DEMO

RANDOM = "168M"


@dataclass(frozen=True)
class PlannedCase:
    """A model on so many stages that share the cores, with bitwidths to choose from."""

    model: str
    stages: int
    bits: tuple[int, ...]
    theta: float | None = 0.0

    @property
    def words(self) -> str:
        name = "SmolLM2-135M" if self.model == DEMO else f"{self.model} LLaMA"
        bits = "as planned" if len(self.bits) > 1 else f"{self.bits[0]} bit"
        return f"{name}, {bits}, {self.stages} x {CORES // self.stages} threads"


CASES = {
    "16bit": PlannedCase(RANDOM, 1, (16,)),
    "planned": PlannedCase(RANDOM, 1, PAPER_BITS),
    "two": PlannedCase(RANDOM, 2, PAPER_BITS),
    "two-16bit": PlannedCase(RANDOM, 2, (16,)),
    "smollm2": PlannedCase(DEMO, 1, PAPER_BITS),
}


CONTESTS = (("two", "planned"), ("two-16bit", "16bit"))
"""Two stages of half the threads, and the one stage that they stand against."""


def row_of(case: PlannedCase, folder: Path, options: argparse.Namespace) -> tuple[str, float]:
    """Plan and run a case: the row of the table, and measured tokens per second."""
    prompts, length, new = options.workload
    file = folder / f"{case.stages}.yaml"
    file.write_text(CLUSTER.format(stages=case.stages, threads=CORES // case.stages))
    model = str(folder / "model") if case.model == RANDOM else case.model
    plan = Cluster.from_yaml(file).plan(
        model,
        Workload(prompts, length, new),
        theta=case.theta,
        bits=case.bits,
        no_measuring=options.no_measuring,
    )
    used = sorted({bits for stage in plan.stages for bits in stage.bitwidths})
    foretold = plan.predicted.tokens_per_s
    with plan.session(no_cache=True) as session:
        paces = list(_paces(session, options))
    measured = median(paces[1:])
    layers = "+".join(str(len(stage.layers)) for stage in plan.stages)
    spread = f"{measured:.0f} ({min(paces[1:]):.0f} to {max(paces[1:]):.0f})"
    what = f"{layers} layers at {'/'.join(map(str, used))} bit"
    cells = [case.words, what, f"{foretold:.0f}", spread, f"{foretold / measured:.2f}"]
    return table_row(cells), measured


def _paces(session: Any, options: argparse.Namespace) -> Iterator[float]:
    """Tokens per second of each pass."""
    prompts, length, new = options.workload
    for turn in range(options.passes + 1):
        draw = np.random.default_rng(turn)
        rows = draw.integers(3, 30000, (prompts, length)).tolist()
        began = time.perf_counter()
        results = session.run(rows, temperature=0.0, max_new_tokens=new, ignore_eos=True)
        tokens = sum(len(result.token_ids) for result in results)
        yield tokens / (time.perf_counter() - began)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--passes", type=int, default=3, help="timed, after one that warms up")
    parser.add_argument(
        "--workload", type=int, nargs=3, default=(32, 128, 64), metavar=("PROMPTS", "LENGTH", "NEW")
    )
    parser.add_argument("--no_measuring", action="store_true", help="plan by typical figures")
    options = parser.parse_args(arguments)
    print(processor_name())
    print(header("case | plan | foretold tokens/s | measured | foretold / measured"))
    with tempfile.TemporaryDirectory() as folder:
        if any(CASES[name].model == RANDOM for name in options.cases):
            Case("llama", "equal").write_model(Path(folder) / "model")
        measured = {}
        for name in options.cases:
            row, measured[name] = row_of(CASES[name], Path(folder), options)
            print(row)
            sys.stdout.flush()
    for two, one in CONTESTS:
        if {two, one} <= measured.keys():
            print(f"\n{CASES[two].words}, over one stage: {measured[two] / measured[one]:.2f}")


if __name__ == "__main__":
    main()
