"""The checkpoint that a plan is run with: where it is, and whether plan and options fit it."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

from actors.messages import Sampling
from actors.processes.placement import check_cpus
from actors.stage.model_config import end_tokens
from llmpq.jobs.store import JobIdentity, model_digest
from llmpq.lengths.sources import check_source
from llmpq.model_check import checked_shape
from llmpq.remote.session import joins_ray
from llmpq.rows.sampling import JobSampling, job_sampling
from llmpq.run.fleets import Runnable, check_fleet, named_plans, plans_of, shown_plan
from llmpq.run.importance import importance_file
from llmpq.run.options import RunOptions
from llmpq.tokenizing.requests import beyond_vocabulary
from planner.model.finding import shape_at_hand
from planner.model.shape import ModelShape
from planner.plan.check import check_plan
from planner.plan.spec import PlanSpec, all_stages
from planner.workload import check_length
from quant.checkpoint.model_reference import is_local_model, local_path, resolve
from quant.checkpoint.stored_tensors import is_offline, missing_in_hub_cache
from quant.common.errors import CheckpointError, FieldError, PlanMismatchError, SpecError


def checkpoint_reference(plan: PlanSpec, model: str | None) -> str:
    """The place of the weights in a form that is valid on every node: an absolute folder or GGUF
    file, or a hub id.

    That is `model` if given, else what the plan was made from.
    """
    reference = model or plan.model.source
    named = local_path(reference, "give a folder or a hub id")
    if named is None or not is_local_model(named):
        return reference
    # A link to a GGUF file may lead to one of another name, as in the hub's cache.
    return str(named.resolve() if named.is_dir() else named.absolute())


def shape_for_plan(plan: PlanSpec, folder: Path) -> ModelShape:
    """Shape of the model in `folder`; raises `PlanMismatchError` if the plan is for another one."""
    shape = checked_shape(folder)
    if shape.fingerprint() != plan.model.fingerprint:
        raise PlanMismatchError(
            f"{folder} holds {shape.name} ({shape.layers} layers, hidden size "
            f"{shape.hidden_size}), the plan is for {plan.model.name} ({plan.model.layers} "
            "layers); plan again for this model or pass --model"
        )
    planned = {bits for stage in all_stages(plan) for bits in stage.bitwidths}
    if shape.stored is not None and not shape.stored.mixed and planned != {shape.stored.bits}:
        raise PlanMismatchError(
            f"{folder} is quantized already, all of it with {shape.stored.bits} bits, but the plan "
            f"has layers of {', '.join(map(str, sorted(planned)))}; plan for the checkpoint itself "
            "or pass the original 16-bit one as --model"
        )
    return shape


def shape_for_run(spec: Runnable, sampling: Sampling, folder: Path, source: str) -> ModelShape:
    """Shape of the model that computes, which is the stand-in where the plan has one.

    Raises `SpecError` and `PlanMismatchError` where the plan, or each of the fleet, in the file
    `source`, the `sampling` and the model in `folder` do not go together. The plan for long rows
    must fit them too.
    """
    shapes = [
        _shape_for_plan(plan, sampling, folder, where)
        for where, plan in named_plans(spec, source).items()
    ]
    return shapes[0]


def _shape_for_plan(plan: PlanSpec, sampling: Sampling, folder: Path, source: str) -> ModelShape:
    _check_limit(plan, sampling)
    plans = {source: plan}
    if plan.long_rows is not None:
        plans[f"{source}: field long_rows"] = plan.long_rows
    if plan.prefill_plan is not None:
        plans[f"{source}: field prefill_plan"] = plan.prefill_plan
    shape = checked_shape(folder) if plan.stand_in else shape_for_plan(plan, folder)
    for name, each in plans.items():
        if each.model.fingerprint != plan.model.fingerprint:
            raise SpecError(f"{name}: for {each.model.name}, not {plan.model.name}; plan again")
        each.check(name)
        check_plan(each, _planned_shape(each) if plan.stand_in else shape, name)
        check_length(shape, each.workload)
    check_sampling(plan, sampling, shape.vocab_size)
    return shape


def check_sampling(plan: PlanSpec, sampling: Sampling, vocab_size: int) -> None:
    """Raise `SpecError` for what `plan` has no room for, or no token of the vocabulary has."""
    _check_limit(plan, sampling)
    beyond = beyond_vocabulary(sampling, vocab_size)
    if beyond:
        raise beyond


def _check_limit(plan: PlanSpec, sampling: Sampling) -> None:
    default, long_rows = plan.default_new_tokens or 0, plan.long_rows or plan
    room = max(each.workload.new_tokens for each in (plan, long_rows))
    for name in ("max_new_tokens", "min_tokens"):
        wanted = getattr(sampling, name) or 0
        if wanted > max(room, default):  # where that is more, the rows planned for have limits
            why = f"is {wanted}, the plan has room for {room}; plan with a larger --n"
            raise FieldError(name, why)


def sampling_for_run(plan: PlanSpec, options: RunOptions, folder: Path) -> JobSampling:
    """The sampling of rows that have none, by `options`, the model in `folder` and the plan."""
    return job_sampling(
        options.sampling,
        options.generation_config,
        folder,
        plan.workload,
        plan.default_new_tokens,
    )


def end_note(sampling: Sampling, folder: Path) -> str | None:
    """A line that tells which tokens end answers of the model in `folder`; None where `sampling`
    ignores them, and after a warning where no file names any.
    """
    if sampling.ignore_eos:
        return None
    found = end_tokens(folder)
    if found.sources:
        return found.note
    warnings.warn(
        f"no file of the model in {folder} names a token that ends answers: each has as many "
        "tokens as it may, unless a stop string ends it; write eos_token_id into its "
        "generation_config.json, or give stop strings",
        stacklevel=3,
    )
    return None


def _planned_shape(plan: PlanSpec) -> ModelShape | None:
    """Shape of the model that a stand-in plays, where it can be told without the network."""
    shape = shape_at_hand(plan.model.source)
    return shape if shape and shape.fingerprint() == plan.model.fingerprint else None


def check_machine(spec: Runnable, options: RunOptions, folder: Path) -> None:
    """Raise what a Ray that is started on this machine lacks, where a run starts one: `DeviceError`
    for CPUs, `CheckpointError` for weights in `folder` that the hub's cache has not, offline.
    """
    if joins_ray(options.address):
        return
    check_cpus(all_stages(shown_plan(spec)), os.cpu_count() or 1, "this machine")
    missing = missing_in_hub_cache(folder)
    if missing is not None and is_offline():
        raise CheckpointError(missing)


def job_identity(spec: Runnable, options: RunOptions, source: str = "the plan") -> JobIdentity:
    """The model and sampling that all rows of a job share, found without torch; `source` is the
    plan's file, or the fleet's.

    Raises what `Run` raises for a model or options that do not go with the plan.
    """
    check_fleet(spec, options, source)
    plan = shown_plan(spec)
    checkpoint = checkpoint_reference(plan, options.model or plan.stand_in)
    folder = resolve(checkpoint, weights=False)
    found = sampling_for_run(plan, options, folder)
    shape_for_run(spec, found.sampling, folder, source)
    most = found.sampling.max_new_tokens or plan.workload.new_tokens
    return JobIdentity(
        model_digest(folder, checkpoint),
        plan.model.name,
        replace(found.sampling, max_new_tokens=most),
        options.prompting.identity,
    )


def check_run(spec: Runnable, options: RunOptions, source: str) -> None:
    """Raise what a run of `spec`, which is in the file `source`, raises for the model and the files
    that it is to use, as far as they are known without torch and Ray, which are slow to load.
    """
    check_fleet(spec, options, source)
    plan, policies = shown_plan(spec), {options.scheduling(each).name for each in plans_of(spec)}
    folder = resolve(checkpoint_reference(plan, options.model or plan.stand_in), weights=False)
    sampling = sampling_for_run(plan, options, folder).sampling
    check_machine(spec, options, folder)
    shape = shape_for_run(spec, sampling, folder, source)
    importance_file(plan, options.importance, options.cache, shape)
    if "s3" in policies:
        check_source(options.predictor, folder, shape.vocab_size, options.save_predictor)
