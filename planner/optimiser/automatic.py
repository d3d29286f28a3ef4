"""The default method: exact search by boxes, then bitwidth transfer if time ran out."""

from __future__ import annotations

from dataclasses import replace

from planner.optimiser.assignment import Assignment
from planner.optimiser.bit_assignment import Candidate
from planner.optimiser.boxes.method import solve_by_boxes
from planner.optimiser.heuristics.transfer import improve_by_transfer
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.sensitivity_tables import SensitivityTables
from planner.optimiser.solve_options import SolveOptions

TRANSFER_SHARE = 0.2  # of a time limit, kept for the heuristic


def solve_automatically(
    problem: AssignmentProblem,
    options: SolveOptions,
    tables: SensitivityTables | None = None,
) -> Assignment:
    """The best assignment to within the gap; out of time, the best found with its bound.

    `tables` of the problem's sensitivity may be handed in. Raises InfeasibleError where nothing
    fits.
    """
    tables = tables or SensitivityTables(problem.sensitivity)
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
