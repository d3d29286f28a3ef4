"""The model that a run of a plan or a fleet computes: where it is, what its weights are rounded by,
and whether plan, options and machine go with it; all of that is told without torch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actors.messages import Sampling
from actors.processes.placement import check_cpus
from actors.stage.model_config import end_tokens
from llmpq.jobs.store import JobIdentity, ModelNames, adapter_digest, model_digest
from llmpq.lengths.sources import check_source
from llmpq.model_check import checked_adapter, checked_adapters, checked_shape
from llmpq.remote.session import joins_ray
from llmpq.rows.sampling import JobSampling, job_sampling
from llmpq.run.options import RunOptions
from llmpq.tokenizing.requests import beyond_vocabulary
from planner.adapters import adapter_folders
from planner.fleet.fleet_spec import FleetSpec, Runnable, named_plans, plans_of, shown_plan
from planner.model.finding import shape_at_hand
from planner.model.shape import ModelShape
from planner.plan.check import check_plan
from planner.plan.parts import PlannedImportance
from planner.plan.spec import PlanSpec, all_stages, parts_of
from planner.scheduling import PREDICTING
from planner.workload import check_length
from quant.checkpoint.model_reference import is_local_model, local_path, resolve
from quant.checkpoint.stored_tensors import is_offline, missing_in_hub_cache
from quant.common.errors import CheckpointError, FieldError, PlanMismatchError, SpecError
from quant.common.url_files import is_url
from quant.loading.cache_settings import CacheSettings
from quant.rounding.importance_header import FOLDER, by_fingerprint, read_importance_header
from quant.rounding.importance_store import ImportanceStore
from quant.scheme import FULL_BITS, GPTQ

_COMMUTING = 2
"""Ranks whose sum is the same in any order."""


def check_fleet(spec: Runnable, options: RunOptions, source: str) -> None:
    """Raise `SpecError` for what several pipelines, of a fleet or of a plan whose stages do one
    phase each, cannot be run with, and for stages that cannot be deterministic where that is asked;
    any other plan passes.
    """
    pipelines = parts_of(spec) if isinstance(spec, PlanSpec) else spec.replicas
    if options.deterministic:
        _check_deterministic(pipelines, source)
    if isinstance(spec, PlanSpec) and len(pipelines) == 1:
        return
    kind = "a plan of stages that only decode" if isinstance(spec, PlanSpec) else "a fleet"
    if options.replan == "auto" and isinstance(spec, FleetSpec):
        again = "its pipelines are started again, but not planned again"
        raise SpecError(f"replan auto has no effect with {kind} ({source}): {again}; leave it out")
    if options.trace is not None:
        one = "it is of one pipeline"
        raise SpecError(f"trace has no effect with {kind} ({source}): {one}; leave it out")
    if isinstance(spec, FleetSpec):
        _check_rooms(spec, source)
    bits = {
        tuple((each.bits, each.expert_bits) for stage in plan.stages for each in stage.choices)
        for plan in pipelines
    }
    if len(bits) > 1 and any(plan.rounding == GPTQ for plan in pipelines):
        raise SpecError(
            f"{source}: its pipelines have different bits, and rounding {GPTQ} calibrates one "
            "checkpoint for all; plan with another --rounding"
        )


def _check_deterministic(pipelines: Sequence[PlanSpec], source: str) -> None:
    """Raise `SpecError` where a row's tokens would depend on the others all the same."""
    for stage in (stage for plan in pipelines for stage in plan.stages if not stage.emulated):
        if not stage.kind.is_cpu:
            why = "kernels of GPUs are chosen by what is computed together"
        elif stage.degree > _COMMUTING:
            why = "sums of more than two ranks are taken in an order that depends on the place"
        else:
            continue
        raise SpecError(
            f"{source}: stage {stage.index} ({stage.label}) cannot be deterministic: {why}; leave "
            "out deterministic, or plan for CPUs that are not divided"
        )
    forms = {tuple(_forms(plan)) for plan in pipelines}
    if len(forms) > 1:
        raise SpecError(
            f"{source}: its pipelines hold layers in different bits, types or kernels, so that "
            "tokens depend on which of them computes a row; leave out deterministic"
        )


def _forms(plan: PlanSpec) -> Iterator[Hashable]:
    yield plan.kv_bits, plan.head_bits, plan.rounding
    if plan.head_bits != FULL_BITS:  # beside the head, a tied embedding has its codes
        yield plan.head_on_first or len(plan.stages) == 1
    for stage in plan.stages:
        for each in stage.choices:
            kernels = [stage.backends.get(bits) for bits in (each.bits, each.expert_bits)]
            yield each, stage.dtype, *kernels


