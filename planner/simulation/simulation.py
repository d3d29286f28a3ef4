"""Discrete-event simulation of one global batch: stages and links serve first come, first served.
Since the order of passes is known, a recurrence over it gives every event exactly: ragged last
micro-batches, growing context, the turn to decode, waiting for links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.model import CostModel
from planner.costs.pass_times import PassSeconds, PassTable
from planner.optimiser.problem import FloatArray
from planner.schedule.exegpt import RraSchedule
from planner.schedule.orca import OrcaSchedule
from planner.schedule.passes import JobRows, OrcaSizes, Pass, Sizes, TurnSizes, policy_sizes
from planner.schedule.peak import PeakSchedule
from planner.schedule.s3 import S3Schedule
from planner.schedule.static import JobSchedule
from planner.scheduling import Phase, PolicyName
from planner.workload import MicroBatches, Workload
from quant.common.errors import SpecError


@dataclass(frozen=True, eq=False)
class Simulated:
    """Starts and ends of M passes on N stages and links behind them, each [M, N] in seconds."""

    workload: Workload
    passes: tuple[Pass, ...]
    stage_start_s: FloatArray
    stage_end_s: FloatArray
    link_start_s: FloatArray
    link_end_s: FloatArray

    @property
    def stages(self) -> int:
        return int(self.stage_end_s.shape[1])

    @property
    def latency_s(self) -> float:
        return float(self.link_end_s[-1, -1])

    @property
    def prefill_s(self) -> float:
        """Seconds until every request has its first token; decoding may have begun before."""
        return float(self.link_end_s[self._rows_of("prefill"), -1][-1])

    @property
    def filled_s(self) -> float:
        """Seconds until the first request in every slot has its first token."""
        waiting = self.workload.global_batch
        rows = self._rows_of("prefill")
        for row in rows:
            waiting -= self.passes[row].requests
            if waiting <= 0:
                return float(self.link_end_s[row, -1])
        return float(self.link_end_s[rows[-1], -1])

    @property
    def tokens_per_s(self) -> float:
        return sum(each.requests for each in self.passes) / self.latency_s

    @property
    def busy_share(self) -> tuple[float, ...]:
        busy_s = (self.stage_end_s - self.stage_start_s).sum(axis=0)
        return tuple(float(share) for share in busy_s / self.latency_s)

    def busy_s(self, phase: Phase) -> FloatArray:
        rows = self._rows_of(phase)
        return np.asarray((self.stage_end_s[rows] - self.stage_start_s[rows]).sum(axis=0))

    def _rows_of(self, phase: Phase) -> list[int]:
        return [row for row, each in enumerate(self.passes) if each.phase == phase]


def simulate(
    workload: Workload,
    sizes: Sizes,
    stages: int,
    seconds_of: Callable[[Pass], PassSeconds],
    rows: JobRows | None = None,
) -> Simulated:
    """Run one global batch, or `rows` over as many slots; SpecError where micro-batches are empty
    or `seconds_of` has another number of stages.
    """
    if isinstance(sizes, MicroBatches) and min(sizes.prefill, sizes.decode, stages) < 1:
        raise SpecError(
            f"micro-batches of {sizes.prefill} and {sizes.decode} on {stages} stages cannot be "
            "simulated; give at least 1 of each"
        )
    rows = rows or JobRows.alike(workload)
    schedule = job_schedule(rows, workload.global_batch, sizes, stages)
    passes = tuple(schedule.passes())
    seconds = [seconds_of(each) for each in passes]
    for each in seconds:
        if len(each.compute) != stages or len(each.transfer) != stages:
            raise SpecError(
                f"a pass takes {len(each.compute)} computations and {len(each.transfer)} transfers "
                f"on {stages} stages; give one of both for each"
            )
    return simulate_passes(workload, passes, seconds)


TOKEN_SCHEDULES: Mapping[PolicyName, type[OrcaSchedule]] = {
    "orca": OrcaSchedule,
    "s3": PeakSchedule,
    "s3-published": S3Schedule,
}


def job_schedule(
    rows: JobRows, slots: int, sizes: Sizes, stages: int
) -> JobSchedule | OrcaSchedule | RraSchedule:
    if isinstance(sizes, TurnSizes):
        return RraSchedule(rows, sizes, stages)
    if isinstance(sizes, OrcaSizes):
        return TOKEN_SCHEDULES[sizes.policy](rows, sizes, stages)
    return JobSchedule(rows, slots, sizes, stages)


def sizes_of_policy(costs: CostModel, sizes: MicroBatches) -> Sizes:
    workload, shape = costs.workload, costs.shape
    kinds = [shape.kind_shapes[kind] for kind in set(shape.kind_of_layer)]
    has_states = any(
        each.delta is not None or workload.room(each.sliding_window) is not None for each in kinds
    )
    return policy_sizes(costs.policy(sizes), workload, sizes, has_states)


def simulate_passes(
    workload: Workload, passes: tuple[Pass, ...], seconds: Sequence[PassSeconds]
) -> Simulated:
    """Run `passes` [M] in their order, each of which takes its `seconds` [M]."""
    stages = len(seconds[0].compute)
    clock = PipelineClock(stages)
    starts = [clock.run(each, taken) for each, taken in zip(passes, seconds, strict=True)]
    start_s = np.array(starts).reshape(len(passes), stages, 2)
    return Simulated(
        workload=workload,
        passes=passes,
        stage_start_s=start_s[:, :, 0],
        stage_end_s=start_s[:, :, 0] + np.array([each.compute for each in seconds]),
        link_start_s=start_s[:, :, 1],
        link_end_s=start_s[:, :, 1] + np.array([each.transfer for each in seconds]),
    )


class PipelineClock:
    """Starts each computation or transfer when its input is there and its stage or link is free."""

    def __init__(self, stages: int) -> None:
        self._stage_free_s, self._link_free_s = [0.0] * stages, [0.0] * stages
        self.returned_s = [0.0]
        """0, and then when the result of each pass came back."""

    def run(self, each: Pass, taken: PassSeconds) -> list[tuple[float, float]]:
        """Run the next pass; returns when each stage computes and each link sends it [N]."""
        at_s = self.returned_s[each.results_before]
        stage_free_s, link_free_s = self._stage_free_s, self._link_free_s
        starts = []
        for j, compute_s in enumerate(taken.compute):
            computes_s = max(at_s, stage_free_s[j])
            stage_free_s[j] = computes_s + compute_s
            sends_s = max(stage_free_s[j], link_free_s[j])
            link_free_s[j] = at_s = sends_s + taken.transfer[j]
            starts.append((computes_s, sends_s))
        self.returned_s.append(at_s)
        return starts

    def finish(self, each: Pass, taken: PassSeconds) -> None:
        """Run the next pass as `run`, faster, for those who ask only when its result is back."""
        at_s = self.returned_s[each.results_before]
        free_s = self._stage_free_s, self._link_free_s
        self.returned_s.append(passed_s(at_s, taken.compute, taken.transfer, *free_s))


def passed_s(
    at_s: float,
    compute_s: Sequence[float],
    transfer_s: Sequence[float],
    stage_free_s: list[float],
    link_free_s: list[float],
) -> float:
    """When a pass that is ready at `at_s` is back; stages and links are free later by it [N]."""
    for j, (computes_s, sends_s) in enumerate(zip(compute_s, transfer_s, strict=True)):
        free_s = stage_free_s[j]
        stage_free_s[j] = at_s = (free_s if free_s > at_s else at_s) + computes_s
        free_s = link_free_s[j]
        link_free_s[j] = at_s = (free_s if free_s > at_s else at_s) + sends_s
    return at_s


def simulate_assignment(
    table: PassTable, sizes: MicroBatches, rows: JobRows | None = None
) -> Simulated:
    """Simulate the batch, or `rows`, on the stages of `table` as the runtime runs it."""
    policy = sizes_of_policy(table.costs, sizes)
    return simulate(table.costs.workload, policy, table.stages, table.seconds, rows)
