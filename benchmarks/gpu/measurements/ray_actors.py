"""Two stage actors through Ray: the whole runtime with its links, on one GPU or on two.

Where there is one, Ray is told of two and kept from choosing between them, so that both actors
compute on the first. A tiny model in float32 must give the tokens of transformers' `generate`; the
OPT-1.3b-like one is timed. Between two GPUs hops are timed too, by NCCL and over gloo.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import ray
import torch

from actors.messages import Request, Sampling
from actors.profiling.links import measure_hops
from actors.stage_group import GroupOptions, StageGroup
from actors.transport import Transport
from benchmarks.gpu.findings import Findings, NotRunError, Place, Table
from benchmarks.gpu.measurements.models import (
    IN_TURN,
    backends_here,
    in_turn,
    note_substitutes,
    one_thread_a_stage,
    opt_checkpoint,
    opt_config,
    planned_device,
    quiet,
    requests_of,
)
from benchmarks.gpu.measurements.planned_run import workload_of
from llmpq.profile.transfers import measuring_placement
from llmpq.remote.session import ray_session
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.search.find import find_plan
from planner.workload import Workload
from quant.scheme import BITWIDTHS
from tests.actors.configs import CONFIGS
from tests.actors.models import random_prompts, reference, save_tiny

TRANSPORTS: tuple[Transport, ...] = tuple(t for t in get_args(Transport) if t != "auto")
SHARE = 0.45
"""Share of the GPU's memory that each of the two gets."""
TINY, PROMPTS, PROMPT, NEW_TOKENS = "opt", 6, 9, 12


def run(findings: Findings, place: Place, gpus: str) -> None:
    """Tokens, then times, by each transport."""
    quiet()
    apart = gpus == "2"
    if apart and torch.cuda.device_count() < 2 and not place.dry_run:
        raise NotRunError("it takes two GPUs, and CUDA_VISIBLE_DEVICES shows one")
    spec, transports = two_devices(place, apart), ("auto", "gloo") if apart else TRANSPORTS
    with ray_session("local") if apart else local_ray(place):
        if apart:
            _hops(findings, spec, place)
        actors = _Actors(findings, place, spec, transports)
        table = findings.table(
            "", model="{}", transport="{}", requests="{}", new_tokens="{}", seconds="{:.2f} s",
            tokens_per_s="{:.0f}", tokens="{}",
        )  # fmt: skip
        actors.check_tokens(table)
        actors.time(table)


def _hops(findings: Findings, spec: ClusterSpec, place: Place) -> None:
    table = findings.table(
        "Hops, half of a round trip", KiB="{}", way="{}", time="{:.0f} us", spread="{:.0%}",
        GB_per_s="{:.2f}",
    )  # fmt: skip
    ends = [measuring_placement(each) for each in spec.devices]
    hops = measure_hops(ends, "node", place.size(60, 2), ("nccl", "gloo"))
    for hop in hops:
        rate = hop.payload_bytes / hop.seconds / 1e9
        findings.row(table, hop.payload_bytes >> 10, hop.way, hop.seconds * 1e6, hop.spread, rate)
    if not place.dry_run and "nccl" not in {hop.way for hop in hops}:
        findings.complain("NCCL did not link the two GPUs: see the log")


def two_devices(place: Place, apart: bool) -> ClusterSpec:
    """Two GPUs, or one twice, each with a part of its memory; on a CPU two parts of its cores."""
    threads = one_thread_a_stage() if place.dry_run else None
    found = [planned_device(place, i if apart and not place.dry_run else 0) for i in range(2)]
    devices = tuple(
        replace(each, index=i, memory_bytes=round(SHARE * each.memory_bytes), threads=threads)
        for i, each in enumerate(found)
    )
    return ClusterSpec("two GPUs", devices, internode_bytes_per_s=1e9)


