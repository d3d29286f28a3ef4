"""How pages are made: the one environment of all templates, files, and the commands they name."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.report import formatting
from llmpq.report.latency import bound, kind_name
from llmpq.report.quality import loss, loss_head
from llmpq.version import llmpq_version
from quant.common.errors import InputError, SpecError
from quant.common.files import write_whole

if TYPE_CHECKING:
    from jinja2 import Environment

    from planner.options import PlanOptions
    from planner.plan.spec import PlanSpec

FILTERS: dict[str, Callable[..., Any]] = {
    **{name: each for name, each in vars(formatting).items() if isfunction(each)},
    **{"bound": bound, "kind_name": kind_name, "isinf": math.isinf},
    **{"loss": loss, "loss_head": loss_head},
}
"""Functions that the templates call on values, under their own names."""


_OPTION = re.compile(r"--\w[\w-]*(?: [A-Z]+\b)?")


def unbroken(text: str) -> str:
    """The text with its options as elements that no line ends in."""
    from markupsafe import Markup, escape

    escaped = str(escape(text))
    return Markup(_OPTION.sub(lambda found: f'<span class="option">{found[0]}</span>', escaped))


def render(template: str, **values: object) -> str:
    """The text of a template, with `values` under their names; all texts are escaped."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # planning alone needs none

    environment = Environment(
        loader=PackageLoader("llmpq.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS | {"unbroken": unbroken}
    return environment


def write_picture(path: Path, text: str) -> None:
    """Write `text` whole or not at all; SpecError where it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from error


def write_page(path: Path, text: str, what: str = "report") -> None:
    """Write a page whole or not at all; InputError where it cannot be written."""
    try:
        write_whole(path, text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot write the {what} to {path}: {why}") from error


CLUSTER_FILE = "cluster.yaml"
PROMPTS_FILE = "prompts.jsonl"
_FLAGS = ("all_orders", "keep_all_devices", "strict_profiles", "no_measuring")
_OWN_FORM = ("profile_use",)


@dataclass(frozen=True)
class Making:
    """When and with which version a page was written, and the command of its plan; `cluster`: the
    text of the cluster file that the command names, where it was not the user's own.
    """

    written: datetime
    version: str
    command: str
    cluster: str = ""

    @property
    def date(self) -> str:
        return f"{self.written:%Y-%m-%d %H:%M} UTC"


def making(
    plan: PlanSpec | None, command: Sequence[str] = (), now: datetime | None = None
) -> Making:
    """The making of a page that is written now: by `command`, or by the one that its plan tells."""
    now = now or datetime.now(UTC)
    cluster = ""
    if not command and plan is not None and plan.origin is not None:
        command, cluster = _command_of(plan, plan.origin.options), plan.origin.cluster
    return Making(now.astimezone(UTC), llmpq_version(), shlex.join(command), cluster)


def _command_of(plan: PlanSpec, options: PlanOptions) -> list[str]:
    parts = ["llmpq", "plan", "--model", plan.model.source, "--cluster", CLUSTER_FILE]
    parts += [*_workload(plan), *_given(options)]
    return [*parts, "-o", "plan.json"]


def _workload(plan: PlanSpec) -> list[str]:
    if plan.job is None:
        w = plan.workload
        return _pairs(("global_bz", w.global_batch), ("s", w.prompt_length), ("n", w.new_tokens))
    lengths, prompts = plan.job.job.lengths, plan.job.job.prompts
    if lengths.are_alike:
        sizes = ("s", lengths.longest_prompt), ("n", lengths.longest_output)
        return _pairs(("prompts", prompts), *sizes)
    limit = plan.default_new_tokens
    return ["--input", PROMPTS_FILE, *(_pairs(("n", limit)) if limit is not None else [])]


def _pairs(*options: tuple[str, object]) -> list[str]:
    return [part for name, value in options for part in (f"--{name}", str(value))]


def _given(options: PlanOptions) -> Iterator[str]:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value == field.default or field.name in _OWN_FORM:
            continue
        yield f"--{field.name}"
        if isinstance(value, tuple):
            yield from map(str, value)
        elif field.name not in _FLAGS:
            yield f"{value:g}" if isinstance(value, float) else str(value)
    if options.profile_use != type(options).profile_use:
        yield from ("--profile_use", options.profile_use)
