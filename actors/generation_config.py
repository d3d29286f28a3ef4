"""A checkpoint's `generation_config.json`, where the makers of a model say how it is to be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quant.errors import CheckpointError

GENERATION_CONFIG_FILE = "generation_config.json"


def read_generation_config(folder: Path) -> Mapping[str, Any]:
    """The fields that are set; none where there is no file. `CheckpointError` for one that is
    malformed.
    """
    path = folder / GENERATION_CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; mend or delete it") from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} is no JSON object; mend or delete it")
    return {name: value for name, value in content.items() if value is not None}


def eos_token_ids(folder: Path, otherwise: object) -> tuple[int, ...]:
    """End-of-sequence tokens of a checkpoint: one or a list, as its generation config says it, and
    `otherwise` as its model config does.
    """
    found = read_generation_config(folder).get("eos_token_id", otherwise)
    if found is None:
        return ()
    tokens = tuple(found) if isinstance(found, list) else (found,)
    if not all(type(token) is int for token in tokens):
        raise CheckpointError(
            f"{folder}: eos_token_id is {found!r:.80}; it must be a token id or a list of them"
        )
    return tokens
