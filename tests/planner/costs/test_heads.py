"""What plans count of heads that prompts share: passes, copies, the heads themselves and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import yaml

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.latency_model import LayerSeconds
from planner.costs.model import CostModel
from planner.costs.pass_times import PassTable
from planner.costs.roofline import RooflineLatency
from planner.latency_bound.bounded_plan import find_bounded_plan
from planner.latency_bound.schedules import BoundRequest
from planner.lengths import LengthDistribution, Lengths, PlannedHeads, RequestLengths
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.kv_copies import head_tokens, host_copies
from planner.plan.spec import PlanSpec
from planner.schedule.orca import MixedPass
from planner.schedule.passes import Pass
from planner.scheduling import Phase, ScheduleKind
from planner.search.find import find_plan
from planner.search.request import PlanningRequest, costs_of
from planner.workload import Job, MicroBatches, Workload
from quant.common.errors import SpecError

SHAPE = model_shape("opt-1.3b")
HEAD, PROMPT = 400, 480
TWO = ClusterSpec.from_counts(["T4", "V100"], [1, 1])
BOUNDS, CHOICES = (0, 10, SHAPE.layers), [3] * SHAPE.layers


class LinearLatency(RooflineLatency):
    """The rest is a constant and linear in tokens; attention goes by the square of lengths."""

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        tokens = micro_batch * (length if phase == "prefill" else 1)
        square = length**2 if phase == "prefill" else length
        return LayerSeconds(micro_batch * square * 1e-9, 1e-4 + tokens * 1e-6)


def costs_with(heads: PlannedHeads, **changed: Any) -> CostModel:
    workload = Workload(16, PROMPT, 50, heads=heads)
    costs, _ = costs_of(PlanningRequest.of(TWO, SHAPE, workload, PlanOptions(theta=0.0)))
    return replace(costs, **changed)


def table(costs: CostModel) -> PassTable:
    return PassTable.of(costs, costs.cluster.devices, BOUNDS, CHOICES)


def prefill(requests: int, tokens: int, **more: Any) -> Pass:
    return Pass("prefill", 1, 0, requests, tokens, 0, 0, **more)


def part(requests: int, start: int, count: int) -> MixedPass:
    parts = ((start, count),) * requests
    return MixedPass("prefill", 1, 0, requests, count, start, 0, parts=parts)


def test_the_rest_of_prompts_takes_what_a_part_of_a_longer_prompt_takes() -> None:
    latency = LinearLatency(SHAPE)
    whole = table(costs_with(PlannedHeads(), latency=latency))
    shared = table(costs_with(PlannedHeads(HEAD), latency=latency))
    for size in (1, 4):
        found = shared.seconds(prefill(size, PROMPT))
        same = whole.seconds(part(size, HEAD, PROMPT - HEAD))
        copies = size * shared._copy_s
        # a part of a prompt counts a token more, for its constant
        assert np.array(found.compute) - copies == pytest.approx(np.array(same.compute), rel=1e-2)
        assert found.transfer == pytest.approx(same.transfer)
        mixed = shared.seconds(part(size, HEAD, PROMPT - HEAD))
        assert mixed.compute == pytest.approx(found.compute, rel=1e-2), "with the copies"
        alike = shared.seconds(prefill(size, PROMPT, prompts=(PROMPT,) * size))
        assert alike.compute == pytest.approx(found.compute)
        means = shared.prefill_s(size, PROMPT), shared.prefill_hop_s(size, PROMPT)
        assert means[0] == pytest.approx(np.array(found.compute))
        assert means[1] == pytest.approx(np.array(found.transfer))
    later = part(2, HEAD + 8, 8)
    assert shared.seconds(later).compute == pytest.approx(whole.seconds(later).compute)
    decode = Pass("decode", 0, 1, 4, 1, PROMPT, 0)
    assert shared.seconds(decode) == whole.seconds(decode)


def test_the_first_pass_computes_the_heads_too() -> None:
    shared = table(costs_with(PlannedHeads(HEAD, 900)))
    whole = table(costs_with(PlannedHeads()))
    later = shared.seconds(prefill(2, PROMPT))
    first = shared.seconds(replace(prefill(2, PROMPT), index=0))
    heads = whole.seconds(prefill(1, 900))
    for name in ("compute", "transfer"):
        more = np.subtract(getattr(first, name), getattr(later, name))
        assert more == pytest.approx(getattr(heads, name))


def test_the_objective_counts_what_the_passes_take() -> None:
    """Linear times, so that means are exact: of a stage, all prefills and the head's pass."""
    costs = costs_with(PlannedHeads(HEAD), latency=LinearLatency(SHAPE))
    sizes, devices = MicroBatches(4, 8), costs.cluster.devices
    problem, timed = costs.problem(devices, sizes), table(costs)
    kinds = len(costs.options.bits) - 1
    count, layers = 16 // sizes.prefill, np.diff(BOUNDS)
    one = timed.seconds(prefill(sizes.prefill, PROMPT))
    first = timed.seconds(replace(prefill(sizes.prefill, PROMPT), index=0))
    passes_s = np.array(first.compute) + (count - 1) * np.array(one.compute)
    ends = count * problem.fixed_prefill_s + [head_end_s(costs, each) for each in (0, 1)]
    found = count * layers * problem.prefill_s[:, kinds] + ends
    assert found == pytest.approx(passes_s)


def head_end_s(costs: CostModel, stage: int) -> float:
    """Seconds of embedding or head in the head's own pass, which the objective leaves out."""
    device = costs.cluster.devices[stage]
    if stage == 0:
        return costs.latency.embedding_s(device, HEAD, costs.dtype(device))
    return costs.latency.final_s(device, 1, costs.dtype(device))


