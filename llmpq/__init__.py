"""Offline batch generation of large language models on the GPUs a team really has."""

from actors.messages import Sampling
from llmpq.cluster import Cluster
from llmpq.plan import Plan
from llmpq.rows.results import Result
from planner.workload import Workload
from quant.common.errors import LlmpqError

__all__ = ["Cluster", "LlmpqError", "Plan", "Result", "Sampling", "Workload"]
