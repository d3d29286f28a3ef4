"""The importance file that a plan names: the one asked for, or the one of the omega file."""

from __future__ import annotations

from pathlib import Path

from planner.model.finding import ModelShape
from planner.options import PlanOptions
from planner.plan.importance import PlannedImportance
from planner.quality.omega_file import read_content
from quant.common.errors import CheckpointError, SpecError
from quant.importance.header import read_importance_header

FILE_ENTRY = "importance_file"
FINGERPRINT_ENTRY = "importance"
"""Entries of an omega file's provenance; the file is named as seen from the omega file's folder."""


def planned_importance(options: PlanOptions, shape: ModelShape) -> PlannedImportance | None:
    """What a plan by `options` rounds by; None: what stages measure when they load.

    SpecError for a file that is no importance, or that of a model of another shape.
    """
    if options.importance is not None:
        return _of_file(Path(options.importance), shape)
    if options.omega_file is None:
        return None
    content = read_content(Path(options.omega_file))
    told = content.get("provenance") if isinstance(content, dict) else None
    if not isinstance(told, dict) or FINGERPRINT_ENTRY not in told:
        return None
    path = Path(options.omega_file).absolute().parent / str(told.get(FILE_ENTRY, ""))
    if not path.is_file():
        raise SpecError(
            f"omega file {options.omega_file} was measured with the importance "
            f"{told[FINGERPRINT_ENTRY]!s:.40} in {path}, which is not there; put it there, name it "
            "with --importance, or measure both again with llmpq indicator"
        )
    return _of_file(path, shape)


def _of_file(path: Path, shape: ModelShape) -> PlannedImportance:
    try:
        found = read_importance_header(path)
    except CheckpointError as error:
        raise SpecError(str(error)) from error
    if found.shape != shape.fingerprint():
        raise SpecError(
            f"importance {path} belongs to a model of shape {found.shape}, but {shape.name} has "
            f"shape {shape.fingerprint()}; measure that of this model with llmpq indicator"
        )
    return PlannedImportance(found.fingerprint, str(path.expanduser().absolute()))
