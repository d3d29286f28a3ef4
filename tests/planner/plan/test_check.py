"""What a plan derives from the rest of it is computed again: the planner's own plans agree, and
edited ones are refused by field, both numbers and the remedy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmpq.run.replan import replan
from planner.cluster.spec import ClusterSpec
from planner.lengths import Lengths
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.options import PlanOptions
from planner.plan.check import check_plan
from planner.plan.spec import PlanSpec
from planner.search.find import find_plan
from planner.workload import Job, Workload
from quant.checkpoint.stored_config import StoredConfig
from quant.common.errors import SpecError
from tests.paths import SPECS
from tests.planner import plan_alone
from tests.planner.edits import change, content_of

QUICK = {"theta": 0.0, "relative_gap": 0.05, "search_time_limit": 5.0}
"""Any plan will do."""

MIXED = {
    "name": "mixed",
    "nodes": [
        {"name": "a", "accelerators": {"T4": 2, "V100-32GB": 1}, "usable_memory_gib": {"T4": 0.9}},
        {"name": "b", "accelerators": {"CPU": 1}, "memory_gib": 2, "threads": 3},
    ],
    "network": {"internode_gbit_per_s": 25},
}
SMALL = Workload(8, 64, 16)
EMULATE = {"emulate": {"time_scale": 0.1}}
STAND_IN = {"emulate": {"time_scale": 0, "stand_in": "small"}}


def planned(
    cluster: ClusterSpec, model: str | ModelShape, workload: Workload, **options: object
) -> tuple[PlanSpec, ModelShape]:
    shape = model_shape(model) if isinstance(model, str) else model
    quick = {} if "method" in options else QUICK  # the baselines decide without a gap
    chosen = PlanOptions.of({**quick, "theta": 1.0, **options})
    return plan_alone.find_plan(cluster, shape, shape.name, workload, chosen).plan, shape


def assert_agrees(plan: PlanSpec, shape: ModelShape) -> None:
    """As it was made, and as it is read back."""
    check_plan(plan, shape)
    again = PlanSpec.from_json(plan.to_json())
    assert again == plan
    check_plan(again, shape)
    check_plan(again, None)


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({}, {}),
        ({}, {"memory_margin": 0.0, "bits": [16], "head": "first", "keep_all_devices": True}),
        ({}, {"kv_bits": 8, "dtype": "float32", "prefill_micro_batch": 2}),
        ({}, {"kv_bits": "auto", "bits": [4], "rounding": "nearest", "head": "first"}),
        ({}, {"method": "uniform"}),
        ({}, {"method": "pipeedge", "bits": [8, 16]}),
        ({}, {"objective": "paper", "head": "last", "group": 2}),
        (EMULATE, {"keep_all_devices": True}),
        (STAND_IN, {"keep_all_devices": True, "memory_margin": 0.1}),
    ],
)
@pytest.mark.parametrize("model", ["opt-125m", pytest.param("bloom-560m", marks=pytest.mark.rare)])
def test_the_planners_own_plans_agree(
    model: str, more: Mapping[str, object], options: Mapping[str, object]
) -> None:
    assert_agrees(*planned(ClusterSpec.from_dict({**MIXED, **more}), model, SMALL, **options))


@pytest.mark.parametrize("number", [1, 3, 9])
def test_plans_for_the_papers_clusters_agree(number: int) -> None:
    models = {1: "opt-13b", 3: "opt-30b", 9: "opt-30b"}
    cluster = ClusterSpec.from_yaml(SPECS / f"paper_{number:02}.yaml")
    assert_agrees(*planned(cluster, models[number], Workload(32, 512, 100), **QUICK))


def test_a_plan_of_stored_bits_agrees() -> None:
    """So does one for the 16-bit original of what is stored."""
    original = model_shape("opt-125m")
    stored = StoredConfig(4, 128, desc_act=False, zero_offset=1)
    shape = replace(original, stored=stored)
    assert_agrees(planned(ClusterSpec.from_dict(MIXED), shape, SMALL)[0], shape)
    plan, _ = planned(ClusterSpec.from_dict(MIXED), original, SMALL, bits=[4])
    assert_agrees(plan, shape)
    kinds = tuple(replace(original, stored=replace(stored, bits=bits)) for bits in (4, 8))
    assert_agrees(plan, replace(shape, kinds=kinds, pattern=(0, 1) * 6))


def test_a_plan_made_again_agrees() -> None:
    plan, shape = made()
    second = replan(plan, [plan.stages[0].device])
    assert_agrees(second, shape)


def test_a_plan_of_profiles_agrees(tmp_path: Path) -> None:
    path = tmp_path / "t4.csv"
    path.write_text(
        "device,model,h1,h2,prompt_length,context_length,phase,bits,batch_size,ms_per_layer\n"
        "T4,opt-125m,768,3072,64,0,prefill,16,2,1.5\nT4,opt-125m,768,3072,1,70,decode,16,2,0.5\n"
    )
    assert_agrees(*planned(ClusterSpec.from_dict(MIXED), "opt-125m", SMALL, profiles=str(path)))


@cache
def made() -> tuple[PlanSpec, ModelShape]:
    """Emulated T4s and V100 beside a CPU."""
    cluster = ClusterSpec.from_dict({**MIXED, **EMULATE})
    plan, shape = planned(cluster, "opt-125m", SMALL, bits=[4, 16], keep_all_devices=True)
    assert len(plan.stages) > 1
    return plan, shape


Change = tuple[tuple[str | int, ...], Any]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [(("workload", "global_batch"), 2**20), (("micro_batches", "prefill"), 2**20)],
            r"stages\.0\.memory\.kv_cache: \d+ where workload.* make it \d{9,}.*plan again",
        ),
        ([(("workload", "prompt_length"), 65)], r"stages\.0\.memory\.kv_cache: "),
        ([(("stages", 0, "memory", "weights"), 8)], r"stages\.0\.memory\.weights: 8 where .*\d{6}"),
        ([(("stages", 0, "memory", "runtime"), 8)], r"stages\.0\.memory\.runtime: 8 where"),
        ([(("stages", 0, "memory_bytes"), 8)], r"stages\.0\.memory_bytes: 8 where its parts"),
        ([(("stages", 0, "memory_limit_bytes"), 2**50)], r"stages\.0\.memory_limit_bytes: 1125"),
        ([(("stages", 0, "custom_resource"), "moon")], r"custom_resource: 'moon' where.*or null"),
        ([(("stages", 0, "accelerator"), "T5")], r"stages\.0: unknown accelerator 'T5'"),
        ([(("stages", 0, "device"), "a/T4-16GB:7")], "stages and unused_devices: "),
        ([(("stages", 0, "node"), "b")], r"stages\.0\.device: "),
        ([(("stages", 0, "emulated"), False)], r"stages\.0: .* has no bfloat16 arithmetic"),
        ([(("kv_bits",), 8)], r"stages\.0\.memory\.\w+: "),
        ([(("head_on_first",), True)], r"stages\.\d\.memory\.(final|temporary): "),
        ([(("stand_in",), "x")], r"stages\.\d: .* has no bfloat16 arithmetic"),
        ([(("origin", "cluster"), "name: [")], "origin: the plan's origin.cluster is not valid"),
        ([(("origin", "cluster"), "- 1")], "origin: the plan's origin.cluster is no mapping"),
    ],
)
def test_edited_figures_are_refused(changes: list[Change], message: str) -> None:
    plan, shape = made()
    content = content_of(plan)
    for path, to in changes:
        change(*path, to=to)(content)
    edited = PlanSpec.from_json(json.dumps(content), "edited.json")
    with pytest.raises(SpecError, match=message) as refusal:
        check_plan(edited, shape, "edited.json")
    assert str(refusal.value).startswith("edited.json: field ")
    assert len(str(refusal.value)) < 2000


def test_bits_of_a_stage_decide_its_bytes() -> None:
    """A layer that is said to have other bits than its bytes."""
    plan, shape = made()
    stage = plan.stages[0]
    other = tuple({4: 16, 16: 4}[bits] for bits in stage.bitwidths)
    stages = (replace(stage, bitwidths=other), *plan.stages[1:])
    with pytest.raises(SpecError, match=r"stages\.0\.(backends|memory\.weights)"):
        check_plan(replace(plan, stages=stages), shape)


def test_a_plan_with_a_kernel_of_earlier_versions_is_read_and_made_again() -> None:
    plan, shape = planned(ClusterSpec.from_counts(["T4"], [1]), "opt-125m", SMALL, bits=[8])
    assert plan.stages[0].backends == {8: "cuda_w8a8"}
    old = replace(plan, stages=(replace(plan.stages[0], backends={8: "bnb_int8"}),))
    assert PlanSpec.from_json(old.to_json()) == old
    with pytest.raises(SpecError, match=r"bnb_int8.*cuda_w8a8.*plan again with llmpq plan"):
        check_plan(old, shape)


def test_bytes_of_wider_groups_of_earlier_versions_are_refused() -> None:
    """Plans from before groups of 32, whose weights had a quarter of a bit less."""
    plan, shape = planned(ClusterSpec.from_dict(ONE_CPU), "opt-125m", SMALL, bits=[4])
    stage, linears = plan.stages[0], shape.layers * shape.layer_linear_parameters
    weights = stage.memory.weights - linears // 32
    memory = replace(stage.memory, weights=weights)
    before = replace(stage, memory=memory, memory_bytes=memory.total)
    old = PlanSpec.from_json(replace(plan, stages=(before,)).to_json())
    message = rf"memory\.weights: {weights} where .* make it {stage.memory.weights}; .*version of "
    with pytest.raises(SpecError, match=message + "llmpq: plan again with llmpq plan"):
        check_plan(old, shape)


ONE_CPU = {"name": "one", "nodes": [{"name": "a", "accelerators": {"CPU": 1}, "memory_gib": 4}]}


def test_what_does_not_fit_is_refused() -> None:
    plan, shape = made()
    stage = plan.stages[0]
    lower = replace(
        stage,
        memory_limit_bytes=stage.memory_bytes - 1,
        memory_margin_bytes=stage.memory_limit_bytes
        + stage.memory_margin_bytes
        - stage.memory_bytes
        + 1,
    )
    with pytest.raises(SpecError, match=r"stages\.0\.memory_bytes: \d+ where .* offers \d+"):
        check_plan(replace(plan, stages=(lower, *plan.stages[1:])), shape)


def test_a_plan_of_before_margins_is_taken() -> None:
    """Its limit is the device's memory, and its options say nothing of a margin."""
    cluster = ClusterSpec.from_dict(MIXED)
    plan, shape = planned(cluster, "opt-125m", SMALL, memory_margin=0.0)
    content = content_of(plan)
    for stage in content["stages"]:
        assert stage.pop("memory_margin_bytes") == 0
    for name in ("memory_margin", "strict_profiles"):
        del content["origin"]["options"][name]
    check_plan(PlanSpec.from_json(json.dumps(content)), shape)


@cache
def made_for_a_job() -> tuple[PlanSpec, ModelShape]:
    """A plan whose slots are shorter than the longest prompt and output together."""
    shape, job = (
        model_shape("opt-125m"),
        Job(30, Lengths((64, 20, 40), (4, 16, 8), longest_total=68)),
    )
    plan = find_plan(
        ClusterSpec.from_dict(MIXED), shape, shape.name, job, PlanOptions.of(QUICK)
    ).plan
    return plan, shape


def test_plans_of_jobs_agree() -> None:
    plan, shape = made_for_a_job()
    assert plan.workload.slot_tokens == 68
    assert_agrees(plan, shape)
