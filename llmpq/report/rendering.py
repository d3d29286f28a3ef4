"""The templates of the report, which escape every text that they are given."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import TYPE_CHECKING

from llmpq.report import formatting, latency, sentences

if TYPE_CHECKING:
    from jinja2 import Environment

FILTERS = (
    formatting.change,
    formatting.count,
    formatting.duration,
    formatting.gap,
    formatting.layer_numbers,
    formatting.listed,
    formatting.mean_bits,
    formatting.number,
    formatting.percent,
    formatting.per_second,
    formatting.plural,
    formatting.seconds,
    formatting.share_change,
    formatting.size,
    formatting.size_change,
    formatting.times,
    latency.bound,
    latency.kind_name,
    sentences.binding,
    sentences.difference,
    sentences.search_outcome,
    math.isinf,
)
"""Functions that the templates call on values, under their own names."""


_OPTION = re.compile(r"--\w[\w-]*(?: [A-Z]+\b)?")


def unbroken(text: str) -> str:
    """The text with its options as elements that no line ends in."""
    from markupsafe import Markup, escape

    escaped = str(escape(text))
    return Markup(_OPTION.sub(lambda found: f'<span class="option">{found[0]}</span>', escaped))


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
    environment.filters["unbroken"] = unbroken
    environment.filters |= {function.__name__: function for function in FILTERS}
    return environment
