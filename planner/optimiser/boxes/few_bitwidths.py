"""Problems of many bitwidths, searched exactly with those that prices leave over.

The ways to count layers by bitwidth grow with a power of the number of bitwidths, and the best
assignments hardly ever have more than four of six. What prices say of the others bounds every
assignment that has one, and is part of the bound that is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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

LAST_SEARCHED = (3, 4, 8, 16)
"""So that 5 and 6 bit beside them never make a plan worse."""

Solve = Callable[[AssignmentProblem, SolveOptions, LossTables], Assignment]


def has_many(problem: AssignmentProblem) -> bool:
    count = len(set(problem.bitwidths))
    return count > MOST_BITWIDTHS and lattice_size(problem.layers, count) > MOST_WAYS


def solve_with_few(
    problem: AssignmentProblem, options: SolveOptions, tables: LossTables, solve: Solve
) -> Assignment:
    """The best assignment with the bitwidths of the least prices; where that is not proven to be
    the best of all, with those that it has most of and others, and then without 5 and 6 bit. The
    bound is over all of them.
    """
    start_s, relaxed = options.clock(), relax(problem)
    over_s, liked = _over_s(relaxed)
    bits = np.array(problem.bitwidths)
    order = bits[np.lexsort((-liked, over_s))].tolist()

    def best_of(few: list[int], most: SolveOptions) -> Assignment:
        kept = np.flatnonzero(np.isin(bits, few))
        narrowed = problem.with_choices(kept)
        found = solve(narrowed, most, tables.narrowed(narrowed))
        return replace(found, bitwidth=tuple(kept[list(found.bitwidth)].tolist()))

    def feasible(few: list[int]) -> list[int]:
        fits = is_feasible(problem.with_choices(np.flatnonzero(np.isin(bits, few))))
        return few if fits else [*few[:-1], problem.bitwidths[0]]

    few = feasible(_first(order))
    found = best_of(few, options)
    others = relaxed.path.bound + float(over_s[~np.isin(bits, few)].min())
    bound = min(found.bound, max(relaxed.bound, others * (1 - ROUNDING)))
    told, searched = _told(found, bound, options, start_s), [set(few)]
    left = [each for each in order if each not in few]
    own = [each for each, _ in Counter(bits[list(found.bitwidth)].tolist()).most_common()]
    for wanted in (_first([*own[: MOST_BITWIDTHS - 1], *left, *few]), LAST_SEARCHED):
        again = feasible([each for each in wanted if each in order])
        if told.status != "bounded" or any(each.issuperset(again) for each in searched):
            continue
        searched.append(set(again))
        limit_s = options.time_limit_s
        if limit_s is not None:
            limit_s = max(limit_s - (options.clock() - start_s), limit_s / 10)
        below = replace(options, upper_bound=told.objective, time_limit_s=limit_s)
        better = best_of(again, below)
        if better.bitwidth:
            told = _told(better, min(bound, better.bound), options, start_s)
    return told


def _first(bits: Sequence[int]) -> list[int]:
    """The first few distinct ones."""
    return list(dict.fromkeys(bits))[:MOST_BITWIDTHS]


def _told(found: Assignment, bound: float, options: SolveOptions, start_s: float) -> Assignment:
    """`found` with a bound over all bitwidths, and what that proves."""
    if not found.bitwidth:
        return replace(found, bound=bound)
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
