"""Rows that are handed out one by one, against a simulation by small steps of time."""

from __future__ import annotations

import pytest

from planner.fleet.pricing import simulate_fleet
from planner.lengths import Lengths
from planner.workload import Job


def by_steps(servers: list[tuple[int, float]], outputs: list[int], step_s: float = 0.001) -> float:
    """Seconds until all rows are done: in each step, free slots of the fastest take rows first."""
    mean = sum(outputs) / len(outputs)
    waiting = list(outputs)
    each = sorted(slots / rate for slots, rate in servers for _ in range(slots))
    running = [[row_s, 0.0] for row_s in each]  # seconds a mean row, when free
    now = 0.0
    while waiting or any(free > now + 1e-9 for _, free in running):
        for slot in running:
            if waiting and slot[1] <= now + 1e-9:
                slot[1] = now + slot[0] * waiting.pop(0) / mean
        now += step_s
    return max(free for _, free in running)


@pytest.mark.parametrize("outputs", [[5] * 40, [1, 9, 5, 5] * 9, [3, 30] * 10 + [2]])
def test_rows_are_handed_out_as_slots_become_free(outputs: list[int]) -> None:
    servers = [(4, 8.0), (2, 1.0)]
    job = Job(len(outputs), Lengths(tuple([4] * len(outputs)), tuple(outputs)))
    assert simulate_fleet(servers, job) == pytest.approx(by_steps(servers, outputs), rel=0.02)


def test_long_job_runs_at_the_rate_of_all() -> None:
    servers = [(8, 30.0), (4, 10.0)]
    job = Job.of(1_000_000, 8, 8)
    assert simulate_fleet(servers, job) == pytest.approx(1_000_000 / 40, rel=0.01)
