"""Plans whose stages only decode, as others prefill: made of two ordinary plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from llmpq import Cluster, Workload
from planner.cluster.spec import ClusterSpec
from planner.plan.spec import PlanSpec
from planner.scheduling import PolicyOptions, RequestSchedule
from tests.llmpq.conftest import EMULATED, NEW_TOKENS, PROMPT_LENGTH

GIB = 0.01  # of every device: more than the model
SCHEDULE = RequestSchedule(
    "waa-c",
    prefill_requests=3,
    decode_requests=8,
    decode_steps=1,
    decode_micro_batches=2,
    prefill_micro_batch=2,
    mean_prompt_tokens=PROMPT_LENGTH / 2,
    tolerance=0.25,
)


def divided(prefill: PlanSpec, decode: PlanSpec, schedule: RequestSchedule = SCHEDULE) -> PlanSpec:
    """`decode` with the stages of `prefill` before it."""
    return replace(
        _only(decode, "decode"),
        policy=PolicyOptions("exegpt", schedule=schedule),
        prefill_plan=_only(prefill, "prefill"),
    )


def _only(plan: PlanSpec, role: Literal["prefill", "decode"]) -> PlanSpec:
    stages = tuple(replace(stage, role=role) for stage in plan.stages)
    origin = None if role == "prefill" else plan.origin
    return replace(plan, stages=stages, unused_devices=(), origin=origin)


def divided_plan(
    model: str | Path,
    prefill: Sequence[float] = (GIB,),
    decode: Sequence[float] = (GIB, GIB),
    schedule: RequestSchedule = SCHEDULE,
    network: float | None = None,
    turns: int = 2,
    lengths: tuple[int, int] = (PROMPT_LENGTH, NEW_TOKENS),
    emulate: Mapping[str, Any] = MappingProxyType({"time_scale": 0}),
    **options: Any,
) -> PlanSpec:
    """A plan on emulated T4s that prefill and A100s that decode, with so much memory in GiB; all
    are nodes of one cluster, whose `network` may be slow.
    """
    nodes = [
        {"name": f"{name}{i}", "accelerators": {kind: 1}, "usable_memory_gib": gib}
        for name, kind, sizes in (("p", "T4", prefill), ("d", "A100-SXM4-40GB", decode))
        for i, gib in enumerate(sizes)
    ]
    shared = {key: value for key, value in yaml.safe_load(EMULATED).items() if key != "nodes"}
    shared["emulate"] = dict(emulate)
    if network is not None:
        shared["network"] = {"internode_gbit_per_s": network}
    given = {"dtype": "float32", "bits": [16], "keep_all_devices": True, **options}
    sizes = {"prefill_micro_batch": schedule.prefill_micro_batch, "decode_micro_batch": 1}
    plans = []
    for own, requests, new_tokens, others in (
        (nodes[: len(prefill)], turns * schedule.prefill_requests, 1, sizes),
        (nodes[len(prefill) :], 2 * schedule.decode_requests, lengths[1], {}),
    ):
        cluster = Cluster(ClusterSpec.from_dict({**shared, "nodes": own}))
        workload = Workload(requests, lengths[0], new_tokens)
        plans.append(cluster.plan(model, workload, **given | others).spec)
    whole = divided(*plans, schedule)
    assert whole.origin is not None
    text = yaml.safe_dump({**shared, "nodes": nodes})
    options = replace(whole.origin.options, policy="exegpt")
    return replace(whole, origin=replace(whole.origin, cluster=text, options=options))
