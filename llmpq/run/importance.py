"""The importance that a run rounds by: of a file, of the plan, or measured when stages load."""

from __future__ import annotations

from pathlib import Path

from llmpq.jobs.records.model_digest import model_digest
from planner.model.finding import ModelShape
from planner.plan.importance import PlannedImportance
from planner.plan.spec import PlanSpec
from quant.cache.settings import CacheSettings
from quant.common.errors import CheckpointError, PlanMismatchError, SpecError
from quant.importance.file import Importance, load_importance
from quant.importance.store import FOLDER, ImportanceStore, by_fingerprint


def importance_store(
    plan: PlanSpec,
    file: str | Path | None,
    cache: CacheSettings,
    model: tuple[Path, str],
    shape: ModelShape,
) -> ImportanceStore:
    """Where the stages of `plan` find importance, and keep what they measure.

    `file`: one that was asked for; `model`: the checkpoint's folder and its name in the plan.
    Raises `SpecError` where it would not be used, `PlanMismatchError` where it is not what the plan
    was made with, `CheckpointError` for a file that cannot be used.
    """
    plans = [plan] if plan.long_rows is None else [plan, plan.long_rows]
    if not any(each.needs_importance(shape.stored is not None) for each in plans):
        if file is not None:
            raise SpecError(f"importance has no effect: {_unused(plan, shape)}; leave {file} out")
        return ImportanceStore()
    folder = cache.path / FOLDER if cache.enabled else None
    known = None
    if file is not None:
        known = checked_importance(Path(file), shape)
        if plan.importance is not None and plan.importance.fingerprint != known.fingerprint:
            raise PlanMismatchError(
                f"{file} has importance {known.fingerprint}, the plan was made with "
                f"{plan.importance.fingerprint}; give that file or plan again with --importance"
            )
    elif plan.importance is not None:
        known = _planned(plan.importance, folder, shape)
    return measuring_store(cache, model, shape) if known is None else ImportanceStore(known=known)


def measuring_store(
    cache: CacheSettings, model: tuple[Path, str], shape: ModelShape
) -> ImportanceStore:
    """A store for what is measured of the model, whose folder and name are given."""
    if not cache.enabled:
        return ImportanceStore(shape=shape.fingerprint())
    return ImportanceStore(cache.path / FOLDER, model_digest(*model), shape.fingerprint())


def _unused(plan: PlanSpec, shape: ModelShape) -> str:
    if plan.stand_in is not None:
        return "a stand-in computes, at 16 bit"
    if shape.stored is not None:
        return "the checkpoint is quantized already"
    return f"the plan rounds {plan.rounding}, or nothing"


def _planned(planned: PlannedImportance, folder: Path | None, shape: ModelShape) -> Importance:
    """The importance that a plan names, at its path or in the cache."""
    places = [Path(planned.file)]
    if folder is not None:
        places.append(by_fingerprint(folder, planned.fingerprint))
    for path in places:
        if not path.is_file():
            continue
        found = checked_importance(path, shape)
        if found.fingerprint == planned.fingerprint:
            return found
    there = [str(path) for path in places if path.is_file()]
    problem = f"{there[0]} has other numbers" if there else f"{planned.file} is not there"
    raise PlanMismatchError(
        f"the plan was made with importance {planned.fingerprint}, but {problem}; name its file "
        "with --importance, or plan again without it"
    )


def checked_importance(path: Path, shape: ModelShape) -> Importance:
    """Read a file for the model of `shape`; `CheckpointError` where it is of another one."""
    found = load_importance(path)
    if found.shape != shape.fingerprint():
        raise CheckpointError(
            f"importance {path} belongs to a model of shape {found.shape}, but {shape.name} has "
            f"shape {shape.fingerprint()}; measure that of this model with llmpq-indicator"
        )
    return found