def test_copies_take_the_bytes_of_the_head_over_the_hosts_link() -> None:
    costs = costs_with(PlannedHeads(HEAD))
    plan = find_plan(TWO, SHAPE, "opt-1.3b", costs.workload, PlanOptions(theta=0.0)).plan
    placed = [next(d for d in TWO.devices if d.name == stage.device) for stage in plan.stages]
    found = [
        len(stage.layers) * costs.head_copy_s(device, 0)
        for stage, device in zip(plan.stages, placed, strict=True)
    ]
    assert found == pytest.approx([each.one_way_s(HEAD) for each in host_copies(plan)])


@pytest.mark.parametrize("policy", ["static", "orca", "s3"])
def test_a_job_with_a_head_is_forecast_between_its_tails_alone_and_whole_prompts(
    policy: str,
) -> None:
    rng = np.random.default_rng(0)
    tails, outputs = rng.integers(16, 65, 60), rng.integers(4, 30, 60)
    options = PlanOptions(
        theta=0.0, bits=(16,), policy=policy, in_flight=24, prefill_micro_batch=4,
        decode_micro_batch=12,
    )  # fmt: skip

    def planned(head: int, shared: int) -> PlanSpec:
        lengths = Lengths(tuple((head + tails).tolist()), tuple(outputs.tolist()))
        job = Job(60, lengths, heads=PlannedHeads(shared))
        return find_plan(TWO, SHAPE, "opt-1.3b", job, options).plan

    alone, shared, whole = (planned(*each) for each in ((0, 0), (HEAD, HEAD), (HEAD, 0)))
    seconds = [plan.predicted.latency_s for plan in (alone, shared, whole)]
    assert seconds[0] < seconds[1] < seconds[2]
    assert seconds[1] < (seconds[0] + seconds[2]) / 2
    assert shared.workload.heads == PlannedHeads(HEAD)
    assert PlanSpec.from_json(shared.to_json()) == shared
    assert shared.timed_sizes[0] == pytest.approx(alone.timed_sizes[0])


def test_a_cpu_leaves_room_for_the_heads() -> None:
    """Where planned without them, a run would keep fewer tokens than the head has."""
    text = "{name: here, nodes: [{name: a, accelerators: {CPU: 1}, memory_gib: 3.2}]}"
    cluster = cluster_of(text)
    lengths = Lengths.constant(PROMPT, 20)
    options = PlanOptions(bits=(16,), search_time_limit=600.0)
    plans = [
        find_plan(cluster, SHAPE, "opt-1.3b", Job(500, lengths, heads=heads), options).plan
        for heads in (PlannedHeads(), PlannedHeads(HEAD))
    ]
    assert head_tokens(plans[0]) < HEAD <= head_tokens(plans[1])
    assert plans[1].workload.global_batch < plans[0].workload.global_batch


def cluster_of(text: str) -> ClusterSpec:

    return ClusterSpec.from_dict(yaml.safe_load(text))


def test_heads_without_room_in_the_hosts_memory_are_not_counted() -> None:
    text = "{name: here, nodes: [{name: a, accelerators: {T4: 1}, host_memory_gib: 0.1}]}"
    workload = Workload(8, PROMPT, 20, heads=PlannedHeads(HEAD))
    with pytest.warns(UserWarning, match=r"have 400 tokens, but .* room for copies of \d+"):
        plan = find_plan(cluster_of(text), SHAPE, "opt-1.3b", workload, PlanOptions()).plan
    assert plan.workload.heads == PlannedHeads(0)
    assert plan.origin is not None
    assert plan.origin.options.shared_tokens == 0


@pytest.mark.parametrize("kind", ["rra", pytest.param("waa-c", marks=pytest.mark.rare)])
def test_schedules_under_a_bound_serve_more_requests_that_share_a_head(kind: ScheduleKind) -> None:
    lengths = RequestLengths(
        LengthDistribution.of_sample([PROMPT]), LengthDistribution.of_sample([8, 16, 24])
    )
    options = PlanOptions(bits=(16,), search_time_limit=600.0)
    request = BoundRequest(lengths, None, 0.9, (kind,), 100)
    shared = replace(request, lengths=replace(lengths, heads=PlannedHeads(HEAD)))
    plans = [find_bounded_plan(TWO, SHAPE, "opt-1.3b", each, options) for each in (request, shared)]
    rates = [plan.latency.requests_per_s for plan in plans if plan.latency is not None]
    assert rates[1] > 1.3 * rates[0]
    prefills = plans[1].prefill_plan or plans[1]
    assert prefills.workload.heads == PlannedHeads(HEAD)


def test_heads_that_leave_nothing_of_a_prompt_are_refused() -> None:
    with pytest.raises(SpecError, match="shared_tokens is 480, but prompts have at most 480 tok"):
        Workload(4, PROMPT, 5, heads=PlannedHeads(PROMPT))
    with pytest.raises(SpecError, match="shared_tokens is 480, but prompts have at most 480 tok"):
        Job(4, Lengths.constant(PROMPT, 5), heads=PlannedHeads(PROMPT))
    for wrong in (-1, 2.5, True, "9"):
        with pytest.raises(SpecError, match="it must be a whole number of at least 0"):
            PlannedHeads(wrong)  # type: ignore[arg-type]
    mixed = Job(4, Lengths((50, PROMPT), (5, 5)), heads=PlannedHeads(HEAD))
    assert mixed.computed_tokens == (1 + PROMPT - HEAD) / 2
