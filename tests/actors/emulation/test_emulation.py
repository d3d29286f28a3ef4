"""Emulated stages on clocks of their own, against the simulation of the same pipeline."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.emulation.emulation import (
    SPIN_S,
    Hold,
    Pace,
    check_planned_memory,
    hold_of,
    stand_in_spec,
    warm_up,
)
from actors.messages import MicroBatch, Sampled
from actors.stage.planned import stage_spec
from actors.transport.wire import decode, encode
from planner.cluster.spec import ClusterSpec
from planner.micro_batches import MicroBatches
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.modelled_times import LengthCurve, ModelledTimes
from planner.plan.spec import PlanSpec
from planner.search.search import find_plan
from planner.simulation.schedule import Pass, static_schedule
from planner.simulation.simulation import PassSeconds, simulate
from planner.workload import Workload
from quant.common.errors import DeviceError, SpecError
from tests.actors.models import CONFIGS, generate, random_prompts, reference, save_tiny, stages_of

SCALE = 0.5
CLUSTER = """
name: two
nodes:
  - {name: a, accelerators: {T4: 1}}
  - {name: b, accelerators: {V100-SXM2-16GB: 1}}
network: {internode_gbit_per_s: 100}
emulate: {time_scale: 0.25, stand_in: small}
"""


@dataclass
class Clock:
    """A process's own time; sleeps end `late_s` late."""

    now: float = 100.0
    late_s: float = 0.0
    spin_s: float = 1e-5

    def __call__(self) -> float:
        self.now += self.spin_s
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.late_s


def times_of(prefill: float, decode: float, link: float) -> ModelledTimes:
    """Per request, and decoding per token of context too; a transfer by tokens."""
    curves = (
        tuple(LengthCurve(v, (1, 100), (v * unit, v * (unit + 99 * grown))) for v in (1, 2, 4))
        for unit, grown in ((prefill, 0.0), (decode, 0.001))
    )
    return ModelledTimes(*curves, link_latency_s=0.01, link_s_per_token=link)


def batch_of(each: Pass) -> MicroBatch:
    slots = np.arange(each.requests)
    counts = np.full(each.requests, each.tokens)
    return MicroBatch(slots, np.full(each.requests, each.context_length), counts)


def played(
    stages: tuple[ModelledTimes, ...], passes: tuple[Pass, ...], clocks: list[Clock], compute: float
) -> float:
    """When the last result is back, from the start: the schedule over one `Pace` a stage."""
    paces = [
        Pace(Hold(times, SCALE), j, clock, clock.sleep)
        for j, (times, clock) in enumerate(zip(stages, clocks, strict=True))
    ]
    began = clocks[0].now
    back: deque[tuple[float, float]] = deque()
    taken = 0
    for each in passes:
        while taken < each.results_before:
            take(paces[0], clocks[0], back.popleft())
            taken += 1
        batch = batch_of(each)
        for pace, clock in zip(paces, clocks, strict=True):
            pace.begin(batch)
            clock.now += compute
            batch = replace(batch, ready_at_s=pace.end(batch))
            sent = clock.now
            following = clocks[(clocks.index(clock) + 1) % len(clocks)]
            if following is not clocks[0]:
                following.now = max(following.now, sent)
        back.append((sent, batch.ready_at_s))
    while back:
        take(paces[0], clocks[0], back.popleft())
    return clocks[0].now - began


def take(pace: Pace, clock: Clock, result: tuple[float, float]) -> None:
    arrived, ready_at_s = result
    clock.now = max(clock.now, arrived)
    pace.wait_for(ready_at_s)


@pytest.mark.parametrize("late_s", [0.0, 2e-4])
@pytest.mark.parametrize("stages", [1, 3])
def test_paced_stages_take_what_the_simulation_says(stages: int, late_s: float) -> None:
    """Partial micro-batches, growing context and links; what sleeps are late does not add up."""
    units = [(0.5, 0.1, 0.02), (0.3, 0.2, 0.001), (0.4, 0.05, 0.03)][:stages]
    times = tuple(times_of(*each) for each in units)
    workload, sizes = Workload(7, 5, 12), MicroBatches(2, 4)

    def seconds(each: Pass) -> PassSeconds:
        batch = batch_of(each)
        lengths = batch.starts if batch.is_decode else batch.counts
        tokens = int(batch.counts.sum())
        return PassSeconds(
            tuple(SCALE * t.compute_s(batch.is_decode, lengths) for t in times),
            tuple(SCALE * t.transfer_s(tokens, each.requests) for t in times),
        )

    simulated = simulate(workload, sizes, stages, seconds)
    clocks = [Clock(late_s=late_s) for _ in range(stages)]
    found = played(times, static_schedule(workload, sizes, stages), clocks, compute=1e-3)
    assert len(simulated.passes) > 20
    assert found >= simulated.latency_s
    assert found == pytest.approx(simulated.latency_s, abs=late_s + 20 * Clock.spin_s, rel=2e-4)


def test_overhead_between_micro_batches_shows() -> None:
    times = times_of(0.5, 0.1, 0.0)
    clock = Clock()
    pace = Pace(Hold(times, 1.0), 0, clock, clock.sleep)
    each = batch_of(Pass("decode", 0, 1, 1, 1, 1, 0))
    began = clock.now
    for _ in range(50):
        pace.begin(each)
        clock.now += 0.03
        pace.end(each)
        clock.now += 0.007
    assert clock.now - began == pytest.approx(50 * (0.1 + 0.007), rel=2e-3)


