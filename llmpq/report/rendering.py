"""The templates of the report, which escape every text that they are given."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from llmpq.report.formatting import percent, plural

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: object) -> str:
    """The text of a template in `templates/`, with `values` under their names."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # plans need it for pages alone

    environment = Environment(
        loader=PackageLoader("llmpq.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"percent": percent, "plural": plural}
    return environment
