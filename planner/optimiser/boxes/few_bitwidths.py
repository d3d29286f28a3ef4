"""Problems of many bitwidths, searched exactly with those that prices leave over.

The ways to count layers by bitwidth grow with a power of the number of bitwidths, and the best
assignments hardly ever have more than four of six. What prices say of the others bounds every
assignment that has one, and is part of the bound that is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.optimiser.assignment import Assignment, SolveOptions, conclude
from planner.optimiser.feasibility import is_feasible
from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray
from planner.optimiser.relaxation import ROUNDING, RelaxedProblem, relax
from planner.optimiser.sensitivity_tables import LossTables, lattice_size

MOST_BITWIDTHS = 4
MOST_WAYS = 5_000
"""Ways to count all layers by bitwidth up to which more bitwidths take as long."""

Solve = Callable[[AssignmentProblem, SolveOptions, LossTables], Assignment]


def has_many(problem: AssignmentProblem) -> bool:
    count = len(set(problem.bitwidths))
    return count > MOST_BITWIDTHS and lattice_size(problem.layers, count) > MOST_WAYS


def solve_with_few(
    problem: AssignmentProblem, options: SolveOptions, tables: LossTables, solve: Solve
) -> Assignment:
    """The best assignment with the bitwidths of the least prices, and a bound over all of them."""
    start_s, relaxed = options.clock(), relax(problem)
    bits = np.array(problem.bitwidths)
    over_s, liked = _over_s(relaxed)
    order = np.lexsort((-liked, over_s))
    few: list[int] = []
    for choice in order.tolist():
        if bits[choice] not in few and len(few) < MOST_BITWIDTHS:
            few.append(int(bits[choice]))
    kept = np.isin(bits, few)
    narrowed = problem.with_choices(np.flatnonzero(kept))
    if not is_feasible(narrowed):
        kept = np.isin(bits, [*few[:-1], bits[0]])
        narrowed = problem.with_choices(np.flatnonzero(kept))
    found = solve(narrowed, options, tables.narrowed(narrowed))
    others = relaxed.path.bound + float(over_s[~kept].min())
    bound = min(found.bound, max(relaxed.bound, others * (1 - ROUNDING)))
    if not found.bitwidth:
        return replace(found, bound=bound)
    chosen = np.flatnonzero(kept)[list(found.bitwidth)]
    found = replace(found, bitwidth=tuple(chosen.tolist()))
    told = conclude(found, bound, options, start_s, 2 * ROUNDING)
    if found.status != "optimal":
        return replace(told, status=found.status)
    return told if told.status == "optimal" else replace(told, status="bounded")


def _over_s(relaxed: RelaxedProblem) -> tuple[FloatArray, IntArray]:
    """How much more than the cheapest choice each costs where that is least [K], and for how many
    layers of kinds of stage it is the cheapest [K].
    """
    prices = relaxed.priced.layer_prices(relaxed.prices)
    least = prices.min(axis=2, keepdims=True)
    over = np.where(np.isfinite(least), prices - least, np.inf)
    return over.min(axis=(0, 1)), np.asarray((over == 0).sum(axis=(0, 1)))
