"""How a page was made, and the command that makes its plan again."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from llmpq.version import llmpq_version
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec

CLUSTER_FILE = "cluster.yaml"
PROMPTS_FILE = "prompts.jsonl"
_FLAGS = ("all_orders", "keep_all_devices", "strict_profiles")
_OWN_FORM = ("bits", "profile_use")


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
        """Date and time as people read them, in UTC."""
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
    """The command that makes the plan again of the files that it came from."""
    parts = ["llmpq", "plan", "--model", plan.model.source, "--cluster", CLUSTER_FILE]
    parts += [*_workload(plan), *_given(options)]
    return [*parts, "-o", "plan.json"]


def _workload(plan: PlanSpec) -> list[str]:
    if plan.job is None:
        w = plan.workload
        return _pairs(("global_bz", w.global_batch), ("s", w.prompt_length), ("n", w.new_tokens))
    lengths, prompts = plan.job.job.lengths, plan.job.job.prompts
    if len(set(lengths.prompt_tokens)) == 1 and not lengths.outputs_vary:
        sizes = ("s", lengths.longest_prompt), ("n", lengths.longest_output)
        return _pairs(("prompts", prompts), *sizes)
    limit = plan.default_new_tokens
    return ["--input", PROMPTS_FILE, *(_pairs(("n", limit)) if limit is not None else [])]


def _pairs(*options: tuple[str, object]) -> list[str]:
    return [part for name, value in options for part in (f"--{name}", str(value))]


def _given(options: PlanOptions) -> Iterator[str]:
    """Yield the options that are not the defaults."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value == field.default or field.name in _OWN_FORM:
            continue
        yield f"--{field.name}"
        if field.name not in _FLAGS:
            yield f"{value:g}" if isinstance(value, float) else str(value)
    if options.bits != PlanOptions.bits:
        yield from ("--bits", *map(str, options.bits))
    if options.profile_use != PlanOptions.profile_use:
        yield from ("--profile_use", options.profile_use)
