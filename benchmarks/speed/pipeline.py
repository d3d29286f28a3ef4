"""Efficiency of the whole pipeline, as a share of its busiest stage's speed.

    python -m benchmarks.speed.pipeline [--part emulated|real] [--transports gloo ray] [--rounds 3]

The bound is what the busiest stage needs for its own micro-batches; efficiency is that over the
time from the first request to the last result. `emulated`: 2, 4 and 8 stages of the demo model that
hold every micro-batch for a given time, so that two cores can play eight devices; prompts for three
times the KV slots, one decode group more than stages or just as many. `real`: a random LLaMA in two
stages of one thread; the bound is each stage's time alone, with the other one waiting, taken in
turns with the transports' runs, round by round. *Idle* is what the busiest stage waited (filling
and emptying the pipeline, hops), *contention* what its own micro-batches took longer than alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from actors.messages import Request, Sampling
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from actors.stage.spec import stage_spec
from actors.stage.stage import Stage
from actors.stage_group import GroupOptions, StageGroup
from benchmarks.lab import header, processor_name, spread, table_row
from benchmarks.quantization.quality import MODEL
from benchmarks.speed.throughput_contestants import CLUSTER, Case
from llmpq import Cluster, Workload
from llmpq.remote.session import ray_session
from planner.plan.spec import MicroBatches, PlanSpec
from quant.devices import local_processor
from tests.actors.driving import drive
from tests.actors.local_pipeline import LocalPipeline, metered

PREFILL_S, DECODE_S = 0.05, 0.025
"""Held by an equal stage: ten times what the demo model's part computes, for eight on two cores."""

UNEQUAL = (1.0, 0.6, 0.8, 0.5, 0.9, 0.7, 0.4, 0.8)
ROUNDS = 3
LAYERS = 12


def emulated_plan(stages: int, groups: int, unequal: bool) -> PlanSpec:
    """The demo model in `stages` parts that hold micro-batches, `groups` of four requests."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "one.yaml"
        cluster.write_text(
            "name: one\nnodes:\n  - {name: host, accelerators: {A100: 1}}\n"
            "emulate: {time_scale: 1}\n"
        )
        workload = Workload(global_batch=4 * groups, prompt_length=16, new_tokens=16)
        plan = Cluster.from_yaml(cluster).plan(MODEL, workload, bits=[16]).spec
    (whole,) = plan.stages
    cuts = [round(LAYERS * i / stages) for i in range(stages + 1)]
    parts = []
    for index in range(stages):
        share = UNEQUAL[index] if unequal else 1.0
        layers = range(cuts[index], cuts[index + 1])
        parts.append(
            replace(
                whole,
                index=index,
                layers=layers,
                bitwidths=(16,) * len(layers),
                prefill_s=PREFILL_S * share,
                decode_s=DECODE_S * share,
                modelled=None,
            )
        )
    sizes = MicroBatches(prefill=4, decode=4)
    return replace(plan, stages=tuple(parts), micro_batches=sizes, head_on_first=False)


def timed(
    plan: PlanSpec, model: Path, requests: Sequence[Request], transport: str
) -> tuple[float, list[float]]:
    """Seconds of one pass after a warm-up, and the busy seconds of each stage in it."""
    options = GroupOptions(transport=transport)  # type: ignore[arg-type]
    with ray_session("local"), StageGroup(plan, str(model), options) as group:
        tuple(group.generate(requests))
        before = group.observer.figures()
        began = time.perf_counter()
        tuple(group.generate(requests))
        seconds = time.perf_counter() - began
        after = group.observer.figures()
        return seconds, [b.busy_s - a.busy_s for a, b in zip(before, after, strict=True)]


def emulated(transports: Sequence[str]) -> None:
    """Print the table of emulated devices."""
    print(header("stages | groups | times | transport | efficiency | seconds | busiest | fill"))
    for stages in (2, 4, 8):
        for unequal in (False, True):
            for groups in (stages, stages + 1):
                plan = emulated_plan(stages, groups, unequal)
                count = ROUNDS * plan.workload.global_batch
                requests = _requests([[5 + i % 7] * 16 for i in range(count)], 16)
                for transport in transports:
                    seconds, busy = timed(plan, MODEL, requests, transport)
                    fill = sum(s.prefill_s + s.decode_s for s in plan.stages) - max(
                        s.prefill_s + s.decode_s for s in plan.stages
                    )
                    print(
                        f"| {stages} | {groups} | {'unequal' if unequal else 'equal'} "
                        f"| {transport} | {max(busy) / seconds:.3f} | {seconds:.2f} "
                        f"| {max(busy):.2f} | {fill:.2f} |",
                        flush=True,
                    )


def _requests(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Request]:
    sampling = Sampling(ignore_eos=True)
    return [Request(f"r{i}", tuple(p), new_tokens, sampling) for i, p in enumerate(prompts)]


def alone(plan: PlanSpec, model: Path, requests: Sequence[Request]) -> list[float]:
    """Each stage's seconds for the same queue when the other waits, in this process."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    stages = [
        Stage(stage_spec(plan, stage), model, device, local_processor(device))
        for stage in plan.stages
    ]
    meters = [metered(stage) for stage in stages]
    pipeline = LocalPipeline(stages)
    for turn in range(2):
        before = [meter.busy_s() for meter in meters]
        scheduler = StaticScheduler(QueueSizes.of(plan), len(stages))
        scheduler.add(requests)
        for _ in drive(scheduler, pipeline):
            pass
        if turn:
            return [meter.busy_s() - b for meter, b in zip(meters, before, strict=True)]
    raise AssertionError("two turns were asked for")


