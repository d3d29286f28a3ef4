"""Jobs of `benchmarks.job_plan` that are run on this machine: emulated devices, and CPU stages."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from actors.messages import Request, Sampling
from actors.stage_group import StageGroup
from benchmarks.emulation import VOCABULARY, write_stand_in
from benchmarks.job_cases import (
    LONGEST_OUTPUT,
    LONGEST_PROMPT,
    PROMPTS,
    Pairs,
    RowLengths,
    Setting,
    settings,
)
from benchmarks.job_contestants import BEFORE_IN_FLIGHT, bits_of
from benchmarks.throughput_cases import Case
from benchmarks.throughput_contestants import CLUSTER
from llmpq.profile.layers import Profile, ProfileOptions
from llmpq.profile.links import profile_links
from llmpq.remote.session import ray_session
from planner.cluster.spec import ClusterSpec
from planner.explanation.planned_assignment import planned_assignment
from planner.lengths import Lengths
from planner.model.finding import ModelShape, model_config, model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.profiles.design import DesignSpace
from planner.search.search import PricedPlan, find_priced_plan
from planner.simulation.job_simulation import SimulatedJob, simulate_job_assignment
from planner.workload import Job, Workload
from quant.common.errors import DeviceError, InfeasibleError

FILLS = 4
"""How often the rows of an emulated job fill the slots of the default plan."""
LONGEST_SCALE = 1.0  # of modelled times, where a run is short
ROWS_SEED = 1

CPU_ROWS, CPU_PROMPT, CPU_OUTPUT = 240, 256, 96
"""Rows of the real job, and their longest prompt and output; half and a quarter are the medians."""
CPU_BUDGET_S = 45.0
CPU_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CPU_BITS = (16,)


@dataclass(frozen=True, eq=False)
class Planning:
    """What plans are made of: cluster, model at `source`, and options of all of them."""

    cluster: ClusterSpec
    shape: ModelShape
    source: str
    options: PlanOptions

    def plan(self, workload: Workload | Job) -> PricedPlan | None:
        """The plan of a job or a batch; None where it does not fit."""
        try:
            return find_priced_plan(self.cluster, self.shape, self.source, workload, self.options)
        except InfeasibleError:
            return None


def forecast(found: PricedPlan, pairs: Pairs) -> SimulatedJob:
    """The planner's forecast of a job of these rows under a plan."""
    job = Job(len(pairs), Lengths.of(pairs, "answers"))
    placed = planned_assignment(found.plan, found.costs)
    costs = replace(placed.costs, job=job)
    return simulate_job_assignment(
        costs, placed.devices, placed.sizes, placed.first_layer, placed.bitwidth
    )


def measured_tokens_per_s(plan: PlanSpec, checkpoint: Path, pairs: Pairs, vocabulary: int) -> float:
    """Generated tokens per second of a run; loading and a first request are over by then."""
    sampling = Sampling(ignore_eos=True)
    draw = np.random.default_rng(0)
    requests = [
        Request(str(i), tuple(draw.integers(3, vocabulary, prompt).tolist()), output, sampling)
        for i, (prompt, output) in enumerate(pairs)
    ]
    first = Request("first", requests[0].prompt_ids, 2, sampling)
    with StageGroup(plan, str(checkpoint)) as group:
        tuple(group.generate([first]))
        began = time.perf_counter()
        tokens = sum(len(each.token_ids) for some in group.generate(requests) for each in some)
        seconds = time.perf_counter() - began
    wanted = sum(output for _, output in pairs)
    if tokens != wanted:
        raise SystemExit(f"{tokens} of {wanted} tokens were generated")
    return tokens / seconds


RUN_HEADS = (
    "| cluster | model | lengths | rows | time scale | plan | in flight | bits | micro-batches "
    "| predicted tokens/s | measured | difference |",
    "|---" * 12 + "|",
)


