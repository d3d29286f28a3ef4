"""Plans for what is left of the cluster that another plan was made for."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmpq import Cluster, Plan, Workload
from llmpq.cli.run import main
from llmpq.run.replan import (
    replan,
    replan_after_loss,
    replan_measured,
    replanned_text,
    rescheduled_text,
)
from llmpq.run.switching import Measured
from planner.cluster.device import Slowdown
from planner.lengths import LengthDistribution, Lengths, RequestLengths
from planner.model.finding import model_shape
from planner.optimiser.problem import JobPasses
from planner.options import PlanOptions
from planner.plan.check import check_plan
from planner.plan.origin import origin_of
from planner.plan.parts import JobForecast, PlansBeside
from planner.plan.spec import PlanSpec
from planner.scheduling import RequestSchedule
from planner.workload import Job
from quant.common.errors import DeviceLostError, InfeasibleError, SpecError
from tests.planner.bounded import bounded
from tests.planner.plan_alone import alone

WORKLOAD = Workload(8, 128, 32)
FILES = {"plan": "plan.json", "input": "in.jsonl", "output": "out.jsonl"}


@cache
def planned(counts: tuple[int, int] = (2, 2), **options: Any) -> PlanSpec:
    """At theta 1, unless a bound takes its place, and by four layers: which plan it is does not
    matter here.
    """
    options = {"group": 4, **options}
    if "max_latency_s" not in options:
        options.setdefault("theta", 1.0)
    cluster = Cluster.from_counts(["T4", "V100-32G"], counts)
    with alone():
        return cluster.plan("opt-6.7b", WORKLOAD, **options).spec


def devices(plan: PlanSpec) -> set[str]:
    return {stage.device for stage in plan.stages} | set(plan.unused_devices)


def test_lost_devices_are_in_no_later_plan_and_the_rest_is_planned_as_if_new() -> None:
    first = planned()
    fresh = planned((1, 2))
    with alone():
        second = replan(PlanSpec.from_json(first.to_json()), ["node0/T4-16GB:0"])
    assert devices(second) == devices(first) - {"node0/T4-16GB:0"}
    assert second.predicted == fresh.predicted
    assert [s.bitwidths for s in second.stages] == [s.bitwidths for s in fresh.stages]
    third = replan(PlanSpec.from_json(second.to_json()), ["node1/V100-SXM2-32GB:1"])
    assert devices(third) == {"node0/T4-16GB:1", "node1/V100-SXM2-32GB:0"}
    for plan in (second, third):
        assert sum(len(stage.layers) for stage in plan.stages) == 32
        assert all(stage.memory_bytes <= stage.memory_limit_bytes for stage in plan.stages)
        assert plan.workload == first.workload
    text = replanned_text(third)
    assert text.startswith("node0/T4-16GB:0, node1/V100-SXM2-32GB:1 gone; planned again: stage 0 (")
    assert "tokens/s" in text


@pytest.mark.rare  # plans several times
def test_options_hold_but_not_a_latency_that_fewer_devices_cannot_keep(tmp_path: Path) -> None:
    first = planned((1, 2), bits=(4, 8), kv_bits="auto", dtype="float16")
    plan = replan(first, ["node1/V100-SXM2-32GB:0"])
    assert {bits for stage in plan.stages for bits in stage.bitwidths} <= {4, 8}
    assert plan.origin is not None
    assert plan.origin.options.kv_bits == "auto"
    best_s = planned((1, 2), theta=0.0).predicted.objective_latency_s
    bounded = planned((1, 2), max_latency_s=1.01 * best_s)
    with pytest.warns(UserWarning, match="max_latency_s"):
        slower = replan(bounded, ["node1/V100-SXM2-32GB:0"])
    assert slower.predicted.latency_s > 1.01 * best_s


@pytest.mark.parametrize(
    ("bound_s", "is_kept"), [(0.5, False), pytest.param(2.0, True, marks=pytest.mark.rare)]
)
def test_a_bound_on_requests_holds_for_fewer_devices_or_is_said_to_be_missed(
    bound_s: float, is_kept: bool
) -> None:
    """The plan still names the bound that was asked for, beside the least that is feasible."""
    lengths = RequestLengths(
        LengthDistribution.truncated_normal(64, 20, 128),
        LengthDistribution((4, 8, 16), (0.2, 0.5, 0.3)),
    )
    options: dict[str, Any] = {
        "bits": [8],
        "theta": 0.0,
        "group": 8,
        "keep_all_devices": True,
        "schedule": "rra",
        "quantile": 0.9,
        "tensor_parallel": 1,
    }
    cluster = Cluster.from_counts(["T4", "V100-SXM2-32GB"], (2, 1))
    first = cluster.plan("opt-6.7b", lengths, max_request_latency_s=bound_s, **options).spec
    expected = nullcontext() if is_kept else pytest.warns(UserWarning, match="0.5 cannot be kept")
    with expected:
        second = PlanSpec.from_json(replan(first, ["node1/V100-SXM2-32GB:0"]).to_json())
    assert first.latency is not None
    assert second.latency is not None
    assert second.policy.schedule is not None
    assert second.latency.lengths == lengths
    assert second.latency.bound_s == bound_s
    assert (second.latency.latency_s <= bound_s) == is_kept
    assert second.latency.requests_per_s < first.latency.requests_per_s


def test_what_differs_of_a_schedule_is_told() -> None:
    plan, other = planned(), RequestSchedule("waa-c", 4, 80, 1, 2, 4, 100.0)
    before = bounded(plan, other)
    for changes, words in (
        ({}, "the schedule stays the best for the lengths that were measured"),
        ({"mean_prompt_tokens": 90.0}, "measured: turns of prompts of 90 tokens in the mean; pred"),
        ({"prefill_micro_batch": 3}, "measured: prefill_micro_batch 4 to 3; predicted 16 tokens/s"),
        (
            {"prefill_requests": 2, "decode_requests": 40, "decode_micro_batches": 1},
            "prefill_requests 4 to 2, decode_requests 80 to 40, decode_micro_batches 2 to 1; pred",
        ),
    ):
        assert words in rescheduled_text(before, bounded(plan, replace(other, **changes)))


def test_files_are_kept_by_absolute_path_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = Cluster.from_counts(["T4"], [2]).spec
    origin = origin_of(spec, PlanOptions(omega_file="omega.json", profiles=Path("times.csv")))
    assert origin is not None
    assert origin.options.omega_file == str(tmp_path / "omega.json")
    plan = replace(planned(), origin=origin)
    with pytest.warns(UserWarning, match="planned without") as caught:
        replan(plan, ["node0/T4-16GB:0"])
    assert [str(warning.message).split()[3] for warning in caught] == ["omega_file", "profiles"]
    options = replace(origin.options, max_ppl_delta=0.1, profiles=None)
    limited = replace(origin, options=options)
    with pytest.raises(SpecError, match="max_ppl_delta"):
        replan(replace(plan, origin=limited), ["node0/T4-16GB:0"])


def test_what_does_not_fit_and_plans_that_do_not_say_their_origin() -> None:
    plan = planned((1, 1))
    t4, v100 = "node0/T4-16GB:0", "node1/V100-SXM2-32GB:0"
    with pytest.raises(InfeasibleError, match="no device"):
        replan(plan, [t4, v100])
    lost = DeviceLostError("stage 1 (x): no node has one", (1,), (v100,))
    with alone():
        large = Cluster.from_counts(["T4", "V100-32G"], [1, 1]).plan(
            "opt-30b", Workload(4, 64, 8), bits=[8]
        )
    with pytest.raises(DeviceLostError, match=r"no node has one.*not fit.*can go on") as caught:
        replan_after_loss(large.spec, lost)
    assert caught.value.devices == (v100,)
    old = plan.to_json().split(',\n "origin"')[0] + "\n}\n"
    old = "".join(line for line in old.splitlines(keepends=True) if '"digest"' not in line)
    assert PlanSpec.from_json(old) == replace(plan, origin=None, beside=PlansBeside())
    with pytest.raises(SpecError, match="llmpq plan"):
        replan(PlanSpec.from_json(old), [t4])


def test_a_device_that_turned_out_slow_gets_fewer_layers_and_the_plan_says_why() -> None:
    cluster = Cluster.from_counts(["T4"], [2])
    with alone():
        first = cluster.plan("opt-6.7b", WORKLOAD, bits=[8], keep_all_devices=True).spec
    slow = first.stages[0]
    measured = Measured(100, None, {slow.device: Slowdown(2.0, 2.0)})
    second = PlanSpec.from_json(replan_measured(first, measured).to_json())
    layers = {stage.device: len(stage.layers) for stage in second.stages}
    assert layers[slow.device] < len(slow.layers)
    text = next(stage.provenance for stage in second.stages if stage.device == slow.device)
    assert "times 2 in prefill and 2 in decode" in text
    assert second.workload == first.workload
    assert second.predicted.tokens_per_s < first.predicted.tokens_per_s
    check_plan(second, model_shape("opt-6.7b"), "the plan")


def test_measured_lengths_are_planned_as_a_job_of_the_prompts_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = planned((1, 1))
    job = Job.of(1000, 128, 32)
    rate, passes = first.predicted.tokens_per_s, JobPasses(1, 1, 1, 1, 4, 4)
    first = replace(first, job=JobForecast(job, 9.0, rate, passes))
    asked: list[object] = []

    def find(cluster: object, shape: object, source: str, workload: object, options: Any) -> Any:
        asked.append(workload)
        return SimpleNamespace(plan=replace(planned((1, 1)), origin=None))

    lengths = Lengths((128, 64), (32, 8))
    monkeypatch.setattr("llmpq.run.replan.find_plan", find)
    second = replan_measured(first, Measured(300, lengths))
    replan_measured(first, Measured(200, None))
    assert asked == [Job(300, lengths), Job(200, job.lengths)]
    assert second.origin == first.origin


@pytest.mark.parametrize("cluster", ["", "[", "nodes: 3", "- 1", "\x00", "a: &a [*a]"])
def test_an_origin_that_is_no_cluster_is_refused(cluster: str) -> None:
    plan = planned((1, 1))
    assert plan.origin is not None
    broken = replace(plan, origin=replace(plan.origin, cluster=cluster))
    with pytest.raises(SpecError):
        replan(PlanSpec.from_json(broken.to_json()), ["node0/T4-16GB:0"])


def test_a_model_of_another_shape_is_refused() -> None:
    with pytest.raises(SpecError, match="--model"):
        replan(planned((1, 1)), ["node0/T4-16GB:0"], model="opt-13b")


@pytest.mark.parametrize(
    ("option", "field"),
    [("--hang-s=0", "hang_s"), ("--replace_s=-1", "replace_s"), ("--retries=-1", "retries")],
)
def test_settings_of_recovery_are_checked_before_anything_is_started(
    option: str, field: str, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.save(tmp_path / "plan.json")
    (tmp_path / "in.jsonl").write_text('{"prompt": [1, 2]}\n')
    places = [f"--{name}={tmp_path / file}" for name, file in FILES.items()]
    assert main([*places, option]) == 2
    assert f"error: {field} is" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "plan.json"]
