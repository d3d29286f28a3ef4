"""A checkpoint's `generation_config.json`, where a model's makers state how it is to be used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.model.config_check import check_end_tokens
from planner.model.shape import MAX_SIZE
from quant.checkpoint.gguf.index import settings_place
from quant.checkpoint.gptq_config import CONFIG_FILE
from quant.common.errors import CheckpointError
from quant.common.json_file import read_json_object

GENERATION_CONFIG_FILE = "generation_config.json"


def read_generation_config(folder: Path) -> Mapping[str, Any]:
    """The fields that are set, none where there is no file.

    Raises `CheckpointError` for a malformed file.
    """
    path = folder / GENERATION_CONFIG_FILE
    if not path.exists():
        return {}
    content = read_json_object(path, "mend or delete it", CheckpointError)
    return {name: value for name, value in content.items() if value is not None}


def eos_token_ids(folder: Path, otherwise: object, vocab_size: int = MAX_SIZE) -> tuple[int, ...]:
    """End-of-sequence tokens of a checkpoint: those of its generation config, or else `otherwise`,
    the entry of its model config (one token or a list).

    Raises `CheckpointError` where they do not belong to a vocabulary of `vocab_size`.
    """
    found = read_generation_config(folder).get("eos_token_id")
    if found is None:
        return check_end_tokens(
            otherwise, vocab_size, settings_place(folder, CONFIG_FILE), CheckpointError
        )
    place = settings_place(folder, GENERATION_CONFIG_FILE)
    return check_end_tokens(found, vocab_size, place, CheckpointError)
