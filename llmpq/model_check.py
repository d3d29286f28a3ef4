"""A model checked whole before anything is started with it: its configuration, generation
configuration and weights, and the plan's lengths.

Every command asks here, so that what one refuses no other runs. All of it reads JSON and the
headers of weights, without torch.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from actors.stage.generation_config import eos_token_ids
from planner.model.finding import ModelShape, model_shape
from planner.model.weight_check import check_weights
from quant.checkpoint.model_reference import local_path
from quant.common.errors import SpecError


def checked_shape(model: str | Path) -> ModelShape:
    """The shape of `model` (folder, config.json, built-in name or hub id), of a folder only if all
    in it fits together.

    Raises `SpecError` and `CheckpointError` naming file, entry, value and remedy; warns of weights
    that no part of the model takes.
    """
    shape = model_shape(model)
    folder = local_path(model, "give a name, a folder or a hub id", SpecError)
    if folder is not None and folder.is_dir():
        eos_token_ids(folder, None, shape.vocab_size)
        untaken = check_weights(folder, shape)
        if untaken is not None:
            warnings.warn(untaken, stacklevel=1)  # of one place, so that it is told once
    return shape
