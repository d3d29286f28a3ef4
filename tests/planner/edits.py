"""Damage to the JSON of a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Edit = Callable[[dict[str, Any]], None]


def change(*path: str | int, to: Any) -> Edit:
    """Another value there."""

    def apply(content: dict[str, Any]) -> None:
        _parent(content, path)[path[-1]] = to

    return apply


def remove(*path: str | int) -> Edit:
    """Nothing there."""

    def apply(content: dict[str, Any]) -> None:
        del _parent(content, path)[path[-1]]

    return apply


def _parent(content: Any, path: tuple[str | int, ...]) -> Any:
    for key in path[:-1]:
        content = content[key]
    return content
