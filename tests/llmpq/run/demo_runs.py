"""Plans of the demo model for sessions of which the stage that samples is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import ray

from llmpq import Cluster, Plan, Workload
from planner.cluster.spec import ClusterSpec
from tests.llmpq.divided_plans import divided_plan
from tests.paths import DEMO_MODEL

CLUSTER = {
    "name": "two-emulated",
    "nodes": [{"name": "a", "accelerators": {"T4": 2}, "usable_memory_gib": 0.1}],
    "network": {"internode_gbit_per_s": 100},
    "emulate": {"time_scale": 0},
}


def demo_plan(prompt_length: int, new_tokens: int) -> Plan:
    """Two stages in float32 at 16 bit."""
    options: dict[str, Any] = {"bits": [16], "dtype": "float32", "keep_all_devices": True}
    workload = Workload(6, prompt_length, new_tokens)
    cluster = Cluster(ClusterSpec.from_dict(CLUSTER))
    return cluster.plan(DEMO_MODEL, workload, theta=1.0, **options)


def divided_demo_plan(prompt_length: int, new_tokens: int) -> Plan:
    """One stage that prefills for another one."""
    lengths = prompt_length, new_tokens
    return Plan(divided_plan(DEMO_MODEL, (0.1,), (0.1,), lengths=lengths, theta=1.0))


def kill_sampler(session: Any, plan: Plan, killed: set[int]) -> None:
    """Kill the process of the last stage, but for one that was `killed` before."""
    stage = session._shared.stages.of(plan.spec).stages[-1]
    pid = ray._private.state.actors()[stage.actor_ids[0]]["Pid"]
    if pid not in killed:
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
