"""Emulated stages on clocks of their own, against the simulation of the same pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.messages import MicroBatch, Park, Sampled
from actors.stage.emulation import EmulatedClock, EmulatedLink, EmulatedStage, warm_up
from actors.stage.spec import (
    ScaledTimes,
    check_planned_memory,
    emulated_times,
    stage_spec,
    stand_in_spec,
)
from planner.cluster.spec import ClusterSpec
from planner.costs.communication import COPY_LAUNCH_S
from planner.costs.pass_times import PassSeconds
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.kv_copies import host_copies
from planner.plan.modelled_times import LengthCurve, ModelledTimes
from planner.plan.spec import PlanSpec
from planner.schedule.passes import Pass
from planner.search.find import find_plan
from planner.simulation.simulation import simulate
from planner.workload import MicroBatches, Workload
from quant.common.errors import DeviceError, SpecError
from tests.actors.batches import batch_in_ranges
from tests.actors.configs import CONFIGS
from tests.actors.local_pipeline import metered
from tests.actors.models import generate, random_prompts, references, save_tiny, stages_of

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
    return batch_in_ranges(slots, np.full(each.requests, each.context_length), counts)


@dataclass
class Emulated:
    """One emulated stage with its link, whose real computing takes `computes_s`."""

    times: ScaledTimes
    clock: Clock
    computes_s: float
    index: int = 0
    waited: list[tuple[str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spec = self  # only its index is asked for
        self.emulated_clock = EmulatedClock(self.clock, self.sleep)
        computing: Any = self
        self.stage = EmulatedStage(computing, self.times, self.emulated_clock)
        self.link = EmulatedLink(self.times, self.emulated_clock)

    def step(self, batch: MicroBatch, inputs: Tensor) -> Tensor:
        self.waited.append(("computing", self.emulated_clock.is_waiting))
        self.clock.now += self.computes_s
        return inputs

    def sleep(self, seconds: float) -> None:
        self.waited.append(("sleeping", self.emulated_clock.is_waiting))
        self.clock.sleep(seconds)

    def send(self, batch: MicroBatch, inputs: Tensor) -> tuple[float, Tensor]:
        """The message of the next micro-batch, and when it is really sent."""
        message = self.link.encode(batch, self.stage.step(batch, inputs))
        return self.clock.now, message

    def receive(self, sent_s: float, message: Tensor) -> tuple[MicroBatch, Tensor]:
        self.clock.now = max(self.clock.now, sent_s)
        found = self.link.decode(message)
        assert not isinstance(found, Sampled)
        return found

    def pass_through(self, batch: MicroBatch) -> None:
        self.stage.step(batch, torch.zeros(int(batch.counts.sum()), 1))


def played(stages: Sequence[Emulated], passes: tuple[Pass, ...]) -> float:
    """Seconds until the last result is back: the schedule over emulated stages and links."""
    first = stages[0]
    began = first.clock.now
    back: deque[tuple[float, Tensor]] = deque()
    taken = 0
    for each in passes:
        while taken < each.results_before:
            first.receive(*back.popleft())
            taken += 1
        batch = batch_of(each)
        message = first.send(batch, torch.zeros(int(batch.counts.sum()), 1))
        for stage in stages[1:]:
            message = stage.send(*stage.receive(*message))
        back.append(message)
    while back:
        first.receive(*back.popleft())
    return first.clock.now - began


@pytest.mark.parametrize("late_s", [0.0, 2e-4])
@pytest.mark.parametrize("stages", [1, 3])
def test_emulated_stages_take_what_the_simulation_says(stages: int, late_s: float) -> None:
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
    emulated = [Emulated(ScaledTimes(t, SCALE), Clock(late_s=late_s), 1e-3) for t in times]
    found = played(emulated, simulated.passes)
    assert len(simulated.passes) > 20
    assert found >= simulated.latency_s
    assert found == pytest.approx(simulated.latency_s, abs=late_s + 20 * Clock.spin_s, rel=2e-4)


def one_stage(scale: float, computes_s: float, index: int = 0) -> Emulated:
    """A stage that decodes one request in 0.1 modelled seconds."""
    return Emulated(ScaledTimes(times_of(0.5, 0.1, 0.0), scale), Clock(), computes_s, index)


ONE_STEP = batch_of(Pass("decode", 0, 1, 1, 1, 1, 0))


def stage_times(tokens_s: float, pairs_s: float) -> ModelledTimes:
    """A pass takes 0.25 s, a token and a pair of query and key so much more."""
    lengths = tuple(range(1, 41))

    def curves(seconds: Callable[[int], float]) -> tuple[LengthCurve, ...]:
        return tuple(
            LengthCurve(v, lengths, tuple(0.25 + v * seconds(n) for n in lengths))
            for v in (1, 2, 3)
        )

    return ModelledTimes(
        curves(lambda n: n * tokens_s + n * n / 2 * pairs_s),
        curves(lambda n: tokens_s + n * pairs_s),
    )


def seconds_of_rows(times: ModelledTimes, rows: list[tuple[int, int]]) -> float:
    """Of requests with (earlier, new) tokens."""
    return times.pass_s(*np.array(rows).T)


def test_a_mixed_micro_batch_takes_its_constant_once() -> None:
    times = stage_times(1e-3, 1e-4)
    decode_s, prefill_s = 1e-3 + 20 * 1e-4, 8e-3 + 32 * 1e-4
    assert seconds_of_rows(times, [(20, 1)]) == pytest.approx(0.25 + decode_s)
    assert seconds_of_rows(times, [(0, 8)]) == pytest.approx(0.25 + prefill_s)
    mixed_s = seconds_of_rows(times, [(20, 1), (0, 8), (20, 1)])
    assert mixed_s == pytest.approx(0.25 + 2 * decode_s + prefill_s, abs=2e-3)
    parts_s = sum(seconds_of_rows(times, [(start, 4)]) for start in range(0, 32, 4))
    whole_s = seconds_of_rows(times, [(0, 32)])
    assert parts_s == pytest.approx(whole_s + 7 * 0.25, abs=8 * 2e-3), "what the parts attend to"


def test_a_mixed_micro_batch_is_never_faster_than_a_part_of_it() -> None:
    """Also where a plan has the times of full micro-batches only."""
    times = ModelledTimes.constant(prefill_s=0.25, decode_s=0.5)
    assert seconds_of_rows(times, [(20, 1), (0, 8)]) == 0.5


def test_links_carry_answers_of_what_is_sampled() -> None:
    times = ScaledTimes(replace(times_of(1, 1, 0.0), link_s_per_request=1.0), 1.0)
    batch = batch_in_ranges([0, 1, 2], [0, 4, 4], [4, 3, 1])
    for samples, answers in (((True, False, True), 2), ((False,) * 3, 0)):
        some = replace(batch, samples=np.array(samples))
        assert times.transfer_s(some) == pytest.approx(0.01 + answers)


def test_overhead_between_micro_batches_shows() -> None:
    stage = one_stage(1.0, computes_s=0.03)
    began = stage.clock.now
    for _ in range(50):
        stage.pass_through(ONE_STEP)
        stage.clock.now += 0.007
    assert stage.clock.now - began == pytest.approx(50 * (0.1 + 0.007), rel=2e-3)


def test_compute_that_outlasts_its_modelled_time_is_an_error() -> None:
    stage = one_stage(0.5, computes_s=0.15, index=3)
    with pytest.raises(DeviceError, match=r"stage 3.*decode.* 2 requests.*150.*100.*time_scale"):
        stage.pass_through(batch_of(Pass("decode", 0, 1, 2, 1, 1, 0)))


def test_a_stage_that_waits_says_so() -> None:
    """While it sleeps, not while it computes."""
    stage = one_stage(1.0, computes_s=0.01)
    stage.pass_through(ONE_STEP)
    assert not stage.emulated_clock.is_waiting
    assert set(stage.waited) == {("computing", False), ("sleeping", True)}


def test_a_stall_of_less_than_a_hundredth_is_lateness() -> None:
    stage = one_stage(1.0, computes_s=0.01)
    for turn in range(40):
        stage.computes_s = 0.13 if turn == 38 else 0.01
        stage.pass_through(ONE_STEP)
    assert stage.clock.now - 100.0 == pytest.approx(40 * 0.1 + 0.03, rel=1e-3)
    stage.computes_s = 0.13
    with pytest.raises(DeviceError, match="time_scale"):
        stage.pass_through(ONE_STEP)


def test_messages_arrive_when_the_emulated_link_has_brought_them() -> None:
    """One after the other: the link is busy with the first, and nothing else of them changes."""
    times = ScaledTimes(times_of(0.5, 0.1, 1.0), 2.0)
    stage = Emulated(times, Clock(), 0.0)
    batch = batch_of(Pass("prefill", 0, 0, 2, 3, 0, 0))
    sent = [stage.link.encode(batch, torch.full((6, 4), value)) for value in (1.0, 2.0)]
    answer = Sampled(np.array([1, 2]), (None, "stop"))
    sent.append(stage.link.encode(batch, answer))
    each_s = times.transfer_s(batch)
    assert each_s == pytest.approx(2 * (0.01 + 6))
    after = Emulated(times, Clock(now=0.0), 0.0)
    for turn, value in enumerate((1.0, 2.0), start=1):
        assert after.link.message_bytes(sent[turn - 1]) == len(sent[turn - 1])
        _, hidden = after.receive(0.0, sent[turn - 1])
        assert hidden.tolist() == [[value] * 4] * 6
        assert after.clock.now == pytest.approx(turn * each_s, abs=1e-3)
    found = after.link.decode(sent[2])
    assert isinstance(found, Sampled)
    assert (found.token_ids.tolist(), found.finish_reasons) == ([1, 2], (None, "stop"))
    assert after.clock.now == pytest.approx(3 * each_s, abs=1e-3)


@pytest.fixture(scope="module")
def emulated_plan(tmp_path_factory: pytest.TempPathFactory) -> PlanSpec:
    path = tmp_path_factory.mktemp("cluster") / "two.yaml"
    path.write_text(CLUSTER)
    workload = Workload(global_batch=4, prompt_length=16, new_tokens=8)
    options = PlanOptions(theta=0.0, keep_all_devices=True)
    cluster = ClusterSpec.from_yaml(path)
    return find_plan(cluster, model_shape("opt-13b"), "opt-13b", workload, options).plan


def test_modelled_times_follow_the_plan(emulated_plan: PlanSpec) -> None:
    stage = emulated_plan.stages[1]
    assert stage.modelled is not None
    wanted = ScaledTimes(stage.modelled, 0.25, host_copies(emulated_plan)[1])
    assert emulated_times(emulated_plan, stage) == wanted
    assert emulated_times(emulated_plan, replace(stage, emulated=False)) is None
    assert emulated_times(replace(emulated_plan, time_scale=0.0), stage) is None
    older = emulated_times(emulated_plan, replace(stage, modelled=None))
    assert older is not None
    decode = batch_in_ranges([0, 1], [9, 9], [1, 1])
    assert older.compute_s(decode) == 0.25 * stage.decode_s


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
        meter = metered(stage)
        warm_up(stage, times_of(1, 1, 0))
        assert meter.tokens()["decode"] > 0, "largest micro-batches of both phases"
    found = generate(stages, prompts, 6, prefill=2, decode=3)
    assert found == references(model, prompts, 6)


ONE, ZERO = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)


def test_tokens_that_are_parked_and_restored_take_the_time_of_their_way() -> None:
    """Each of them once over PCIe, beside the pass; the time scale is that of all seconds."""
    cluster = ClusterSpec.from_dict(
        {
            "name": "one",
            "nodes": [{"name": "a", "accelerators": {"T4": 1}}],
            "emulate": {"time_scale": 0.5},
        },
        "test",
    )
    options = PlanOptions(bits=(4,), dtype="float16")
    plan = find_plan(
        cluster, model_shape("opt-1.3b"), "opt-1.3b", Workload(4, 64, 16), options
    ).plan
    (stage,) = plan.stages
    times = emulated_times(plan, stage)
    assert times is not None
    step = MicroBatch(ZERO, 9 * ONE, ONE, ZERO)
    both = replace(step, parks=(Park(1, 0, 30),), restores=(Park(2, 90, 50), Park(3, 9, 1)))
    bytes_s = 81 * 24 * 2 * 2048 * 2 / 16e9  # 24 layers of 2,048 keys and values of 2 bytes
    starts_s = 3 * 24 * 2 * COPY_LAUNCH_S
    more_s = times.compute_s(both) - times.compute_s(step)
    assert more_s == pytest.approx(0.5 * (bytes_s + starts_s))
    plain = ScaledTimes(ModelledTimes.constant(2.0, 1.0), 3.0)
    assert plain.compute_s(both) == plain.compute_s(step) == 3.0
