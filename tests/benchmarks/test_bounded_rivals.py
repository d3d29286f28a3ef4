"""The rivals of ExeGPT's evaluation against closed forms, simulation and random draws."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest

from benchmarks.reproduction.latency_bounds.models import (
    MODELS,
    TASKS,
    Layout,
    Pipeline,
    Work,
    spread,
)
from benchmarks.reproduction.latency_bounds.schedulers import (
    ORCA,
    VLLM,
    FixedBatch,
    IterationLevel,
    batch_timeline,
    iteration_timeline,
    mean_held_tokens,
)
from benchmarks.reproduction.latency_bounds.setting import Setting
from planner.costs.pass_times import PassSeconds
from planner.lengths import FloatArray, LengthDistribution, RequestLengths
from planner.schedule.passes import Pass
from planner.simulation.simulation import simulate
from planner.workload import MicroBatches, Workload

PROMPT = 10


@dataclass(frozen=True)
class LinearTimes:
    """Stages whose time is a constant and a share for each request; links take none."""

    stages: int
    prefill: float
    decode: float
    each: float = 0.0

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.full(self.stages, self.prefill + self.each * requests)

    def attention_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.zeros(self.stages)

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        return np.full(self.stages, self.decode + self.each * requests)

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.zeros(self.stages)

    def decode_hop_s(self, requests: float) -> FloatArray:
        return np.zeros(self.stages)


def alike(output: int) -> RequestLengths:
    prompts, outputs = (LengthDistribution((tokens,), (1.0,)) for tokens in (PROMPT, output))
    return RequestLengths(prompts, outputs)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_outputs_have_the_figures_of_table_3(task) -> None:
    found = task.outputs.cut
    assert found.mean == pytest.approx(task.outputs.mean, rel=1e-3)
    assert np.sqrt(found.variance) == pytest.approx(task.outputs.deviation, rel=1e-3)
    assert abs(found.quantile(0.99) - task.outputs.quantile_99) <= 1
    assert task.prompts.cut.mean == pytest.approx(task.prompts.mean, rel=5e-3)


@pytest.mark.parametrize(("stages", "splits"), [(1, 1), (2, 1), (3, 2), (4, 4)])
def test_a_fixed_batch_is_as_long_as_its_simulation(stages: int, splits: int) -> None:
    times, output = LinearTimes(stages, 0.5, 0.1, 0.01), 40
    requests = 4 * stages * splits
    batch = FixedBatch(requests, stages * splits, stages)

    def seconds_of(each: Pass) -> PassSeconds:
        of_phase = times.prefill_s if each.phase == "prefill" else times.decode_s
        compute = tuple(of_phase(each.requests, PROMPT).tolist())
        return PassSeconds(compute, (0.0,) * stages)

    sizes = MicroBatches(requests // (stages * splits), requests // stages)
    simulated = simulate(Workload(requests, PROMPT, output), sizes, stages, seconds_of)
    found = batch_timeline(times, alike(output), batch)
    assert found.latency_of(output) == pytest.approx(simulated.latency_s, rel=0.02)
    assert found.requests_per_s == pytest.approx(requests / found.latency_of(output))


def test_a_batch_ends_with_its_longest_output() -> None:
    outputs = LengthDistribution((1, 5, 9), (0.5, 0.3, 0.2))
    lengths = RequestLengths(LengthDistribution((PROMPT,), (1.0,)), outputs)
    found = batch_timeline(LinearTimes(1, 2.0, 1.0), lengths, FixedBatch(3, 1, 1))
    drawn = outputs.drawn(3 * 20_000, np.random.default_rng(0)).reshape(-1, 3).max(axis=1)
    assert found.mean_s == pytest.approx(2.0 + (drawn - 1).mean(), rel=0.01)
    assert found.latency_of(found.lengths.outputs.longest) == pytest.approx(2.0 + 8)


@pytest.mark.parametrize("policy", [ORCA, VLLM])
@pytest.mark.parametrize("stages", [1, 3])
def test_single_requests_follow_each_other(policy: str, stages: int) -> None:
    """A group of one: a prefill and its steps, each once through all stages, which are never full
    as prefills are as long as steps.
    """
    found = iteration_timeline(LinearTimes(stages, 1.0, 1.0), alike(8), IterationLevel(policy, 1))
    assert found.latency_of(8) == pytest.approx(8 * stages)
    assert found.requests_per_s == pytest.approx(1 / 8, rel=0.02)


def test_orca_begins_one_request_a_pass_at_most() -> None:
    times, output = LinearTimes(1, 3.0, 1.0), 20
    found = iteration_timeline(times, alike(output), IterationLevel(ORCA, 200))
    # one in every pass, which takes a prefill and a step less what both share
    assert found.requests_per_s == pytest.approx(1 / 3.0, rel=0.02)
    assert found.latency_of(output) == pytest.approx(output * 3.0, rel=0.02)


def test_vllm_stops_decoding_for_prompts() -> None:
    """With outputs all alike and places for as many, one ends in every step: then a prefill."""
    times, output, size = LinearTimes(1, 3.0, 1.0), 20, 19
    found = iteration_timeline(times, alike(output), IterationLevel(VLLM, size))
    shares = found.decodes.mean()
    rate = found.requests_per_s
    # tokens of steps and of prefills in the seconds of both
    assert rate * output == pytest.approx(
        (size * shares + (1 - shares)) / (shares + 3 * (1 - shares)), rel=0.05
    )


def test_held_tokens_are_those_of_a_moment() -> None:
    outputs = LengthDistribution((2, 6), (0.5, 0.5))
    lengths = RequestLengths(LengthDistribution((PROMPT,), (1.0,)), outputs)
    held = [PROMPT + made for output in outputs.lengths for made in range(1, output + 1)]
    assert mean_held_tokens(lengths) == pytest.approx(np.mean(held))


def test_layers_are_spread_so_that_the_slowest_stage_is_fastest() -> None:
    speeds, layers = (1.0, 2.5, 4.0), 12
    every = [
        max(n / s for n, s in zip((a, b - a, layers - b), speeds, strict=True))
        for a, b in combinations(range(1, layers), 2)
    ]
    bounds = spread(layers, speeds)
    counts = np.diff(bounds)
    assert counts.sum() == layers
    assert counts.min() >= 1
    assert max(counts / np.array(speeds)) == pytest.approx(min(every))


def test_token_slots_fill_memory() -> None:
    """All that is left beside weights and activations is keys and values."""
    model = MODELS[0]
    lengths = TASKS["S"].lengths
    pipeline = Pipeline.of(model.costs, model.costs.cluster.devices, Layout(2, 2), lengths)
    assert pipeline is not None
    assert [stage.degree for stage in pipeline.stages] == [2, 1, 1]
    slots = pipeline.token_slots(Work(1, 256, 32, 80))
    layers = np.diff(pipeline.first_layer)
    kv_bytes = 2 * 2 * model.costs.shape.hidden_size * layers / np.array([2, 1, 1])
    weights = 2 * 12 * model.costs.shape.hidden_size**2 * layers / np.array([2, 1, 1])
    filled = (slots * kv_bytes + weights) / model.costs.cluster.devices[0].memory_bytes
    assert 0.9 < filled.max() < 0.98


def test_bounds_are_quantiles_of_latencies() -> None:
    setting = Setting(MODELS[0], TASKS["S"].lengths)
    latencies = [each.latency_of(setting.bounded_output) for each in setting.batches]
    assert latencies == sorted(latencies)
    below = [np.mean([each <= bound for each in latencies]) for bound in setting.bounds_s]
    assert below == pytest.approx([0.1, 0.3, 0.7, 1.0], abs=0.02)
