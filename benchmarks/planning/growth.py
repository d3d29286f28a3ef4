"""Single problems that grow in layers, stages and bitwidths (`benchmarks.planning.planner growth`).

CPU seconds of one process, and what Python and numpy allocate at most.
"""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.solve import solve

BITS = (3, 4, 8, 16)
GAP = 1e-4


@dataclass(frozen=True)
class GrowthPoint:
    """CPU seconds, peak of the memory allocated (bytes) and gap of one problem of some size."""

    layers: int
    stages: int
    bitwidths: int
    cpu_s: float
    peak_bytes: int
    gap: float


def growth_points() -> Iterator[GrowthPoint]:
    """One problem a point: layers, stages and bitwidths grow one at a time."""
    for layers in (20, 40, 60, 80, 100, 120):
        yield _growth_point(layers, 8, 4)
    for stages in (1, 2, 4, 8, 16, 32):
        yield _growth_point(80, stages, 4)
    for bitwidths in (1, 2, 3, 4):
        yield _growth_point(80, 8, bitwidths)


def _growth_point(layers: int, stages: int, bitwidths: int) -> GrowthPoint:
    """Half V100s, half A100s, with memory that makes about half of the layers 4 bit."""
    problem = growth_problem(layers, stages, bitwidths)
    start = time.process_time()
    found = solve(problem, relative_gap=GAP)
    cpu_s = time.process_time() - start
    tracemalloc.start()
    solve(problem, relative_gap=GAP)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    gap = (found.objective - found.bound) / found.objective
    return GrowthPoint(layers, stages, bitwidths, cpu_s, peak_bytes, gap)


def growth_problem(layers: int, stages: int, bitwidths: int) -> AssignmentProblem:
    """A problem of any size; each layer of 12 * 8192^2 weights in the middle of the bitwidths."""
    rng = np.random.default_rng(layers + 1000 * stages + 10**6 * bitwidths)
    bits = np.array(BITS[-bitwidths:])
    fast = np.where(np.arange(stages) < stages / 2, 1.0, 2.5)[:, np.newaxis]
    layer_bytes = 1e8 * bits + 3e8
    share = layers / stages * (layer_bytes[0] + layer_bytes[-1]) / 2
    noise = rng.uniform(0.95, 1.05, (stages, len(bits)))
    omega = np.sort(rng.uniform(0.1, 1.0, (layers, 1)) * rng.uniform(0.6, 1.4, (layers, len(bits))))
    omega = omega[:, ::-1] * 4.0 ** -(bits - 3) / layers
    return AssignmentProblem(
        prefill_s=(0.02 + 0.004 * (16 - bits) / 13) * noise / fast,
        decode_s=(0.0005 + 0.0001 * bits) * noise / fast,
        fixed_prefill_s=np.zeros(stages),
        fixed_decode_s=np.zeros(stages),
        prefill_comm_s=np.full(stages, 0.001),
        decode_comm_s=np.full(stages, 0.0001),
        layer_bytes=np.ceil(layer_bytes),
        memory_bytes=np.full(stages, math.ceil(share * 1.1 + layer_bytes[0])),
        sensitivity=omega,
        theta=100.0,
        bitwidths=tuple(bits.tolist()),
        prefill_micro_batches=16,
        decode_micro_batches=max(2, stages),
        new_tokens=100,
    )


def growth_table(points: Sequence[GrowthPoint]) -> Iterator[str]:
    """Markdown rows of single solves."""
    yield "| layers | stages | bitwidths | solve (s) | peak (MB) | gap |"
    yield "|" + "---|" * 6
    for p in points:
        peak_mb = p.peak_bytes / 1e6
        sizes = f"{p.layers} | {p.stages} | {p.bitwidths}"
        yield f"| {sizes} | {p.cpu_s:.2f} | {peak_mb:.0f} | {p.gap:.0e} |"


def plot_growth(points: Sequence[GrowthPoint], path: Path) -> None:
    """Seconds above, memory below, one column for what grows; needs matplotlib."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib; install llmpq with the extra 'plot'") from error
    figure, panels = plt.subplots(
        2, 3, figsize=(10, 5), sharex="col", sharey="row", layout="constrained"
    )
    usual = {"layers": 80, "stages": 8, "bitwidths": 4}
    for column, name in enumerate(usual):
        chosen = [
            p for p in points if all(getattr(p, k) == v for k, v in usual.items() if k != name)
        ]
        chosen.sort(key=lambda p, name=name: getattr(p, name))
        sizes = [getattr(p, name) for p in chosen]
        panels[0, column].plot(sizes, [p.cpu_s for p in chosen], marker="o")
        panels[1, column].plot(sizes, [p.peak_bytes / 1e6 for p in chosen], marker="o")
        panels[1, column].set_xlabel(name)
    panels[0, 0].set_ylabel("CPU seconds to a gap of 1e-4")
    panels[1, 0].set_ylabel("peak of allocated MB")
    figure.savefig(path)
