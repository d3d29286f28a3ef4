"""The templates of notebooks, which escape every text that they are given."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from llmpq.report.rendering import FILTERS

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: object) -> str:
    """A fragment of HTML that brings its own style and loads nothing."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("llmpq.notebook"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {function.__name__: function for function in FILTERS}
    return environment
