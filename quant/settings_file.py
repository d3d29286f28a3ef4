"""Reading the JSON files beside a model's weights, within bounds of size and depth."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from quant.errors import LlmpqError

MAX_BYTES = 1 << 26
"""The largest such file is an index of shards: 110 bytes a tensor, 80 layers of 512 experts."""

MAX_DEPTH = 64
"""Of lists and objects within each other; what is deeper breaks those who print or compare it."""


def read_settings(
    path: Path, remedy: str, refuse: type[LlmpqError], what: str = "JSON object"
) -> dict[str, Any]:
    """The entries of the JSON object in the file at `path`.

    `refuse`, naming the file, the problem and `remedy`, for a file that cannot be read, is larger
    than `MAX_BYTES`, is no `what` or nested deeper than `MAX_DEPTH`, or has NaN or Infinity.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ValueError("it is no ordinary file")
        if size > MAX_BYTES:
            raise ValueError(f"{size} bytes; {MAX_BYTES} at most can be")
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise refuse(f"{path} cannot be read as JSON: {error}; {remedy}") from error
    if not isinstance(values, dict):
        raise refuse(f"{path} is no {what}; {remedy}")
    if _is_deeper(values, MAX_DEPTH):
        raise refuse(f"{path} is nested deeper than {MAX_DEPTH} levels; {remedy}")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it has {name}, which is no number of JSON")


def _is_deeper(values: Any, most: int) -> bool:
    """Whether lists and objects lie in each other more than `most` levels deep."""
    level = [values]
    for _ in range(most):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(outer: Any) -> Iterator[Any]:
    """The lists and objects directly in `outer`."""
    inner: Iterable[Any] = outer.values() if isinstance(outer, dict) else outer
    return (each for each in inner if isinstance(each, dict | list))