def test_compute_that_outlasts_its_hold_is_an_error() -> None:
    clock = Clock()
    pace = Pace(Hold(times_of(0.5, 0.1, 0.0), 0.5), 3, clock, clock.sleep)
    batch = batch_of(Pass("decode", 0, 1, 2, 1, 1, 0))
    pace.begin(batch)
    clock.now += 0.15
    with pytest.raises(DeviceError, match=r"stage 3.*decode.* 2 requests.*150.*100.*time_scale"):
        pace.end(batch)


def test_a_hold_says_that_it_is_one() -> None:
    """While it sleeps, not while it computes."""
    clock, seen = Clock(), list[bool]()

    def sleep(seconds: float) -> None:
        seen.append(pace.is_holding)
        clock.sleep(seconds)

    pace = Pace(Hold(times_of(0.5, 0.1, 0.0), 1.0), 0, clock, sleep)
    batch = batch_of(Pass("decode", 0, 1, 1, 1, 1, 0))
    pace.begin(batch)
    assert not pace.is_holding
    pace.end(batch)
    assert not pace.is_holding
    assert seen
    assert all(seen)


def test_a_stall_of_less_than_a_hundredth_is_lateness() -> None:
    clock = Clock()
    pace = Pace(Hold(times_of(0.5, 0.1, 0.0), 1.0), 0, clock, clock.sleep)
    batch = batch_of(Pass("decode", 0, 1, 1, 1, 1, 0))
    for turn in range(40):
        pace.begin(batch)
        clock.now += 0.13 if turn == 38 else 0.01
        pace.end(batch)
    assert clock.now - 100.0 == pytest.approx(40 * 0.1 + 0.03, rel=1e-3)
    pace.begin(batch)
    clock.now += 0.13
    with pytest.raises(DeviceError, match="time_scale"):
        pace.end(batch)


def test_without_a_time_scale_nothing_waits() -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError(seconds)

    clock = Clock()
    for hold in (Hold(), Hold(times_of(1, 1, 1), 0.0)):
        pace = Pace(hold, 0, clock, sleep)
        batch = batch_of(Pass("prefill", 0, 0, 2, 5, 0, 0))
        pace.begin(batch)
        assert pace.end(batch) == 0.0
        pace.wait_for(0.0)
    assert clock.now < 100.0 + 100 * SPIN_S


def test_messages_say_when_an_emulated_link_brings_them() -> None:
    batch = batch_of(Pass("prefill", 0, 0, 2, 3, 0, 0))
    found = decode(encode(batch, torch.zeros(6, 4), 12.75))
    assert not isinstance(found, Sampled)
    assert found[0].ready_at_s == 12.75
    sampled = Sampled(np.array([1, 2]), (None, "stop"))
    answer = decode(encode(batch, sampled, 3.5))
    assert isinstance(answer, Sampled)
    assert answer.ready_at_s == 3.5


@pytest.fixture(scope="module")
def emulated_plan(tmp_path_factory: pytest.TempPathFactory) -> PlanSpec:
    path = tmp_path_factory.mktemp("cluster") / "two.yaml"
    path.write_text(CLUSTER)
    workload = Workload(global_batch=4, prompt_length=16, new_tokens=8)
    options = PlanOptions(theta=0.0, keep_all_devices=True)
    cluster = ClusterSpec.from_yaml(path)
    return find_plan(cluster, model_shape("opt-13b"), "opt-13b", workload, options)


def test_holds_follow_the_plan(emulated_plan: PlanSpec) -> None:
    stage = emulated_plan.stages[1]
    assert hold_of(emulated_plan, stage) == Hold(stage.modelled, 0.25)
    assert not hold_of(emulated_plan, replace(stage, emulated=False)).active
    assert not hold_of(replace(emulated_plan, time_scale=0.0), stage).active
    older = hold_of(emulated_plan, replace(stage, modelled=None))
    assert older.times is not None
    assert older.times.compute_s(True, np.array([9, 9])) == stage.decode_s


def test_a_stand_in_computes_one_layer_a_stage(emulated_plan: PlanSpec, tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    shape = model_shape(tmp_path)
    for index in (0, 1):
        spec = stand_in_spec(stage_spec(emulated_plan, emulated_plan.stages[index]), shape)
        assert (spec.layers, spec.bitwidths, spec.dtype) == (
            range(index, index + 1),
            (16,),
            "float32",
        )
    far = replace(spec, index=7)
    assert stand_in_spec(far, shape).layers == range(2, 3)
    with pytest.raises(SpecError, match=r"128 positions.*200 tokens"):
        stand_in_spec(replace(spec, max_tokens=200), shape)


def test_planned_memory_is_enforced_though_a_stand_in_computes(emulated_plan: PlanSpec) -> None:
    check_planned_memory(emulated_plan)
    first, second = emulated_plan.stages
    small = replace(second, memory_limit_bytes=second.memory_bytes - 1)
    with pytest.raises(DeviceError, match=f"stage 1 needs {second.memory_bytes} bytes"):
        check_planned_memory(replace(emulated_plan, stages=(first, small)))


def test_warming_up_leaves_nothing_behind(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS["llama"])
    prompts = random_prompts([5, 9, 3])
    stages = stages_of(tmp_path, (0, 2, 5), slots=3, max_tokens=20)
    for stage in stages:
        warm_up(stage, Hold(times_of(1, 1, 0), 1.0))
        assert stage.stats().decode_tokens > 0, "largest micro-batches of both phases"
    found = generate(stages, prompts, 6, prefill=2, decode=3)
    assert found == [reference(model, prompt, 6) for prompt in prompts]
