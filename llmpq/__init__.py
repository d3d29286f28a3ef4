"""Offline batch generation of large language models on the GPUs a team really has."""

from actors.messages import Sampling
from llmpq.cluster import Cluster
from llmpq.errors import (
    BoundNotMetError,
    CheckpointError,
    DeviceError,
    DeviceLostError,
    DoesNotFitError,
    HeadLostError,
    InfeasibleError,
    InputError,
    LlmpqError,
    PlanMismatchError,
    SpecError,
    StageLostError,
)
from llmpq.plan import Plan
from llmpq.rows.results import Result
from llmpq.run.results import Results
from llmpq.run.session import Session
from llmpq.run.summary import RunSummary
from llmpq.workload.input_job import InputJob, job_of_input
from planner.workload import Job, Workload

__all__ = [
    "BoundNotMetError",
    "CheckpointError",
    "Cluster",
    "DeviceError",
    "DeviceLostError",
    "DoesNotFitError",
    "HeadLostError",
    "InfeasibleError",
    "InputError",
    "InputJob",
    "Job",
    "LlmpqError",
    "Plan",
    "PlanMismatchError",
    "Result",
    "Results",
    "RunSummary",
    "Sampling",
    "Session",
    "SpecError",
    "StageLostError",
    "Workload",
    "job_of_input",
]