def _check_rooms(fleet: FleetSpec, source: str) -> None:
    """Raise `SpecError` unless every pipeline has room for the same rows, and is one."""
    rooms = [
        (each.workload.prompt_length, each.workload.new_tokens, each.workload.total_length)
        for each in fleet.replicas
    ]
    for index, room in enumerate(rooms):
        if fleet.replicas[index].prefill_plan is not None:
            raise SpecError(
                f"{source}: field replicas.{index}.prefill_plan: pipelines of a fleet have stages "
                "that do both phases; run that plan alone"
            )
        if room != rooms[0]:
            raise SpecError(
                f"{source}: field replicas.{index}.workload: room for {room[0]} prompt and "
                f"{room[1]} new tokens, {room[2]} in all, where the first pipeline has "
                f"{rooms[0][0]}, {rooms[0][1]} and {rooms[0][2]}; plan again"
            )


def checkpoint_reference(plan: PlanSpec, model: str | None) -> str:
    """The place of the weights in a form that is valid on every node: an absolute folder or GGUF
    file, a hub id or a URL.

    That is `model` if given, else what the plan was made from.
    """
    reference = model or plan.model.source
    named = local_path(reference, "give a folder or a hub id")
    if is_url(reference):
        return reference
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
    if plan.rounding == GPTQ and not shape.is_original and plan.rounded_layers(shape):
        raise PlanMismatchError(
            f"{folder} is quantized with other bits than the plan gives layer "
            f"{plan.rounded_layers(shape)[0]}, and rounding {GPTQ} needs weights that are not "
            "quantized; pass the checkpoint that llmpq quantize made for this plan, or the "
            "original 16-bit one, as --model"
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
    beside = {"long_rows": plan.long_rows, "prefill_plan": plan.prefill_plan}
    fields = {f"{source}: field {name}": each for name, each in beside.items() if each}
    shape = checked_shape(folder) if plan.stand_in else shape_for_plan(plan, folder)
    for name, each in {source: plan, **fields}.items():
        if each.model.fingerprint != plan.model.fingerprint:
            raise SpecError(f"{name}: for {each.model.name}, not {plan.model.name}; plan again")
        each.check(name)
        check_plan(each, _planned_shape(each) if plan.stand_in else shape, name)
        check_length(shape, each.workload)
    if beyond := beyond_vocabulary(sampling, shape.vocab_size):
        raise beyond
    return shape


def check_sampling(plan: PlanSpec, sampling: Sampling, vocab_size: int) -> None:
    """Raise `SpecError` for what `plan` has no room for, or no token of the vocabulary has."""
    _check_limit(plan, sampling)
    if beyond := beyond_vocabulary(sampling, vocab_size):
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
    return job_sampling(
        options.sampling, options.generation_config, folder, plan.workload, plan.default_new_tokens
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


@dataclass(frozen=True)
class RunModel:
    """The model that a run computes: `plan`, which for a fleet has the stages of all pipelines, the
    `checkpoint` and its adapters as all nodes know them, its `folder` here, the sampling of rows
    that have none, and whether lengths of answers are predicted.
    """

    plan: PlanSpec
    checkpoint: str
    adapter: str | None
    adapters: tuple[str, ...]
    folder: Path
    sampling: JobSampling
    shape: ModelShape
    predicts: bool


def model_of_run(
    spec: Runnable, options: RunOptions, source: str, is_started: bool = True
) -> RunModel:
    """The model of a run of `spec`, which is in the file `source`.

    Raises what `Run` raises for plan, model and options that do not go together, as far as it is
    known without torch and Ray, which are slow to load; where the run `is_started`, also for this
    machine, and for files that it is to use.
    """
    check_fleet(spec, options, source)
    plan = shown_plan(spec)
    policies = [options.scheduling(each).name for each in plans_of(spec)] if is_started else []
    checkpoint = checkpoint_reference(plan, options.model or plan.stand_in)
    folder = resolve(checkpoint, weights=False)
    sampling = sampling_for_run(plan, options, folder)
    if is_started:
        check_machine(spec, options, folder)
    shape = shape_for_run(spec, sampling.sampling, folder, source)
    adapter = checked_adapter(options.adapter, shape, folder)
    adapters = checked_adapters(options.adapters, named_plans(spec, source), shape, adapter)
    if is_started:
        importance_file(plan, options.importance, options.cache, shape)
    predicts = not PREDICTING.isdisjoint(policies)
    if predicts:
        check_source(options.predictor, folder, shape.vocab_size, options.save_predictor)
    return RunModel(plan, checkpoint, adapter, adapters, folder, sampling, shape, predicts)


def job_identity(spec: Runnable, options: RunOptions, source: str = "the plan") -> JobIdentity:
    """The model and sampling that all rows of a job share; raises as `model_of_run`."""
    found = model_of_run(spec, options, source, is_started=False)
    sampling, plan = found.sampling.sampling, found.plan
    most = sampling.max_new_tokens or plan.workload.new_tokens
    return JobIdentity(
        model_digest(found.folder, found.checkpoint, found.adapter),
        plan.model.name,
        replace(sampling, max_new_tokens=most),
        options.prompting.identity,
        {name: adapter_digest(each) for name, each in adapter_folders(found.adapters).items()},
    )


def importance_store(
    plan: PlanSpec,
    file: str | Path | None,
    cache: CacheSettings,
    model: ModelNames,
    shape: ModelShape,
) -> ImportanceStore | None:
    """Where the stages of `plan` find importance, and keep what they measure; None where they need
    none.

    `file`: one that was asked for.
    Raises `SpecError` where it would not be used, `PlanMismatchError` where it is not what the plan
    was made with, `CheckpointError` for a file that cannot be used.
    """
    path = importance_file(plan, file, cache, shape)
    if path is not None:
        from quant.rounding.importance import load_importance

        return ImportanceStore(known=load_importance(path))
    if not _is_needed(plan, shape):
        return None
    return measuring_store(cache, model, shape)


def importance_file(
    plan: PlanSpec, file: str | Path | None, cache: CacheSettings, shape: ModelShape
) -> Path | None:
    """The file whose importance a run of `plan` rounds by, None where there is none; headers alone
    are read, without torch. Raises as `importance_store`.
    """
    if not _is_needed(plan, shape):
        if file is not None:
            raise SpecError(f"importance has no effect: {_unused(plan, shape)}; leave {file} out")
        return None
    if file is not None:
        found = checked_fingerprint(Path(file), shape)
        if plan.importance is not None and plan.importance.fingerprint != found:
            raise PlanMismatchError(
                f"{file} has importance {found}, the plan was made with "
                f"{plan.importance.fingerprint}; give that file or plan again with --importance"
            )
        return Path(file)
    if plan.importance is None:
        return None
    return _planned(plan.importance, cache.path / FOLDER if cache.enabled else None, shape)


def _is_needed(plan: PlanSpec, shape: ModelShape) -> bool:
    plans = [*parts_of(plan), *(() if plan.long_rows is None else (plan.long_rows,))]
    return any(each.needs_importance(shape) for each in plans)


def measuring_store(cache: CacheSettings, model: ModelNames, shape: ModelShape) -> ImportanceStore:
    """A store for what is measured of the model."""
    if not cache.enabled:
        return ImportanceStore(shape=shape.fingerprint())
    return ImportanceStore(cache.path / FOLDER, model_digest(*model), shape.fingerprint())


def _unused(plan: PlanSpec, shape: ModelShape) -> str:
    if plan.stand_in is not None:
        return "a stand-in computes, at 16 bit"
    if shape.stored is not None:
        return "the plan keeps the codes of the checkpoint, or rounds otherwise"
    return f"the plan rounds {plan.rounding}, or nothing"


def _planned(planned: PlannedImportance, folder: Path | None, shape: ModelShape) -> Path:
    """The file of the importance that a plan names, at its path or in the cache."""
    places = [Path(planned.file)]
    if folder is not None:
        places.append(by_fingerprint(folder, planned.fingerprint))
    there = [path for path in places if path.is_file()]
    for path in there:
        if checked_fingerprint(path, shape) == planned.fingerprint:
            return path
    problem = f"{there[0]} has other numbers" if there else f"{planned.file} is not there"
    raise PlanMismatchError(
        f"the plan was made with importance {planned.fingerprint}, but {problem}; name its file "
        "with --importance, or plan again without it"
    )


def checked_fingerprint(path: Path, shape: ModelShape) -> str:
    """The fingerprint in a file's header; CheckpointError where it is of another model, or none."""
    found = read_importance_header(path)
    if found.shape != shape.fingerprint():
        raise CheckpointError(
            f"importance {path} belongs to a model of shape {found.shape}, but {shape.name} has "
            f"shape {shape.fingerprint()}; measure that of this model with llmpq indicator"
        )
    return found.fingerprint
