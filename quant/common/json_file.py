"""Reading the JSON files beside a model's weights, within limits of size and depth."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quant.common.errors import LlmpqError

MAX_BYTES = 1 << 26
"""Largest file. An index of shards has 110 bytes a tensor, for instance 80 layers of 512 experts.
"""

MAX_DEPTH = 64
"""Deepest nesting of lists and objects; deeper values break code that prints or compares them."""


def read_json_object(
    path: Path, remedy: str, refuse: type[LlmpqError], what: str = "JSON object"
) -> dict[str, Any]:
    """Read the entries of the JSON object in the file at `path`.

    Raises `refuse`, which names the file, the problem and `remedy`, for a file that cannot be read,
    is larger than `MAX_BYTES`, is no `what`, is nested deeper than `MAX_DEPTH`, or has NaN or
    Infinity.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ValueError("it is no ordinary file")
        if size > MAX_BYTES:
            raise ValueError(f"it has {size} bytes; {MAX_BYTES} at most can be")
        values = parsed_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refuse(f"{path} cannot be read as JSON: {error}; {remedy}") from error
    if not isinstance(values, dict):
        raise refuse(f"{path} is no {what}; {remedy}")
    return values


def parsed_json(text: str) -> Any:
    """The value of `text`; ValueError where it is no JSON, nested too deep or not finite."""
    too_deep = f"it is nested deeper than {MAX_DEPTH} levels"
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    level: list[tuple[str, Any]] = [("", values)]
    for _ in range(MAX_DEPTH + 1):
        level = [each for name, outer in level for each in _inside(name, outer)]
        if not level:
            return values
    raise ValueError(too_deep)


def _inside(name: str, outer: Any) -> Iterator[tuple[str, Any]]:
    """The lists and objects directly inside `outer`, each with its path below `name`."""
    if not isinstance(outer, dict | list):
        return
    for key, value in outer.items() if isinstance(outer, dict) else enumerate(outer):
        if isinstance(value, dict | list):
            yield f"{name}{str(key)[:40]}.", value
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}{str(key)[:40]} is {value}, which is no number of JSON")