def emulated_table(
    names: Sequence[str], longest_s: float, data: Path, kinds: Sequence[str]
) -> Iterator[str]:
    """Markdown rows: the default and 32 in flight, played by stages that take modelled times."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 else: any other program goes before
    yield ""
    yield from RUN_HEADS
    with tempfile.TemporaryDirectory() as folder, ray_session("local"):
        stand_in = Path(folder) / "stand_in"
        write_stand_in(stand_in, LONGEST_PROMPT + LONGEST_OUTPUT + 1)
        for setting in settings(names):
            for kind in kinds:
                yield from _emulated_rows(setting, RowLengths(kind, data), longest_s, stand_in)


def _emulated_rows(
    setting: Setting, lengths: RowLengths, longest_s: float, stand_in: Path
) -> Iterator[str]:
    job, shape = lengths.job(PROMPTS), setting.shape
    real = Planning(setting.cluster, shape, setting.model, PlanOptions()).plan(job)
    if real is None:
        raise SystemExit(f"{setting.model} does not fit {setting.name}")
    pairs = lengths.draw(FILLS * real.plan.workload.global_batch, ROWS_SEED)
    scale = min(LONGEST_SCALE, longest_s / forecast(real, pairs).seconds)
    cluster = setting.emulated(scale, stand_in)
    contestants: dict[str, tuple[PlanOptions, Workload | Job]] = {
        "default": (PlanOptions(), job),
        "before": (PlanOptions(theta=setting.theta), job.in_flight(BEFORE_IN_FLIGHT)),
    }
    rates = {}
    for name, (options, workload) in contestants.items():
        found = Planning(cluster, shape, setting.model, options).plan(workload)
        where = f"| {setting.name} | {setting.model} | {lengths.kind} | {len(pairs)} | {scale:.3f} "
        if found is None:
            yield f"{where}| {name} {'| – ' * 6}|"
            continue
        rate = None
        try:
            rate = scale * measured_tokens_per_s(found.plan, stand_in, pairs, VOCABULARY)
            rates[name] = rate
        except DeviceError as error:  # the machine is too busy: said, and the others are still run
            print(error, file=sys.stderr)
        yield f"{where}{_cells(name, found, forecast(found, pairs).tokens_per_s, rate)}"
    if len(rates) == len(contestants):
        yield f"| {' | ' * 10}default / before | {rates['default'] / rates['before']:.2f} |"


def _cells(name: str, found: PricedPlan, predicted: float, measured: float | None) -> str:
    plan = found.plan
    sizes = plan.micro_batches
    own = (
        name,
        plan.workload.global_batch,
        bits_of(plan),
        f"{sizes.prefill}/{sizes.decode}",
        f"{predicted:.1f}",
        "computing outlasted a hold" if measured is None else f"{measured:.1f}",
        "–" if measured is None else f"{100 * (predicted / measured - 1):+.1f} %",
    )
    return f"| {' | '.join(map(str, own))} |"


def cpu_rows(seed: int = ROWS_SEED) -> Pairs:
    """Rows of the real job, lognormal."""
    draw = np.random.default_rng(seed)
    prompts = draw.lognormal(np.log(CPU_PROMPT / 2), 0.6, CPU_ROWS)
    outputs = draw.lognormal(np.log(CPU_OUTPUT / 4), 0.8, CPU_ROWS)
    both = (np.clip(prompts, 8, CPU_PROMPT), np.clip(outputs, 2, CPU_OUTPUT))
    return list(zip(*(each.astype(int).tolist() for each in both), strict=True))


def cpu_table() -> Iterator[str]:
    """Markdown rows: the default and 32 in flight with a model of 168M parameters on two CPU
    stages, by times measured just before.
    """
    yield ""
    yield from RUN_HEADS
    case, pairs = Case("llama", "mixed"), cpu_rows()
    with tempfile.TemporaryDirectory() as parent, ray_session("local"):
        folder, profile = Path(parent) / "model", Path(parent) / "profile.csv"
        parameters = case.write_model(folder)
        file = Path(parent) / "cpu.yaml"
        file.write_text(CLUSTER.format(stages=2, threads=1), encoding="utf-8")
        cluster, shape = ClusterSpec.from_yaml(file), model_shape(folder)
        _take_profile(profile, cluster, shape, folder)
        job = Job(len(pairs), Lengths.of(pairs, "answers"))
        base = PlanOptions(bits=CPU_BITS, profiles=profile)
        name = f"| two CPU stages | LLaMA, {parameters / 1e6:.0f}M | lognormal | {len(pairs)} | 1 "
        rates = []
        for what, workload in (("default", job), ("before", job.in_flight(BEFORE_IN_FLIGHT))):
            found = Planning(cluster, shape, str(folder), base).plan(workload)
            if found is None:
                raise SystemExit(f"{what} does not fit")
            rate = measured_tokens_per_s(found.plan, folder, pairs, shape.vocab_size)
            rates.append(rate)
            yield f"{name}{_cells(what, found, forecast(found, pairs).tokens_per_s, rate)}"
        yield f"| {' | ' * 10}default / before | {rates[0] / rates[1]:.2f} |"


def _take_profile(path: Path, cluster: ClusterSpec, shape: ModelShape, folder: Path) -> None:
    """Measure layers and hops of the machine as `llmpq profile` does."""

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    longest = CPU_PROMPT + CPU_OUTPUT
    space = DesignSpace(CPU_BATCHES, max_length=longest, decode_tokens=CPU_ROWS * longest // 2)
    options = ProfileOptions(bits=CPU_BITS, budget_s=CPU_BUDGET_S, space=space)
    profile = Profile(path, model_config(folder), shape, options)
    profile.measure(cluster.devices[0], lambda done, of: report(f"{done} of {of} points"))
    profile_links(path, cluster, report)
