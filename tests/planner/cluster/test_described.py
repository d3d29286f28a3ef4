"""Accelerators that a cluster file describes: read, refused, written, planned for and kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from planner.cluster.accelerators import find_accelerator, registry
from planner.cluster.described import described_accelerator, entry_of
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.check import check_plan
from planner.plan.spec import PlanSpec
from planner.workload import Workload
from quant.common.errors import SpecError
from quant.common.units import GIB
from tests.planner.edits import content_of
from tests.planner.plan_alone import find_plan

MINE = "My-3080-20GB"
FILE = f"""\
name: lab
accelerators:
  {MINE}:
    memory_gib: 20
    usable_memory_gib: 19.2
    memory_gbyte_per_s: 760
    fp32_tflops: 29.8
    fp16_tflops: 59.5
    int8_tops: 238
    compute_capability: 8.6
  Lab-4090: {{like: RTX4090, memory_gib: 48}}
nodes:
  - {{name: a, accelerators: {{{MINE}: 2}}, price_per_hour: 1}}
  - {{name: b, accelerators: {{lab_4090: 1}}, price_per_hour: 1}}
network: {{internode_gbit_per_s: 25}}
"""


def cluster_of(tmp_path: Path, text: str = FILE) -> ClusterSpec:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return ClusterSpec.from_yaml(path)


def planned(cluster: ClusterSpec, model: str = "opt-13b", **options: object) -> PlanSpec:
    shape = model_shape(model)
    workload = Workload(8, 128, 32)
    chosen = PlanOptions.of({"theta": 0.0, **options})
    return find_plan(cluster, shape, shape.name, workload, chosen).plan


def test_figures_are_those_stated_or_follow_from_the_capability(tmp_path: Path) -> None:
    mine, _, lab = (device.accelerator for device in cluster_of(tmp_path).devices)
    assert (mine.nominal_memory_bytes, mine.usable_memory_bytes) == (20 * GIB, round(19.2 * GIB))
    assert (mine.memory_bytes_per_s, mine.fp16_flops, mine.int8_ops) == (760e9, 59.5e12, 238e12)
    assert (mine.compute_capability, mine.bf16, mine.is_cpu) == ((8, 6), True, False)
    assert mine.link_bytes_per_s == mine.host_link_bytes_per_s == 32e9
    original = find_accelerator("RTX4090")
    assert lab.usable_memory_bytes / lab.nominal_memory_bytes == pytest.approx(0.985)
    assert lab.is_reported_as("NVIDIA GeForce RTX 4090")
    same = replace(
        lab,
        name=original.name,
        aliases=original.aliases,
        nominal_memory_bytes=original.nominal_memory_bytes,
        usable_memory_bytes=original.usable_memory_bytes,
        reported_as=(),
    )
    assert same == original


def test_a_device_may_be_like_one_described_above_and_of_amd(tmp_path: Path) -> None:
    text = FILE.replace(
        "nodes:", f"  Second: {{like: {MINE}, int8_tops: 100}}\n"
        "  Mi100: {like: MI250, rocm_architecture: gfx908, ray_type: AMD-Instinct-MI100}\nnodes:",
    )  # fmt: skip
    second, amd = cluster_of(tmp_path, text).described[2:]
    assert (second.int8_ops, second.memory_bytes_per_s) == (100e12, 760e9)
    assert (amd.compute_capability, amd.rocm_architecture) == (None, "gfx908")


def test_written_files_read_back_equal(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path)
    again = ClusterSpec.from_dict(yaml.safe_load(cluster.to_yaml()))
    assert again == cluster
    assert again.described == cluster.described
    assert again.fingerprint() == cluster.fingerprint()


def test_every_registered_accelerator_can_be_described_in_full() -> None:
    for each in registry():
        if not each.is_cpu:
            entry = entry_of(each)
            back = described_accelerator("Another", entry)
            assert replace(back, name=each.name, aliases=each.aliases) == each


def test_the_figures_are_part_of_the_fingerprint_and_names_of_drivers_are_not(
    tmp_path: Path,
) -> None:
    before = cluster_of(tmp_path).fingerprint()
    assert cluster_of(tmp_path, FILE.replace("760", "761")).fingerprint() != before
    said = FILE.replace("    int8_tops: 238\n", "    int8_tops: 238\n    reported_as: [RTX 3080]\n")
    assert cluster_of(tmp_path, said).fingerprint() == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    memory_gib: 20\n", "", f":3: accelerators.{MINE}.memory_gib: missing; state it"),
        ("memory_gbyte_per_s: 760", "memory_gbyte_per_s: 0", ":6: .*memory_gbyte_per_s: .*found 0"),
        ("memory_gbyte_per_s", "memory_gbytes_per_s", ":6: .*did you mean 'memory_gbyte_per_s'?"),
        ("    compute_capability: 8.6\n", "", r":3: .*rocm_architecture of an AMD GPU \(gfx942\)"),
        ("8.6", "sm_86", ":10: .*compute_capability: .*found 'sm_86'"),
        ("8.6", "5.2", ":10: .*compute_capability: llmpq runs .* from compute capability 6.0 on"),
        ("19.2", "21", ":5: .*usable_memory_gib: 21 GiB is more than memory_gib, which is 20"),
        ("like: RTX4090", "like: RTX4070", ":11: .*like: unknown accelerator 'RTX4070'; nearest"),
        ("like: RTX4090", "like: CPU", ":11: .*describe GPUs"),
        ("Lab-4090:", "T4:", r":11: .*T4-16GB is built in.*`like: T4-16GB`"),
        ("Lab-4090:", "my_3080_20gb:", f":11: .*{MINE} is described above"),
        ("Lab-4090:", "GPU:", ":11: .*Ray has a resource of this name"),
        ("Lab-4090:", "a/b:", ":11: .*a name has 1 to 64 letters"),
        ("lab_4090: 1", "Lab-4080: 1", ":14: .*'Lab-4080'; nearest known: Lab-4090"),
        ("fp16_tflops: 59.5", "fp16_tflops: fast", ":8: .*fp16_tflops: .*found 'fast'"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named_with_its_line(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    assert old in FILE
    with pytest.raises(SpecError, match=message):
        cluster_of(tmp_path, FILE.replace(old, new, 1))


def test_a_plan_has_what_it_needs_without_the_cluster_file(tmp_path: Path) -> None:
    plan = planned(cluster_of(tmp_path), "opt-30b", bits=(16,))
    back = PlanSpec.from_json(plan.to_json())
    assert back == plan
    check_plan(back, model_shape("opt-30b"))
    mine = next(stage for stage in back.stages if stage.accelerator == MINE)
    assert mine.kind == cluster_of(tmp_path).devices[0].accelerator
    assert mine.custom_resource == MINE
    assert {stage.accelerator for stage in back.stages} <= {MINE, "Lab-4090"}
    alone = replace(back, origin=None)
    check_plan(alone, model_shape("opt-30b"))
    assert back.origin is not None
    left = back.origin.without([f"a/{MINE}:1"]).cluster_spec()
    again = find_plan(
        left, model_shape("opt-30b"), "opt-30b", plan.workload, back.origin.options
    ).plan
    assert {stage.kind for stage in again.stages} <= {each.kind for each in back.stages}


def test_figures_that_were_changed_in_a_plan_are_refused(tmp_path: Path) -> None:
    plan = planned(cluster_of(tmp_path), "opt-30b", bits=(16,))
    text = plan.to_json().replace('"memory_gbyte_per_s": 760.0', '"memory_gbyte_per_s": 761.0', 1)
    with pytest.raises(SpecError, match="the plan was changed"):
        PlanSpec.from_json(text)
    content = content_of(plan)
    described = next(stage["described"] for stage in content["stages"] if stage["described"])
    described["memory_gib"] = -1
    with pytest.raises(SpecError, match=r"described\.memory_gib"):
        PlanSpec.from_json(json.dumps(content))


def test_estimates_are_those_of_the_figures(tmp_path: Path) -> None:
    """The same figures under another name plan alike, and more bandwidth decodes faster."""
    shape = "{like: T4}"
    text = f"name: one\naccelerators: {{Same: {shape}}}\nnodes: [{{accelerators: {{Same: 4}}}}]\n"
    same = planned(cluster_of(tmp_path, text))
    real = planned(cluster_of(tmp_path, "name: one\nnodes: [{accelerators: {T4: 4}}]\n"))
    assert same.predicted == real.predicted
    assert [stage.bitwidths for stage in same.stages] == [s.bitwidths for s in real.stages]
    faster = planned(cluster_of(tmp_path, text.replace("T4}", "T4, memory_gbyte_per_s: 640}")))
    assert faster.predicted.decode_s < same.predicted.decode_s


def test_profiles_may_name_described_accelerators(tmp_path: Path) -> None:
    header = "device,model,h1,h2,prompt_length,context_length,phase,bits,batch_size,ms_per_layer\n"
    sizes = f"{MINE},opt-13b,5120,20480"
    rows = f"{sizes},128,0,prefill,16,8,5.0\n{sizes},1,128,decode,16,8,0.9\n"
    profile = tmp_path / "times.csv"
    profile.write_text(header + rows)
    plan = planned(cluster_of(tmp_path), profiles=str(profile), bits=(16,))
    measured = [stage for stage in plan.stages if stage.accelerator == MINE]
    assert measured
    assert all("times.csv" in stage.provenance for stage in measured)
    profile.write_text(header + rows.replace(MINE, "My-3081"))
    with pytest.raises(SpecError, match=f"unknown accelerator 'My-3081'; nearest known: {MINE}"):
        planned(cluster_of(tmp_path), profiles=str(profile), bits=(16,))