@dataclass(frozen=True)
class Computed:
    """A run of the computing pipeline beside its longest stage, alone in the same round."""

    seconds: float
    alone_s: float
    busy_s: float


def real(transports: Sequence[str], rounds: int) -> None:
    """Print the table of a computing pipeline: medians over rounds, with least and most."""
    print(
        header(
            "micro-batches | transport | efficiency | tokens/s | seconds | busiest alone | "
            "contention | idle"
        )
    )
    with tempfile.TemporaryDirectory() as parent:
        model, case = Path(parent) / "model", Case("llama", "equal")
        case.write_model(model)
        cluster = Path(parent) / "two.yaml"
        cluster.write_text(CLUSTER.format(stages=2, threads=1))
        lengths = case.lengths()
        workload = Workload(len(lengths), max(lengths), case.new_tokens)
        plan = Cluster.from_yaml(cluster).plan(model, workload, bits=[16]).spec
        prompts = [prompt for turn in range(ROUNDS) for prompt in case.prompts(turn)]
        requests = _requests(prompts, case.new_tokens)
        found: dict[str, list[Computed]] = {transport: [] for transport in transports}
        for _ in range(rounds):
            own = alone(plan, model, requests)
            longest = max(range(len(own)), key=lambda i: own[i])
            for transport in transports:
                seconds, busy = timed(plan, model, requests, transport)
                found[transport].append(Computed(seconds, own[longest], busy[longest]))
    sizes, tokens = plan.micro_batches, len(requests) * case.new_tokens
    for transport, runs in found.items():
        cells = [f"{sizes.prefill}/{sizes.decode}", transport]
        cells.append(spread([run.alone_s / run.seconds for run in runs], 3))
        cells.append(spread([tokens / run.seconds for run in runs], 0))
        cells.append(spread([run.seconds for run in runs], 2))
        cells.append(spread([run.alone_s for run in runs], 2))
        cells.append(spread([run.busy_s - run.alone_s for run in runs], 2))
        cells.append(spread([run.seconds - run.busy_s for run in runs], 2))
        print(table_row(cells), flush=True)


def main() -> None:
    """Print one table a part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=["emulated", "real"])
    parser.add_argument("--transports", nargs="+", default=["gloo", "ray"])
    parser.add_argument("--rounds", type=int, default=3, help="of the real part")
    options = parser.parse_args()
    print(f"{processor_name()}, torch {torch.__version__}\n")
    if options.part != "real":
        emulated(options.transports)
        print()
    if options.part != "emulated":
        real(options.transports, options.rounds)


if __name__ == "__main__":
    main()
