"""Planning again: for the devices that are left when some are lost, or from what a run measured."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.report.formatting import bit_runs
from llmpq.run.switching import Measured
from llmpq.workload.request_lengths import Requests, bounded_plan, requests_of
from planner.cluster.spec import ClusterSpec
from planner.latency_bound.reschedule import reschedule
from planner.latency_bound.schedules import BOUND
from planner.lengths import RequestLengths
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.options import PlanOptions
from planner.plan.origin import FILE_OPTIONS, PlanOrigin, with_planned
from planner.plan.spec import PlanSpec, StagePlan, all_stages
from planner.search.find import find_plan
from planner.workload import Job, Workload
from quant.common.errors import (
    BoundNotMetError,
    DeviceLostError,
    InfeasibleError,
    LlmpqError,
    SpecError,
)

SHOWN_CONTROLS = (
    "prefill_requests",
    "decode_requests",
    "decode_steps",
    "decode_micro_batches",
    "prefill_micro_batch",
)
"""The controls of a schedule whose changes are told."""


def replan(plan: PlanSpec, lost_devices: Collection[str], model: str | None = None) -> PlanSpec:
    """Make `plan` again, from what it was made from, without `lost_devices`.

    `model`: another place of the same model. A bound on latency that cannot be kept with fewer
    devices, and files that are not here, are left out with a warning. The plan for long rows is
    made again too; where what is left has no room for them, it stays, for when devices are back.
    Raises `SpecError` for a plan that does not say what it was made from, and `InfeasibleError`
    when what is left does not hold the model.
    """
    workload = plan.workload if plan.job is None else plan.job.job
    found = _planned(plan, _origin_of(plan).without(lost_devices), workload, model)
    if plan.long_rows is None:
        return found
    try:
        long_rows = replan(plan.long_rows, lost_devices, model)
    except InfeasibleError as error:
        _warn(f"there is no room for long rows in what is left: {error}")
        long_rows = plan.long_rows
    return replace(found, long_rows=long_rows)


def replan_measured(plan: PlanSpec, measured: Measured, model: str | None = None) -> PlanSpec:
    """Plan again from what was measured, with room for every row. Raises as `replan`."""
    workload: Workload | Job = plan.workload
    if plan.job is not None:
        job = plan.job.job
        lengths = measured.lengths or job.lengths
        heads = job.heads.within(lengths.longest_prompt)
        workload = replace(job, prompts=measured.prompts_left, lengths=lengths, heads=heads)
    origin = _origin_of(plan).slowed(measured.slowdowns)
    found = _planned(plan, origin, workload, model)
    return replace(found, long_rows=plan.long_rows)


def _origin_of(plan: PlanSpec) -> PlanOrigin:
    if plan.origin is None:
        raise SpecError(
            "the plan does not say what it was made from, as those of earlier versions; plan again "
            "with llmpq plan"
        )
    return plan.origin


def _planned(
    plan: PlanSpec, origin: PlanOrigin, workload: Workload | Job, model: str | None
) -> PlanSpec:
    """The best plan for the model of `plan` and for `workload`, from another origin."""
    used = {bits for stage in all_stages(plan) for bits in stage.bitwidths}
    cluster, options = origin.cluster_spec(), _usable(with_planned(origin.options, used))
    shape, source = _shape_of(plan, model), plan.model.source
    if options.bounds_requests:
        found = _within_bound(plan, cluster, shape, options, _requests(plan, workload))
        return replace(found, origin=origin, importance=plan.importance)
    try:
        priced = find_plan(cluster, shape, source, workload, options)
    except InfeasibleError:
        if options.max_latency_s is None:
            raise
        priced = find_plan(cluster, shape, source, workload, replace(options, max_latency_s=None))
        _warn(f"max_latency_s {options.max_latency_s:g} cannot be kept with what is left")
    return replace(priced.plan, origin=origin, importance=plan.importance)  # the same codes again


def _shape_of(plan: PlanSpec, model: str | None) -> ModelShape:
    """The model of `plan`, at another place where one is given; raises `SpecError` for another."""
    shape = model_shape(model or plan.model.source)
    if shape.fingerprint() != plan.model.fingerprint:
        raise SpecError(
            f"{model or plan.model.source} is not the {plan.model.name} of the plan; pass its "
            "folder as --model"
        )
    return shape


def _requests(plan: PlanSpec, workload: Workload | Job) -> Requests:
    """The requests that are planned for: those of `plan`, unless `workload` is another job."""
    if plan.latency is None or (plan.job is not None and workload != plan.job.job):
        return requests_of(workload)
    return Requests(plan.latency.lengths, plan.latency.prompts, plan.default_new_tokens)


def _within_bound(
    plan: PlanSpec,
    cluster: ClusterSpec,
    shape: ModelShape,
    options: PlanOptions,
    requests: Requests,
) -> PlanSpec:
    """The best plan within the bound on latency, or within the least feasible one; which it was."""
    source, asked = plan.model.source, options.max_request_latency_s
    try:
        return bounded_plan(cluster, shape, source, requests, options)
    except BoundNotMetError as error:
        if error.option != BOUND:
            raise
        _warn(f"max_request_latency_s {asked} cannot be kept with what is left: {error}")
        options = replace(options, max_request_latency_s=error.reachable)
    found = bounded_plan(cluster, shape, source, requests, options)
    if found.latency is None or not isinstance(asked, float):
        return found
    return replace(found, latency=replace(found.latency, bound_s=asked))


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


def reschedule_measured(
    plan: PlanSpec, lengths: RequestLengths, margin: float | None = None, model: str | None = None
) -> PlanSpec:
    """Make another schedule for the stages of `plan` and requests of the lengths that its run has
    measured; layers and bits stay where they are (ExeGPT section 7.6).

    `margin`: the share of the bound to leave (None: as before); `model`: another place of the same
    model. Raises what the search raises.
    """
    # Bits are as they are, so nothing that is about quality is read again.
    origin = _origin_of(plan)
    options = replace(origin.options, omega_file=None, importance=None, max_ppl_delta=None)
    return reschedule(plan, _shape_of(plan, model), _usable(options), lengths, margin)


def rescheduled_text(old: PlanSpec, new: PlanSpec) -> str:
    before, now = old.policy.followed_schedule, new.policy.followed_schedule
    is_late = old.latency and new.latency and old.latency.margin < new.latency.margin
    what = "latencies" if is_late else "lengths"
    if before == now:
        return f"the schedule stays the best for the {what} that were measured"
    changes = [
        f"{name} {getattr(before, name)} to {getattr(now, name)}"
        for name in SHOWN_CONTROLS
        if getattr(before, name) != getattr(now, name)
    ]
    even = f"turns of prompts of {now.mean_prompt_tokens:.4g} tokens in the mean"
    text = f"another schedule for the {what} that were measured: {', '.join(changes) or even}"
    if new.latency is None:
        return text
    return (
        f"{text}; predicted {new.latency.tokens_per_s:.4g} tokens/s, "
        f"{100 * new.latency.quantile:g} % of requests within {new.latency.latency_s:.3g} s"
    )


def replanned_text(plan: PlanSpec) -> str:
    """One line about a plan that takes another's place: what is gone, and what runs where."""
    gone = ", ".join(plan.origin.lost) if plan.origin is not None else "devices"
    return f"{gone} gone; planned again: {stages_text(plan)}"


