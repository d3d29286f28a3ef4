"""The importance that a run rounds by: of a file, of the plan, or measured when stages load.

Whether a named file can be used is told by its header, before torch is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmpq.jobs.store import model_digest
from planner.model.shape import ModelShape
from planner.plan.parts import PlannedImportance
from planner.plan.spec import PlanSpec, parts_of
from quant.common.errors import CheckpointError, PlanMismatchError, SpecError
from quant.loading.cache_settings import CacheSettings
from quant.rounding.importance_header import FOLDER, by_fingerprint, read_importance_header

if TYPE_CHECKING:
    from quant.rounding.importance import Importance, ImportanceStore


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
    from quant.rounding.importance import ImportanceStore

    path = importance_file(plan, file, cache, shape)
    if path is not None:
        return ImportanceStore(known=checked_importance(path, shape))
    if not _is_needed(plan, shape):
        return ImportanceStore()
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
    return any(each.needs_importance(shape.stored is not None) for each in plans)


def measuring_store(
    cache: CacheSettings, model: tuple[Path, str], shape: ModelShape
) -> ImportanceStore:
    """A store for what is measured of the model, whose folder and name are given."""
    from quant.rounding.importance import ImportanceStore

    if not cache.enabled:
        return ImportanceStore(shape=shape.fingerprint())
    return ImportanceStore(cache.path / FOLDER, model_digest(*model), shape.fingerprint())


def _unused(plan: PlanSpec, shape: ModelShape) -> str:
    if plan.stand_in is not None:
        return "a stand-in computes, at 16 bit"
    if shape.stored is not None:
        return "the checkpoint is quantized already"
    return f"the plan rounds {plan.rounding}, or nothing"


def _planned(planned: PlannedImportance, folder: Path | None, shape: ModelShape) -> Path:
    """The file of the importance that a plan names, at its path or in the cache."""
    places = [Path(planned.file)]
    if folder is not None:
        places.append(by_fingerprint(folder, planned.fingerprint))
    for path in places:
        if not path.is_file():
            continue
        if checked_fingerprint(path, shape) == planned.fingerprint:
            return path
    there = [str(path) for path in places if path.is_file()]
    problem = f"{there[0]} has other numbers" if there else f"{planned.file} is not there"
    raise PlanMismatchError(
        f"the plan was made with importance {planned.fingerprint}, but {problem}; name its file "
        "with --importance, or plan again without it"
    )


def checked_importance(path: Path, shape: ModelShape) -> Importance:
    """Read a file for the model of `shape`; `CheckpointError` where it is of another one."""
    from quant.rounding.importance import load_importance

    checked_fingerprint(path, shape)
    return load_importance(path)


def checked_fingerprint(path: Path, shape: ModelShape) -> str:
    """The fingerprint in the header of a file for the model of `shape`, read without torch.

    Raises `CheckpointError` where it is of another model, or no such file.
    """
    found = read_importance_header(path)
    if found.shape != shape.fingerprint():
        raise CheckpointError(
            f"importance {path} belongs to a model of shape {found.shape}, but {shape.name} has "
            f"shape {shape.fingerprint()}; measure that of this model with llmpq indicator"
        )
    return found.fingerprint
