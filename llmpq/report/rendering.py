"""The templates of the report, which escape every text that they are given."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from llmpq.report import formatting, sentences

if TYPE_CHECKING:
    from jinja2 import Environment

FILTERS = (
    formatting.change,
    formatting.count,
    formatting.duration,
    formatting.layer_numbers,
    formatting.listed,
    formatting.number,
    formatting.percent,
    formatting.per_second,
    formatting.plural,
    formatting.seconds,
    formatting.size,
    formatting.size_change,
    sentences.binding,
    sentences.difference,
    sentences.search_outcome,
    math.isinf,
)
"""Functions that the templates call on values, under their own names."""


def render(template: str, **values: object) -> str:
    """The text of a template of the page or of a picture, with `values` under their names."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import (  # planning alone needs none
        ChoiceLoader,
        Environment,
        PackageLoader,
        StrictUndefined,
    )

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(f"llmpq.report{room}") for room in ("", ".pictures")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {function.__name__: function for function in FILTERS}
    return environment
