"""The default method: exact by boxes, and bitwidth transfer on what a time limit leaves."""

from __future__ import annotations

from dataclasses import replace

from planner.optimiser.boxes.method import solve_by_boxes
from planner.optimiser.heuristics.transfer import improve_by_transfer
from planner.optimiser.layer_choice import Candidate
from planner.optimiser.problem import Assignment, AssignmentProblem
from planner.optimiser.quality_tables import QualityTables
from planner.optimiser.solve_options import SolveOptions

TRANSFER_SHARE = 0.2  # of a time limit, kept for the heuristic


def solve_automatically(
    problem: AssignmentProblem,
    options: SolveOptions,
    tables: QualityTables | None = None,
) -> Assignment:
    """The best assignment to within the gap; out of time, the best found with its bound.

    `tables` of the problem's sensitivity may be handed in. Raises InfeasibleError where nothing
    fits.
    """
    tables = tables or QualityTables(problem.sensitivity)
    if options.time_limit_s is None:
        return solve_by_boxes(problem, options, tables)
    kept_s = TRANSFER_SHARE * options.time_limit_s
    shorter = replace(options, time_limit_s=options.time_limit_s - kept_s)
    found = solve_by_boxes(problem, shorter, tables)
    if found.status != "time_limit":
        return found
    start = options.clock()
    given = Candidate(found.first_layer, found.bitwidth, found.objective)
    better = improve_by_transfer(problem, given, replace(options, time_limit_s=kept_s), tables)
    return replace(
        found,
        first_layer=better.first_layer,
        bitwidth=better.bitwidth,
        objective=better.objective,
        bound=min(found.bound, better.objective),
        seconds=found.seconds + options.clock() - start,
    )
