"""Offline batch generation of large language models on the GPUs a team really has."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from llmpq import errors
from llmpq.errors import *  # noqa: F403  (by the names of its __all__)

if TYPE_CHECKING:
    from actors.messages import Sampling
    from llmpq.cluster import Cluster
    from llmpq.plan import Fleet, Plan
    from llmpq.rows.results import Result
    from llmpq.run.session import Results, Session
    from llmpq.run.summary import RunSummary
    from llmpq.workload.input_job import InputJob, job_of_input
    from llmpq.workload.request_lengths import request_lengths
    from planner.lengths import LengthDistribution, RequestLengths
    from planner.workload import Job, Workload

__all__ = [
    "Cluster",
    "Fleet",
    "InputJob",
    "Job",
    "LengthDistribution",
    "Plan",
    "RequestLengths",
    "Result",
    "Results",
    "RunSummary",
    "Sampling",
    "Session",
    "Workload",
    "job_of_input",
    "request_lengths",
]
__all__ += errors.__all__

_MODULES = {
    "Cluster": "llmpq.cluster",
    "Fleet": "llmpq.plan",
    "InputJob": "llmpq.workload.input_job",
    "Job": "planner.workload",
    "LengthDistribution": "planner.lengths",
    "Plan": "llmpq.plan",
    "RequestLengths": "planner.lengths",
    "Result": "llmpq.rows.results",
    "Results": "llmpq.run.session",
    "RunSummary": "llmpq.run.summary",
    "Sampling": "actors.messages",
    "Session": "llmpq.run.session",
    "Workload": "planner.workload",
    "job_of_input": "llmpq.workload.input_job",
    "request_lengths": "llmpq.workload.request_lengths",
}
"""Where each name is from. It is imported when it is used first, so that `llmpq --help` does not
wait for the planner."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
