"""The paper's clusters played on this machine: latency as measured and as simulated.

    python -m benchmarks.reproduction.emulation [--clusters 1 2 3] [--longest_s 6]

LLM-PQ's plan, Uniform's and PipeEdge's for clusters 1 to 11 (layer times of `profiles_2023`, as in
`paper_tables`) are run on local Ray. Every stage is a process that computes a tiny model and holds
its results until the modelled time of the planned device, model and micro-batch is over, and of the
transfer. This compares schedule, hops and driver with the simulation, not the latency model with
devices. Where a batch would take longer than `longest_s`, fewer new tokens are generated and
simulated, with the plan for all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from actors.messages import Request, Sampling
from actors.stage_group import GroupOptions, StageGroup
from benchmarks.lab import header, processor_name
from benchmarks.reproduction.paper_report import LLM_PQ, LLMPQ, PIPEEDGE, UNIFORM, Case
from benchmarks.reproduction.paper_tables import DATA, ROOT, cases
from benchmarks.reproduction.profiles_2023 import profile_rows
from llmpq.remote.session import ray_session
from planner.cluster.spec import ClusterSpec
from planner.explanation.planned_assignment import planned_assignment
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.profiles.rows import write_profiles
from planner.search.find import find_plan
from planner.search.request import PlanningRequest, costs_of
from planner.simulation.simulation import Simulated
from quant.common.errors import DeviceError, InfeasibleError

VOCABULARY = 64
METHODS = {
    LLM_PQ: PlanOptions(objective="paper", head="last", keep_all_devices=True, memory_margin=0.0),
    LLMPQ: PlanOptions(memory_margin=0.0),
    UNIFORM: PlanOptions(method="uniform", memory_margin=0.0),
    PIPEEDGE: PlanOptions(method="pipeedge", memory_margin=0.0),
}
NEW_TOKENS = (200, 100, 50, 25, 12, 6)


@dataclass(frozen=True)
class Setting:
    """Options under which the paper's clusters are played."""

    time_scale: float
    longest_s: float
    stand_in: Path
    profiles: Path
    transport: str


@dataclass(frozen=True)
class Played:
    """A plan, the simulation of what is run of it, and how many tokens that are of each request."""

    plan: PlanSpec
    simulated: Simulated
    new_tokens: int


def write_stand_in(folder: Path, positions: int = 1024) -> None:
    """A LLaMA of one tiny layer with room for requests of so many tokens, at least the paper's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def planned(case: Case, method: str, setting: Setting) -> Played | None:
    """The plan of `method`, and as many new tokens as may be run; None where it does not fit."""
    path = ROOT / f"cluster_specs/paper_{case.cluster:02d}.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    values["emulate"] = {"time_scale": setting.time_scale, "stand_in": str(setting.stand_in)}
    cluster = ClusterSpec.from_dict(values, str(path))
    options = replace(METHODS[method], theta=case.theta, dtype="float16", profiles=setting.profiles)
    shape = model_shape(case.model)
    try:
        plan = find_plan(cluster, shape, case.model, case.workload, options).plan
    except InfeasibleError:
        return None
    costs, _ = costs_of(PlanningRequest(cluster, shape, case.workload, options))
    assignment = planned_assignment(plan, costs)
    most = case.workload.new_tokens
    for new_tokens in (most, *(n for n in NEW_TOKENS if n < most)):
        workload = replace(case.workload, new_tokens=new_tokens)
        shorter = replace(assignment, costs=replace(assignment.costs, workload=workload))
        simulated = shorter.simulate()
        if simulated.latency_s * setting.time_scale <= setting.longest_s:
            break
    return Played(plan, simulated, new_tokens)


def measured_s(played: Played, setting: Setting) -> float:
    """Seconds of one batch, scaled back; loading and a first request are over by then."""
    plan = played.plan
    sampling = Sampling(ignore_eos=True)
    length = plan.workload.prompt_length
    prompts = [
        tuple(3 + (i + k) % (VOCABULARY - 3) for k in range(length))
        for i in range(plan.workload.global_batch)
    ]
    requests = [Request(str(i), p, played.new_tokens, sampling) for i, p in enumerate(prompts)]
    first = Request("first", prompts[0], 2, sampling)
    options = GroupOptions(transport=setting.transport)  # type: ignore[arg-type]
    with StageGroup(plan, str(setting.stand_in), options) as group:
        tuple(group.generate([first]))
        began = time.perf_counter()
        ended = sum(len(each) for each in group.generate(requests))
        seconds = time.perf_counter() - began
    if ended != len(requests):
        raise SystemExit(f"{ended} of {len(requests)} requests ended")
    return seconds / setting.time_scale


def row(case: Case, method: str, setting: Setting) -> str:
    """One line of the table."""
    played = planned(case, method, setting)
    name = f"| {case.cluster} {case.model} | {method} |"
    if played is None:
        return f"{name} – | – | – | – | – | – |"
    plan, simulated_s = played.plan, played.simulated.latency_s
    sizes = plan.micro_batches
    name += f" {len(plan.stages)} | {sizes.prefill}/{sizes.decode} | {played.new_tokens} | "
    try:
        found_s = measured_s(played, setting)
    except DeviceError as error:  # the machine is too busy: said, and the others are still run
        sys.stderr.write(f"{error}\n")
        return f"{name}{simulated_s:.2f} | computing outlasted a hold | – |"
    more = 100 * (found_s / simulated_s - 1)
    return f"{name}{simulated_s:.2f} | {found_s:.2f} | {more:+.2f} % |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Play the clusters that are asked for and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the reference data")
    parser.add_argument("--clusters", type=int, nargs="+", default=list(range(1, 12)))
    parser.add_argument(
        "--methods", nargs="+", default=[LLM_PQ, UNIFORM, PIPEEDGE], choices=METHODS
    )
    parser.add_argument("--table", type=int, nargs="+", default=[4, 5], help="of the paper")
    parser.add_argument("--time_scale", type=float, default=0.1)
    parser.add_argument("--longest_s", type=float, default=6.0, help="most seconds of one batch")
    parser.add_argument("--transport", default="auto", choices=["auto", "gloo", "ray"])
    options = parser.parse_args(arguments)
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 else: any other program goes before
    tables = json.loads((options.data / "paper_tables.json").read_text(encoding="utf-8"))
    print(f"{processor_name()}, torch {torch.__version__}, time scale {options.time_scale:g}\n")
    print(
        header(
            "cluster | method | stages | micro-batches | new tokens | simulated s | measured s "
            "| difference"
        )
    )
    with tempfile.TemporaryDirectory() as folder, ray_session("local"):
        stand_in, profiles = Path(folder) / "stand_in", Path(folder) / "profiles_2023.csv"
        write_stand_in(stand_in)
        write_profiles(profiles, profile_rows(options.data / "llmpq_layer_latency_2023.csv"))
        setting = Setting(
            options.time_scale, options.longest_s, stand_in, profiles, options.transport
        )
        for case in cases(tables):
            if case.cluster in options.clusters and case.table in options.table:
                for method in options.methods:
                    print(row(case, method, setting), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
