"""Planning again, for the devices that are left when some are lost."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.origin import FILE_OPTIONS
from planner.plan.spec import PlanSpec, StagePlan
from planner.search.search import find_plan
from quant.common.errors import DeviceLostError, InfeasibleError, LlmpqError, SpecError


def replan(plan: PlanSpec, lost_devices: Collection[str], model: str | None = None) -> PlanSpec:
    """Make `plan` again, from what it was made from, without `lost_devices`.

    `model`: another place of the same model. A bound on latency that cannot be kept with fewer
    devices, and files that are not here, are left out with a warning. Raises `SpecError` for a
    plan that does not say what it was made from, and `InfeasibleError` when what is left does not
    hold the model.
    """
    if plan.origin is None:
        raise SpecError(
            "the plan does not say what it was made from, as those of earlier versions; plan again "
            "with llmpq-algo"
        )
    origin = plan.origin.without(lost_devices)
    cluster, options = origin.cluster_spec(), _usable(origin.options)
    shape = model_shape(model or plan.model.source)
    if shape.fingerprint() != plan.model.fingerprint:
        raise SpecError(
            f"{model or plan.model.source} is not the {plan.model.name} of the plan; pass its "
            "folder as --model"
        )
    source, workload = plan.model.source, plan.workload
    try:
        found = find_plan(cluster, shape, source, workload, options)
    except InfeasibleError:
        if options.max_latency_s is None:
            raise
        found = find_plan(cluster, shape, source, workload, replace(options, max_latency_s=None))
        _warn(f"max_latency_s {options.max_latency_s:g} cannot be kept with what is left")
    return replace(found, origin=origin)


def replan_after_loss(plan: PlanSpec, lost: DeviceLostError, model: str | None = None) -> PlanSpec:
    """Make `plan` again after `lost`; raises `DeviceLostError` saying why it is not possible."""
    try:
        return replan(plan, lost.devices, model)
    except LlmpqError as error:
        raise DeviceLostError(
            f"{lost}. There is no plan for what is left: {error}. The job can go on when the "
            "devices are back, or with another plan",
            lost.stages,
            lost.devices,
        ) from error


def replanned_text(plan: PlanSpec) -> str:
    """One line about a plan that takes another's place: what is gone, and what runs where."""
    gone = ", ".join(plan.origin.lost) if plan.origin is not None else "devices"
    stages = "; ".join(_stage_text(stage) for stage in plan.stages)
    return (
        f"{gone} gone; planned again: {stages}; predicted {plan.predicted.tokens_per_s:.4g} "
        "tokens/s"
    )


def _stage_text(stage: StagePlan) -> str:
    runs = ((bits, len(list(same))) for bits, same in groupby(stage.bitwidths))
    bits = ", ".join(f"{count}x{bits} bit" for bits, count in runs)
    return f"stage {stage.index} ({stage.device}) {bits}"


def _usable(options: PlanOptions) -> PlanOptions:
    """The options without files that are not here; raises `SpecError` where one is needed."""
    for name in FILE_OPTIONS:
        path = getattr(options, name)
        if path is None or Path(path).is_file():
            continue
        if name == "profiles" and options.strict_profiles:
            raise SpecError(f"strict_profiles needs {path}")
        if name == "profiles":
            options = replace(options, profiles=None)
        elif options.max_ppl_delta is not None:
            raise SpecError(f"max_ppl_delta {options.max_ppl_delta:g} needs {path}")
        else:
            options = replace(options, omega_file=None)
        _warn(f"{name} {path} is not here, so it is planned without")
    return options


def _warn(text: str) -> None:
    warnings.warn(f"while planning again: {text}", stacklevel=4)