@contextmanager
def local_ray(place: Place) -> Iterator[None]:
    """Ray on this machine, with two of the GPU that every process sees as its only one."""
    options: dict[str, Any] = {}
    if not place.dry_run:
        os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        visible = os.environ.pop("CUDA_VISIBLE_DEVICES", "0")  # it would not let Ray have two
        name = planned_device(place).accelerator.name
        options = {
            "num_gpus": 2,
            "resources": {name: 2.0},
            "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": visible}},
        }
    ray.init(address="local", log_to_driver=False, include_dashboard=False, **options)
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class _Actors:
    """Actors on both devices of `spec`, by each of the `transports`."""

    findings: Findings
    place: Place
    spec: ClusterSpec
    transports: Sequence[Transport]

    def _plan(self, folder: Path, workload: Workload, options: PlanOptions) -> PlanSpec:
        options = replace(options, keep_all_devices=True)
        return find_plan(self.spec, model_shape(folder), str(folder), workload, options).plan

    def check_tokens(self, table: Table) -> None:
        """Compare those of a tiny model with `generate`."""
        folder = self.place.folder / f"tiny-actors-{TINY}"
        model = save_tiny(folder, CONFIGS[TINY]).to(self.place.device)
        prompts = random_prompts([PROMPT] * PROMPTS)
        expected = [reference(model, prompt, NEW_TOKENS) for prompt in prompts]
        del model
        options = PlanOptions(bits=(16,), dtype="float32")
        plan = self._plan(folder, Workload(PROMPTS, PROMPT, NEW_TOKENS), options)
        requests = [Request(str(i), p, NEW_TOKENS, Sampling()) for i, p in enumerate(prompts)]
        for transport in self.transports:
            _, found = _generate(plan, folder, requests, transport, passes=1)
            equal = sum(found[str(i)] == tokens for i, tokens in enumerate(expected))
            self.findings.row(
                table, f"tiny {TINY}, float32", transport, PROMPTS, NEW_TOKENS, None, None,
                f"{equal} of {PROMPTS} equal",
            )  # fmt: skip
            if equal != PROMPTS:
                self.findings.complain(f"{transport}: {PROMPTS - equal} requests got other tokens")

    def time(self, table: Table) -> None:
        """Time the OPT-1.3b-like model."""
        folder, workload = opt_checkpoint(self.place), workload_of(self.place)
        found = self._plan(folder, workload, PlanOptions(theta=0.0, bits=(16,)))
        plan = _mixed(found, self.place, self.findings)
        requests = requests_of(
            workload.global_batch, workload.prompt_length, workload.new_tokens,
            opt_config(self.place).vocab_size,
        )  # fmt: skip
        for transport in self.place.size(self.transports, self.transports[:1]):
            passes = self.place.size(2, 1)
            seconds, tokens = _generate(plan, folder, requests, transport, passes)
            count = sum(map(len, tokens.values()))
            self.findings.row(
                table, f"OPT-1.3b-like, {IN_TURN}", transport, len(requests),
                workload.new_tokens, seconds, count / seconds, None,
            )  # fmt: skip


def _mixed(plan: PlanSpec, place: Place, findings: Findings) -> PlanSpec:
    """`plan` with all bits in turn, which need no more memory."""
    dtype = plan.stages[0].dtype
    backends = backends_here(place, BITWIDTHS, dtype)
    note_substitutes(findings, place, backends, dtype)
    stages = tuple(
        replace(
            stage,
            bitwidths=in_turn(stage.layers),
            backends={bits: backends[bits] for bits in in_turn(stage.layers)},
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


def _generate(
    plan: PlanSpec, folder: Path, requests: list[Request], transport: Transport, passes: int
) -> tuple[float, dict[str, list[int]]]:
    """Seconds of the last pass, and the tokens of each request."""
    with StageGroup(plan, str(folder), GroupOptions(transport=transport)) as group:
        for _ in range(passes):
            began = time.perf_counter()
            found = {
                each.custom_id: list(each.token_ids)
                for finished in group.generate(requests)
                for each in finished
            }
            seconds = time.perf_counter() - began
    return seconds, found
