"""Counts of passes against the schedule of the whole job, and job seconds against its events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from planner.lengths import Lengths
from planner.optimiser.problem import JobPasses
from planner.schedule.job_passes import job_passes
from planner.schedule.passes import JobRows
from planner.schedule.static import JobSchedule
from planner.workload import Job, MicroBatches

KINDS = ("constant", "uniform", "heavy-tailed", "narrow", "two kinds")


def drawn_outputs(rng: np.random.Generator, kind: str, mean: int, rows: int) -> list[int]:
    drawn = {
        "constant": np.full(rows, mean),
        "uniform": rng.integers(1, 2 * mean, rows),
        "heavy-tailed": rng.lognormal(np.log(mean) - 0.32, 0.8, rows).clip(1, 5 * mean),
        "narrow": rng.normal(mean, 0.1 * mean, rows).clip(1),
        "two kinds": np.where(rng.random(rows) < 0.5, mean // 4, mean + 3 * mean // 4),
    }
    return [max(1, round(float(each))) for each in drawn[kind]]


@dataclass
class Counted:
    """Counts of passes as they come, without looking at how the planner counts."""

    prefills: int = 0
    bursts: int = 0
    decode_steps: int = 0
    decoded: int = 0

    @classmethod
    def of(cls, outputs: list[int], slots: int, sizes: MicroBatches, stages: int) -> Counted:
        schedule = JobSchedule(JobRows([9] * len(outputs), outputs), slots, sizes, stages)
        found, burst = cls(), False
        for each in schedule.passes():
            if each.phase == "prefill":
                found.prefills += 1
                found.bursts += not burst
                burst = True
            else:
                found.decode_steps += 1
                found.decoded += each.requests
                burst = burst and schedule.policy.refills
        return found


@dataclass
class Case:
    kind: str
    stages: int
    slots: int
    sizes: MicroBatches
    outputs: list[int]

    @property
    def passes(self) -> JobPasses:
        lengths = Lengths.of((9, output) for output in self.outputs)
        return job_passes(Job(len(self.outputs), lengths), self.slots, self.sizes, self.stages)

    def counted(self) -> Counted:
        return Counted.of(self.outputs, self.slots, self.sizes, self.stages)


def cases(count: int, kinds: tuple[str, ...], fills: tuple[float, ...]) -> Iterator[Case]:
    rng = np.random.default_rng(len(kinds))
    for trial in range(count):
        stages, slots = int(rng.integers(1, 7)), int(rng.choice([12, 32, 48, 96, 160, 200]))
        groups = int(rng.integers(max(1, stages // 2), 2 * stages + 1))
        decode = -(-slots // groups)
        sizes = MicroBatches(min(decode, int(2 ** rng.integers(0, 6))), decode)
        kind = kinds[trial % len(kinds)]
        rows = int(slots * rng.choice(fills))
        mean = int(rng.choice([8, 20, 50, 100]))
        yield Case(kind, stages, slots, sizes, drawn_outputs(rng, kind, mean, rows))


def test_counts_of_equal_rows_are_those_of_the_schedule() -> None:
    """But for a few cases where groups are refilled in parts, in an order of its own."""
    errors = []
    for case in cases(60, ("constant",), (0.5, 1, 2.5, 8, 12)):
        passes, full = case.passes, case.counted()
        errors.append(
            (
                passes.prefills / full.prefills - 1,
                passes.decode_steps / full.decode_steps - 1,
            )
        )
        fills = -(-len(case.outputs) // case.slots)
        assert passes.bursts == pytest.approx(min(fills, passes.prefills))
        assert passes.prefills * passes.prefill_requests == pytest.approx(len(case.outputs))
        assert passes.decode_steps * passes.decode_requests == pytest.approx(full.decoded)
    most = np.quantile(np.abs(errors), 0.9, axis=0)
    assert (most < [0.01, 0.01]).all(), most


def test_counts_of_unlike_rows_are_near_those_of_the_schedule() -> None:
    """About as near as the schedule is to itself with the rows in another order."""
    errors = []
    for case in cases(60, KINDS[1:], (8, 12, 20)):
        passes, full = case.passes, case.counted()
        # a sample stands for all rows: how well it has their mean is not asked here
        decoded = passes.decode_steps * passes.decode_requests / full.decoded
        errors.append(
            (
                passes.prefills / full.prefills - 1,
                passes.bursts / full.bursts - 1 if case.stages > 1 else 0.0,
                passes.decode_steps / decoded / full.decode_steps - 1,
            )
        )
    median = np.median(np.abs(errors), axis=0)
    most = np.quantile(np.abs(errors), 0.9, axis=0)
    assert (median < [0.02, 0.05, 0.03]).all(), median
    assert (most < [0.08, 0.25, 0.08]).all(), most
