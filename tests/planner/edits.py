"""Damage to the JSON of a plan, whose digest is taken out as users do who edit one on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from planner.plan.file import DIGEST
from planner.plan.spec import PlanSpec

Edit = Callable[[dict[str, Any]], None]


def change(*path: str | int, to: Any) -> Edit:
    """Another value there."""

    def apply(content: dict[str, Any]) -> None:
        content.pop(DIGEST, None)
        _parent(content, path)[path[-1]] = to

    return apply


def remove(*path: str | int) -> Edit:
    """Nothing there."""

    def apply(content: dict[str, Any]) -> None:
        content.pop(DIGEST, None)
        del _parent(content, path)[path[-1]]

    return apply


def _parent(content: Any, path: tuple[str | int, ...]) -> Any:
    for key in path[:-1]:
        content = content[key]
    return content


def content_of(plan: PlanSpec) -> dict[str, Any]:
    """The JSON of a plan without its digest, to be changed."""
    content: dict[str, Any] = json.loads(plan.to_json())
    del content[DIGEST]
    return content
