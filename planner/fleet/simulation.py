"""Simulating a fleet: rows are handed out one by one, to the pipeline that has a free slot."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from planner.workload import Job

MOST_ROWS = 200_000
"""Rows that are simulated one by one; of a longer job the rest goes on at the rate of all."""


@dataclass(frozen=True)
class Server:
    """A pipeline as rows meet it: `slots` in flight, through which `rows_per_s` pass when all are
    taken.
    """

    slots: int
    rows_per_s: float

    @property
    def row_s(self) -> float:
        """Seconds that a row of mean length takes of a slot."""
        return self.slots / self.rows_per_s


def simulate_fleet(servers: Sequence[Server], job: Job) -> float:
    """Seconds until the last row of `job` is done.

    Rows take a slot for a time in proportion to the tokens of their answers. A row goes to the slot
    that is free first; while all are free, to the fastest pipeline.
    """
    outputs = job.lengths.output_tokens
    mean = job.lengths.mean_output
    rows = min(job.prompts, MOST_ROWS)
    free = [(0.0, server.row_s, index) for index, server in enumerate(servers)]
    free = [each for each in free for _ in range(min(servers[each[2]].slots, rows))]
    heapq.heapify(free)
    last_s = 0.0
    for row in range(rows):
        at_s, row_s, index = free[0]
        done_s = at_s + row_s * outputs[row % len(outputs)] / mean
        heapq.heapreplace(free, (done_s, row_s, index))
        last_s = max(last_s, done_s)
    rate = sum(server.rows_per_s for server in servers)
    return last_s + (job.prompts - rows) / rate
