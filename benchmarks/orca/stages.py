"""The stages of the real parts: a LLaMA of 168 million random parameters on two cores."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.stage_group import GroupOptions
from benchmarks.orca.contestants import VARIABLE, Contestant, TurnsGroup
from benchmarks.orca.traces import OUTPUTS, PROMPTS
from benchmarks.throughput_cases import Case
from benchmarks.throughput_contestants import CLUSTER
from llmpq import Cluster, Plan, Workload
from llmpq.remote.session import ray_session
from planner.scheduling import PolicyOptions

MOST_BATCH = 32
IN_FLIGHT = 32
"""Slots of the longest request in the KV cache: 20,480 token slots, 1 GB of keys and values."""
PREFILL_MICRO_BATCH = 2


def cpu_plan(folder: Path, stages: int, threads: int, **options: object) -> Plan:
    """A plan for so many stages of so many threads, with room for the longest request."""
    specification = folder.with_name(f"cpu_{stages}.yaml")
    specification.write_text(CLUSTER.format(stages=stages, threads=threads))
    workload = Workload(IN_FLIGHT, PROMPTS[1], OUTPUTS[1])
    settings: dict[str, object] = {
        "theta": 0.0,
        "bits": [16],
        "prefill_micro_batch": PREFILL_MICRO_BATCH,
        **options,
    }
    return Cluster.from_yaml(specification).plan(folder, workload, **settings)


@contextmanager
def cpu_stages(tiny: bool) -> Iterator[TurnsGroup]:
    """Two stages of one core each, loaded."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        Case("llama", "equal", tiny).write_model(folder)
        plan = cpu_plan(folder, stages=2, threads=1)
        print(
            f"stages of {' and '.join(str(len(s.layers)) for s in plan.spec.stages)} layers, "
            f"{IN_FLIGHT * (PROMPTS[1] + OUTPUTS[1])} token slots\n",
            flush=True,
        )
        os.environ[VARIABLE] = str(Path(parent) / "policy.json")
        Contestant(MOST_BATCH).comes_next()
        options = GroupOptions(policy=PolicyOptions("orca", max_batch_size=MOST_BATCH))
        with ray_session("local"), TurnsGroup(plan.spec, str(folder), options) as group:
            yield group
