"""The cost model of a plan that was loaded from its file, built again from what the file names."""

from __future__ import annotations

import math
from dataclasses import replace

from planner.costs.model import CostModel
from planner.explanation.planned_assignment import planned_assignment
from planner.model.finding import ModelShape, model_shape
from planner.plan.origin import PlanOrigin
from planner.plan.spec import PlanSpec
from planner.search.costs import planning_costs
from quant.common.errors import CheckpointError, PlanMismatchError, SpecError

_ROUNDING = 1e-6
"""Relative difference up to which figures are the same: sums in another order."""

_OTHER_FIGURES = "the plan was changed, or made by another version of llmpq"
_REMEDY = "plan again with llmpq plan"


def rebuilt_costs(plan: PlanSpec) -> CostModel:
    """The cost model that `plan` was made with, from its origin, its model and the files named
    there.

    Raises `SpecError` where the plan does not say what it was made from, where its model or a file
    is gone or has changed, and where this version of llmpq computes other figures.
    """
    origin = plan.origin
    if origin is None:
        raise SpecError(
            "the plan does not say what it was made from, so it cannot be explained or simulated: "
            "an earlier version of llmpq made it, or its cluster is one that no cluster file can "
            f"describe; {_REMEDY}"
        )
    _check_files(origin)
    options = replace(origin.options, kv_bits=plan.kv_bits)
    job = None if plan.job is None else plan.job.job
    cluster, shape = origin.cluster_spec(), _shape(plan)
    costs, _ = planning_costs(cluster, shape, plan.workload, options, job)
    _check_figures(plan, costs)
    return costs


def _check_files(origin: PlanOrigin) -> None:
    changed = next(origin.changed_files(), None)
    if changed is not None:
        raise SpecError(
            f"{changed} is not what it was when the plan was made from it; put it back as it was, "
            f"or {_REMEDY}"
        )


def _shape(plan: PlanSpec) -> ModelShape:
    source = plan.model.source
    try:
        shape = model_shape(source)
    except (SpecError, CheckpointError) as error:
        raise SpecError(
            f"the plan's model is needed to compute its costs again: {error}"
        ) from error
    if shape.fingerprint() != plan.model.fingerprint:
        raise SpecError(f"{source} is not the {plan.model.name} of the plan any more; {_REMEDY}")
    return shape


def _check_figures(plan: PlanSpec, costs: CostModel) -> None:
    """Raise SpecError unless devices, latency and sensitivity are those of the plan."""
    try:
        times = planned_assignment(plan, costs).times
    except PlanMismatchError as error:
        what, _, _ = str(error).partition(";")
        raise SpecError(f"{_OTHER_FIGURES}: {what}; {_REMEDY}") from error
    for what, planned, computed in (
        ("latency in seconds", plan.predicted.objective_latency_s, times.latency_s),
        ("sensitivity", plan.solver.sensitivity, times.quality),
    ):
        if not math.isclose(planned, computed, rel_tol=_ROUNDING, abs_tol=_ROUNDING * 1e-6):
            raise SpecError(
                f"the plan's {what} is {planned:.6g}, computed again it is {computed:.6g}: "
                f"{_OTHER_FIGURES}; {_REMEDY}"
            )
