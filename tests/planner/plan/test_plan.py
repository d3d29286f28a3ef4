"""Plans as JSON: the round trip, every refusal, and what a plan predicts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.costs.pass_times import PassTable
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_shape
from planner.optimiser.assignment import Assignment
from planner.options import PlanOptions
from planner.plan.builder import Solution, build_plan
from planner.plan.file import PLAN_VERSION
from planner.plan.origin import PlanOrigin
from planner.plan.spec import Baseline, PlanSpec
from planner.profiles.sensitivity import default_sensitivity
from planner.simulation.simulation import Simulated, simulate_assignment
from planner.workload import MicroBatches, Workload
from quant.common.errors import SpecError
from tests.planner.edits import Edit, change, content_of, remove
from tests.planner.problems import FOUR_BITS


@cache
def made(group: int = 1) -> tuple[PlanSpec, Simulated]:
    """OPT-1.3B (24 layers) on three of four devices; the second one holds no layer."""
    cluster = ClusterSpec.from_counts(["T4-16GB", "V100-SXM2-32GB"], [3, 1])
    shape, options = model_shape("opt-1.3b"), PlanOptions(group=group, bits=FOUR_BITS)
    costs = CostModel(
        cluster,
        shape,
        Workload(10, 64, 12),
        options,
        RooflineLatency(shape),
        default_sensitivity(shape, options.bits),
        theta=1.0,
    )
    bounds = (0, 6 // group, 6 // group, 12 // group, 24 // group)
    bitwidth = tuple([1] * (6 // group) + [3] * (18 // group))
    assignment = Assignment(bounds, bitwidth, 9.0, 8.1, "optimal", 0.5)
    workload, sizes = costs.workload, MicroBatches(3, 5)
    solution = Solution(workload, cluster.devices, sizes, assignment, 8.1, 7, 2, 1.5)
    baselines = (Baseline("uniform", 16, 3.5, 34.0, 0.0), Baseline("other", None, None, None, None))
    plan = build_plan(costs, "opt-1.3b", solution, "default", baselines)
    first_layer, bits = costs.placing.expanded(assignment)
    return plan, simulate_assignment(PassTable.of(costs, cluster.devices, first_layer, bits), sizes)


def test_json_round_trip(tmp_path: Path) -> None:
    plan, _ = made()
    path = tmp_path / "plan.json"
    plan.save(path)
    assert PlanSpec.load(path) == plan
    assert PlanSpec.from_json(plan.to_json()).to_json() == plan.to_json()
    assert json.loads(path.read_text())["version"] == PLAN_VERSION
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_empty_stages_drop_out() -> None:
    plan, _ = made()
    assert [stage.layers for stage in plan.stages] == [range(6), range(6, 12), range(12, 24)]
    assert [stage.index for stage in plan.stages] == [0, 1, 2]
    assert [set(stage.bitwidths) for stage in plan.stages] == [{4}, {16}, {16}]
    assert plan.unused_devices == ("node0/T4-16GB:1",)
    assert len(plan.predicted.busy_share) == 3


def test_groups_of_layers_make_the_same_plan() -> None:
    assert made(group=2)[0].stages == made()[0].stages
    assert made(group=3)[0].predicted == made()[0].predicted


def test_prediction_is_the_simulations() -> None:
    plan, simulated = made()
    predicted = plan.predicted
    assert predicted.latency_s == simulated.link_end_s.max()
    assert predicted.tokens_per_s == pytest.approx(10 * 12 / predicted.latency_s)
    assert predicted.prefill_s + predicted.decode_s == pytest.approx(predicted.latency_s)
    last_prefill = [row for row, each in enumerate(simulated.passes) if each.phase == "prefill"][-1]
    assert predicted.prefill_s == simulated.link_end_s[last_prefill, -1]
    spans = simulated.stage_end_s - simulated.stage_start_s
    prefill, decode = (
        sum(spans[row] for row, each in enumerate(simulated.passes) if each.phase == phase)
        for phase in ("prefill", "decode")
    )
    assert predicted.prefill_bottleneck == prefill.argmax()
    assert predicted.decode_bottleneck == decode.argmax()
    assert predicted.busy_share == pytest.approx((prefill + decode) / predicted.latency_s)


def test_objective_latency_is_the_closed_form() -> None:
    """LLM-PQ's symbols: 4 prefill and 2 decode micro-batches, 11 rounds, times of the stages."""
    plan, _ = made()
    stages = plan.stages
    prefill_max = max(max(s.prefill_s, s.prefill_comm_s) for s in stages)
    decode_max = max(max(s.decode_s, s.decode_comm_s) for s in stages)
    once = sum(s.prefill_s + s.prefill_comm_s for s in stages)
    around = sum(s.decode_s + s.decode_comm_s for s in stages)
    expected = 3 * prefill_max + once + 11 * max(2 * decode_max, around)
    assert plan.predicted.objective_latency_s == pytest.approx(expected, rel=1e-12)
    assert plan.predicted.latency_s == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("version", to=PLAN_VERSION + 1), "plan version 2.*plan again"),
        (remove("version"), "plan version None"),
        (remove("stages"), "not a plan"),
        (remove("model"), "field model: Field required"),
        (remove("predicted", "busy_share"), "field predicted.busy_share: Field required"),
        (remove("stages", 1, "device"), "field stages.1.device"),
        (change("surprise", to=1), "field surprise"),
        (change("stages", 0, "layers", to=[0]), "field stages.0.layers"),
        (change("stages", 0, "layers", to=[0, "six"]), "field stages.0.layers"),
        (change("stages", 0, "layers", to=[6, 0]), "field stages.0.layers"),
        (change("stages", 1, "index", to=2), "field stages.1.index: 2 where 1"),
        (change("micro_batches", "decode", to=0), "field micro_batches: 3 and 0"),
        (change("micro_batches", "prefill", to=11), "give 1 to 10"),
        (change("stages", 0, "prefill_s", to="fast"), "field stages.0.prefill_s"),
        (change("workload", "new_tokens", to=0), "new_tokens is 0"),
        (change("stages", 1, "layers", to=[7, 13]), "field stages.1.layers.*layer 6 should begin"),
        (change("stages", 1, "layers", to=[6, 13]), "with 6 bitwidths"),
        (change("stages", to=[]), "field stages: .*at least 1"),
        (change("stages", 0, "layers", to=["a", "b"]), "field stages.0.layers: give .first, end"),
        (change("stages", 0, "layers", to=[0, 10**30]), "field stages.0.layers: give .first, end"),
        (change("stages", 0, "index", to=7), "field stages.0.index: 7"),
        (change("stages", 0, "threads", to=0), "field stages.0.threads: .*equal to 1"),
        (change("stages", 0, "dtype", to="nope"), "field stages.0.dtype: 'nope' is not one of"),
        (change("stages", 0, "bitwidths", 2, to=7), "field stages.0.bitwidths.2: 7 is not one of"),
        (change("stages", 0, "backends", "4", to="plain"), "0.backends: 4 bit has no .*'plain'"),
        (change("stages", 0, "backends", to={"5": "plain"}), "0.backends: 5 bit has no backend"),
        (change("stages", 0, "memory", "weights", to=-5), "field stages.0.memory: .*-5"),
        (change("stages", 0, "memory_bytes", to=10**20), "field stages.0.memory_bytes"),
        (change("stages", 0, "memory_limit_bytes", to=-1), "field stages.0.memory_limit_bytes"),
        (change("stages", 0, "decode_s", to=-0.5), "field stages.0.decode_s"),
        (change("stages", 0, "decode_s", to=10**400), "field stages.0.decode_s"),
        (change("predicted", "latency_s", to=float("nan")), "field predicted.latency_s: .*finite"),
        (change("time_scale", to=float("inf")), "field time_scale: .*finite"),
        (change("time_scale", to=-1), "field time_scale"),
        (change("kv_bits", to=4), "field kv_bits: 4 is not one of 8, 16"),
        (change("micro_batches", "prefill", to=0), "field micro_batches: 0 and 5"),
        (change("micro_batches", "prefill", to=-1), "field micro_batches: -1 and 5"),
        (change("workload", "global_batch", to=10**15), "global_batch is above 1048576"),
        (change("model", "layers", to=40), "stages hold 24 of 40 layers"),
        (change("workload", "global_batch", to="8"), "global_batch: .*integer .found '8'"),
        (change("workload", "global_batch", to=True), "field workload.global_batch: .*integer"),
        (change("workload", "global_batch", to=4.0), "field workload.global_batch: .*integer"),
        (change("micro_batches", "decode", to=4.0), "field micro_batches.decode: .*integer"),
        (change("stages", 0, "memory", "weights", to="8"), "0.memory.weights: .*integer"),
        (change("stages", 0, "memory_bytes", to=True), "0.memory_bytes: .*integer"),
        (change("stages", 0, "layers", to=[False, 6]), "field stages.0.layers: give .first, end"),
        (change("stages", 0, "layers", to=[0.0, 6]), "field stages.0.layers: give .first, end"),
        (change("stages", 0, "bitwidths", 2, to="4"), "0.bitwidths.2: .*integer"),
        (change("stages", 0, "emulated", to=0), "0.emulated: .*boolean"),
        (change("stages", 0, "emulated", to="yes"), "0.emulated: .*boolean"),
        (change("stages", 0, "prefill_s", to="1"), "0.prefill_s: .*number"),
        (change("stages", 0, "prefill_s", to=True), "0.prefill_s: .*number"),
        (change("stages", 0, "prefill_s", to=1e300), "0.prefill_s: .*1000000000"),
        (change("stages", 0, "threads", to=2**40), "0.threads: .*65536"),
        (change("stages", 0, "device", to=7), "0.device: .*string"),
        (change("model", "layers", to="24"), "field model.layers: .*integer"),
        (change("origin", "options", "group", to=1.0), "origin.options.group: .*integer"),
        (change("time_scale", to=1e9), "field time_scale: .*1000"),
        (change("time_scale", to="1"), "field time_scale: .*number"),
        (
            change("stages", 1, "device", to="node0/T4-16GB:0"),
            "field stages.1.device: 'node0/T4-16GB:0' stands in stages.0.device already",
        ),
        (
            change("unused_devices", to=["node0/T4-16GB:0"]),
            "field unused_devices.0: .* stands in stages.0.device already",
        ),
        (change("unused_devices", to=["x", "x"]), "unused_devices.1: .* in unused_devices.0"),
    ],
)
def test_damaged_plans_are_refused(tmp_path: Path, damage: Edit, message: str) -> None:
    plan = made()[0]
    content = content_of(replace(plan, origin=PlanOrigin("", PlanOptions())))
    damage(content)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SpecError, match=message) as refusal:
        PlanSpec.load(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 1,\n oops', ":2: not JSON"),
        ("[1, 2]", "not a plan"),
        ('"plan"', "not a plan"),
        ("", ":1: not JSON"),
        ("[" * 100_000, "not a plan: .*nests too deeply"),
        ('{"stages": ' + "1" * 5000 + "}", "not a plan: .*5000 digits"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        PlanSpec.from_json(text, "plan.json")


@pytest.mark.parametrize("lay_out", [{"indent": 4}, {"sort_keys": True}])
def test_a_plan_that_was_only_laid_out_anew_is_read(lay_out: dict[str, Any]) -> None:
    plan = made()[0]
    content = json.loads(plan.to_json(), parse_float=lambda text: int_where_whole(text))
    assert PlanSpec.from_json(json.dumps(content, **lay_out)) == plan


def int_where_whole(text: str) -> float | int:
    """A number as tools that know no difference between the two write it."""
    return int(float(text)) if float(text).is_integer() else float(text)


def test_a_plan_that_was_edited_is_refused_until_its_digest_is_removed() -> None:
    plan = made()[0]
    text = plan.to_json().replace('"theta": 1.0', '"theta": 2.0', 1)
    with pytest.raises(SpecError, match=r'^my.json: .* was changed .* remove the line "d'):
        PlanSpec.from_json(text, "my.json")
    lines = text.splitlines()
    assert [line for line in lines if '"digest"' in line] == [lines[2]]
    edited = PlanSpec.from_json("\n".join(lines[:2] + lines[3:]))
    assert edited == replace(plan, solver=replace(plan.solver, theta=2.0))


def test_whole_numbers_may_stand_for_others() -> None:
    plan = made()[0]
    content = content_of(plan)
    content["time_scale"], content["solver"]["theta"] = 0, 1
    assert PlanSpec.from_json(json.dumps(content)) == plan


def test_unreadable_and_unwritable_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read plan"):
        PlanSpec.load(tmp_path / "missing.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot read plan"):
        PlanSpec.load(tmp_path / "bytes.json")
    with pytest.raises(SpecError, match="cannot write the plan"):
        made()[0].save(tmp_path / "nowhere" / "plan.json")


@pytest.mark.parametrize("name", ["", "x" * 300, "a\0b", "folder"])
def test_impossible_file_names_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpecError, match="cannot write the plan to"):
        made()[0].save(name)
    with pytest.raises(SpecError, match="cannot read plan"):
        PlanSpec.load(name)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]
