"""The names of methods, solvers and objectives, for those who choose one: no array, no solver."""

from __future__ import annotations

from typing import Literal

Objective = Literal["pipeline", "paper", "job"]  # `planner.optimiser.problem` states them
JOB_OBJECTIVE: Objective = "job"
BATCH_OBJECTIVES: tuple[Objective, ...] = ("pipeline", "paper")

METHOD_NAMES = ("auto", "ilp", "transfer", "adabits", "uniform", "pipeedge")
"""Exact search followed by a heuristic if time runs out, the integer programme, bitwidth transfer
(LLM-PQ Alg. 2), the plan of best quality (section 6.9), and two baselines (section 6.1);
`planner.optimiser.solve` has a function for each."""

SOLVER_METHODS = ("auto", "ilp")
"""Those that heed the solver."""

BASELINE_METHODS = ("uniform", "pipeedge")
"""Those that stand for a published system, which decides order and micro-batches by itself
(`planner.search.baselines`)."""

SOLVER_NAMES = ("highs", "gurobi", "cbc")
DEFAULT_SOLVER = "highs"
