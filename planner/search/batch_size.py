"""How many requests a micro-batch of both phases has (policies `orca` and `s3`): the best few
sizes, by simulation.

More than an even share of the requests in flight lets more of them in while they are short; fewer
make steps shorter, and leave some waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.costs.model import CostModel, grouped
from planner.optimiser.assignment import stage_times
from planner.plan.builder import Solution, forecast_solution
from planner.scheduling import TOKEN_POLICIES
from planner.search.job.in_flight import RANKING_PASSES

SHARES = (0.75, 1.0, 1.25, 1.5, 2.0)
"""Sizes that are tried, in even shares of the requests in flight."""


def with_best_batch_size(costs: CostModel, solution: Solution) -> Solution:
    """The solution with the size that takes the fewest seconds; unchanged under another policy,
    and where the user has chosen a size.
    """
    options = costs.options
    if options.policy not in TOKEN_POLICIES or options.max_batch_size is not None:
        return solution
    return min(
        _fitting(costs, solution),
        key=lambda each: forecast_solution(costs, each, RANKING_PASSES).seconds,
    )


def _fitting(costs: CostModel, solution: Solution) -> Iterator[Solution]:
    """Yield the solution with each size for which its stages have memory."""
    share = -(-solution.workload.global_batch // len(solution.devices))
    for size in sorted({solution.sizes.decode, *(max(1, round(share * s)) for s in SHARES)}):
        sized = replace(solution, max_batch_size=size)
        found = solution.assignment
        problem = sized.costs(costs).problem(solution.devices, solution.sizes)
        problem = grouped(problem, costs.options.group)
        stages = stage_times(problem, found.first_layer, found.bitwidth)
        if size == solution.sizes.decode or (stages.bytes <= problem.memory_bytes).all():
            yield sized
