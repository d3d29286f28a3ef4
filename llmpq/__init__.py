"""Offline batch generation of large language models on the GPUs a team really has."""

from actors.messages import Sampling
from llmpq.cluster import Cluster
from llmpq.plan import Plan
from llmpq.rows.results import Result
from llmpq.workload.input_job import InputJob, job_of_input
from planner.workload import Job, Workload
from quant.common.errors import LlmpqError

__all__ = [
    "Cluster",
    "InputJob",
    "Job",
    "LlmpqError",
    "Plan",
    "Result",
    "Sampling",
    "Workload",
    "job_of_input",
]
