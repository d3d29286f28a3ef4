"""Checking a model before anything is started with it: its configuration, its generation
configuration and the headers of its weights.

Every command calls this, so that they all refuse the same models. It needs no torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.stage.model_config import checked_end_tokens
from planner.adapters import adapter_folders, named_adapters, ranks_of
from planner.model.finding import model_config, model_shape
from planner.model.shape import ModelShape
from planner.model.stored_bits import stored_words
from planner.model.weight_check import check_weights
from planner.plan.spec import PlanSpec
from quant.checkpoint.adapter import Adapter
from quant.checkpoint.model_reference import cached_snapshot, local_model, unfetched
from quant.checkpoint.stored_tensors import other_parts, stored_tensors
from quant.checkpoint.text_part import wrapper_of
from quant.common.errors import SpecError


def checked_shape(model: str | Path) -> ModelShape:
    """The shape of `model` (folder, GGUF file, config.json, built-in name or hub id), once all
    files of a local one are known to fit together.

    Raises `SpecError` and `CheckpointError` naming file, entry, value and remedy; warns of weights
    that no part of the model takes, and of those that the hub's cache lacks.
    """
    shape = model_shape(model)
    folder = local_model(model, "give a name, a folder or a hub id", SpecError)
    untaken = None
    if folder is not None and folder.is_dir():
        checked_end_tokens(folder, shape.vocab_size)
        untaken = check_weights(folder, shape)
    snapshot = cached_snapshot(str(model)) if folder is None else folder
    for told in (untaken, None if snapshot is None else unfetched(snapshot)):
        if told is not None:
            warnings.warn(told, stacklevel=1)  # always this line, so that it is shown once
    return shape


def checked_adapter(given: str | Path | None, shape: ModelShape, folder: Path) -> str | None:
    """The absolute folder of an adapter that is merged into the model in `folder`; without torch.
    CheckpointError for one that is not taken. A warning tells where stored codes are not kept.
    """
    if given is None:
        return None
    adapter = Adapter(given)
    if shape.stored is not None:
        warnings.warn(
            f"adapter {adapter.folder} changes {len(adapter.modules)} weights of {folder}: where "
            "their codes would be kept, they are decoded and rounded again; plan with the adapter "
            "beside the model (--adapters NAME=FOLDER) to keep them",
            stacklevel=1,
        )
    return str(adapter.folder)


def checked_adapters(
    given: Sequence[str],
    plans: Mapping[str, PlanSpec],
    shape: ModelShape,
    merged: str | Path | None = None,
) -> tuple[str, ...]:
    """`NAME=FOLDER` of the adapters that rows of a run of `plans`, by their place, choose from: the
    plan's own where none are `given`. SpecError for those that a plan has no room for,
    CheckpointError for those that are not taken.
    """
    chosen: tuple[str, ...] = ()
    for source, plan in plans.items():
        if plan.stand_in is not None:
            if given or merged:
                raise SpecError("adapters have no effect: a stand-in computes; leave them out")
            continue
        planned = plan.adapters
        chosen = tuple(given) or named_adapters({} if planned is None else planned.folders)
        ranks = ranks_of(adapter_folders(chosen), shape)
        room = [dict[str, int]() for _ in ranks] if planned is None else planned.ranks
        for kind, own in zip(ranks, room, strict=True):
            for module, rank in kind:
                if rank > own.get(module, 0):
                    raise SpecError(
                        f"adapters have ranks of {rank} together in {module}, and {source} has "
                        f"room for {own.get(module, 0)}; plan again with --adapters "
                        f"{' '.join(chosen)}"
                    )
    return chosen


def stored_note(shape: ModelShape) -> str | None:
    """A line on how the weights of a quantized checkpoint are taken; None: it is none."""
    words = stored_words(shape)
    if not words:
        return None
    taken = (
        "they are decoded, and rounded again to the bits of the plan"
        if shape.stored is None
        else "where a plan gives layers these bits their codes are kept, elsewhere they are "
        "decoded and rounded again"
    )
    return f"{shape.name}: weights are stored as {words}; {taken}"


def left_out_note(model: str | Path) -> str | None:
    """A line on the parts of a checked `model` that are left out; None: it is a text model."""
    values, folder = model_config(model), local_model(model, "give a name or a folder", SpecError)
    parts = other_parts(stored_tensors(folder)) if folder is not None and folder.is_dir() else ()
    if not parts and wrapper_of(values) is None:
        return None
    named = f" ({', '.join(parts)})" if parts else ""
    return f"{values['model_type']}: text alone is computed; its other parts{named} are left out"