def stages_text(plan: PlanSpec) -> str:
    """What runs where, and the tokens per second that are predicted."""
    stages = "; ".join(_stage_text(stage) for stage in plan.stages)
    return f"{stages}; predicted {plan.predicted.tokens_per_s:.4g} tokens/s"


def _stage_text(stage: StagePlan) -> str:
    bits = ", ".join(f"{count}x{bits} bit" for bits, count in bit_runs(stage.bitwidths))
    return f"stage {stage.index} ({stage.label}) {bits}"


def _usable(options: PlanOptions) -> PlanOptions:
    """The options without files that are not here; raises `SpecError` where one is needed."""
    left_out: dict[str, Any] = {}
    for name in FILE_OPTIONS:
        path = getattr(options, name)
        if path is None or Path(path).is_file():
            continue
        if name == "profiles" and options.strict_profiles:
            raise SpecError(f"strict_profiles needs {path}")
        if name == "omega_file" and options.max_ppl_delta is not None:
            raise SpecError(f"max_ppl_delta {options.max_ppl_delta:g} needs {path}")
        left_out[name] = None
        if name != "importance":  # the plan made again keeps that of the one before
            _warn(f"{name} {path} is not here, so it is planned without")
    return replace(options, **left_out)


def _warn(text: str) -> None:
    warnings.warn(f"while planning again: {text}", stacklevel=4)
