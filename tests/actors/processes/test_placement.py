"""Ray resources that a stage asks for, out of those that clusters offer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.processes.placement import CRUMB, check_cpus, place
from planner.cluster.described import AcceleratorEntry
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import StagePlan
from planner.search.find import find_plan
from planner.workload import Workload
from quant.common.errors import DeviceError


@pytest.fixture(scope="module")
def stages() -> tuple[StagePlan, ...]:
    """OPT-13b over two T4 and a V100-32GB."""
    cluster = ClusterSpec.from_counts(["T4", "V100-32GB"], [2, 1])
    workload = Workload(4, 64, 16)
    plan = find_plan(
        cluster,
        model_shape("opt-13b"),
        "opt-13b",
        workload,
        PlanOptions(bits=(8,), keep_all_devices=True),
    ).plan
    return plan.stages


def kinds(stages: tuple[StagePlan, ...]) -> list[str]:
    return [stage.accelerator for stage in stages]


def test_accelerator_types_of_ray_come_first(stages: tuple[StagePlan, ...]) -> None:
    offered = {"CPU": 8.0, "GPU": 3.0, "accelerator_type:T4": 1.0, "accelerator_type:V100": 1.0}
    placements = place(stages, offered)
    for kind, placement in zip(kinds(stages), placements, strict=True):
        name = "accelerator_type:T4" if kind == "T4-16GB" else "accelerator_type:V100"
        assert placement.bundle == {"GPU": 1.0, name: CRUMB}


def test_custom_resources_by_name_or_alias(stages: tuple[StagePlan, ...]) -> None:
    offered = {"CPU": 8.0, "GPU": 3.0, "T4": 2.0, "V100-SXM2-32GB": 1.0}
    asked = [dict(p.resources) for p in place(stages, offered)]
    expected = [{"T4": 1.0} if k == "T4-16GB" else {"V100-SXM2-32GB": 1.0} for k in kinds(stages)]
    assert asked == expected


def test_a_resource_that_names_the_very_gpu_wins(stages: tuple[StagePlan, ...]) -> None:
    """Ray's own type is the same for a V100 of 16 GB and of 32."""
    offered = {"GPU": 4.0, "T4": 2.0, "accelerator_type:V100": 1.0, "V100-SXM2-32GB": 1.0}
    for kind, placement in zip(kinds(stages), place(stages, offered), strict=True):
        name = "T4" if kind == "T4-16GB" else "V100-SXM2-32GB"
        assert placement.bundle == {"GPU": 1.0, name: 1.0}


def test_too_few_devices_of_a_kind(stages: tuple[StagePlan, ...]) -> None:
    with pytest.raises(DeviceError, match=r"needs 2 of Ray resource 'T4'.*offers 1"):
        place(stages, {"GPU": 3.0, "T4": 1.0, "V100-32GB": 1.0})
    with pytest.raises(DeviceError, match=r"needs 3 of Ray resource 'GPU'.*offers 2"):
        place(stages, {"GPU": 2.0, "T4": 2.0, "V100-32GB": 1.0})


def test_emulated_devices_use_named_nodes_where_there_are_any(
    stages: tuple[StagePlan, ...],
) -> None:
    emulated = tuple(replace(stage, emulated=True) for stage in stages)
    plain = place(emulated, {"CPU": 2.0})
    assert all(p.bundle == {} for p in plain)
    named = place(emulated, {"CPU": 2.0, "T4": 2.0})
    assert [p.bundle for p in named] == [
        {"T4": 1.0} if k == "T4-16GB" else {} for k in kinds(stages)
    ]


def test_cpu_stages_reserve_their_threads(stages: tuple[StagePlan, ...]) -> None:
    host = replace(stages[0], accelerator="CPU", threads=2)
    assert place([host], {"CPU": 4.0})[0].bundle == {"CPU": 2.0}
    with pytest.raises(DeviceError, match="needs 2 CPUs for 1 stage, but the Ray cluster has 1;"):
        place([host], {"CPU": 1.0})
    emulated = replace(host, emulated=True)
    check_cpus([host, emulated], 2, "this machine")
    group = replace(host, devices=("a", "b"))
    with pytest.raises(DeviceError, match="needs 6 CPUs for 2 stages, but this machine has 4;"):
        check_cpus([group, host, emulated], 4, "this machine")


def test_a_described_accelerator_is_placed_by_a_resource_of_its_name(
    stages: tuple[StagePlan, ...],
) -> None:
    figures = AcceleratorEntry(like="T4", memory_gib=20, ray_type=None)
    mine = replace(stages[0], accelerator="My-Card", described=figures, custom_resource=None)
    assert place([mine], {"GPU": 1.0, "My-Card": 1.0})[0].bundle == {"GPU": 1.0, "My-Card": 1.0}
    assert place([mine], {"GPU": 1.0, "accelerator_type:T4": 1.0})[0].num_gpus == 1.0
    with pytest.raises(DeviceError, match=r"needs a My-Card.*--resources='\{\"My-Card\": 1\}'"):
        place([mine], {"GPU": 1.0})


def test_the_ranks_of_a_stage_share_a_bundle_which_is_on_one_node(
    stages: tuple[StagePlan, ...],
) -> None:
    t4 = next(stage for stage in stages if stage.accelerator == "T4-16GB")
    group = replace(t4, devices=("a/T4-16GB:0", "a/T4-16GB:1"))
    offered = {"CPU": 4.0, "GPU": 3.0, "accelerator_type:T4": 1.0}
    (placement,) = place([group], offered)
    assert placement.bundle == {"GPU": 2.0, "accelerator_type:T4": 2 * CRUMB}
    assert (placement.num_gpus, dict(placement.resources)) == (1.0, {"accelerator_type:T4": CRUMB})
    with pytest.raises(DeviceError, match=r"needs 2 of Ray resource 'GPU'.*offers 1"):
        place([group], offered | {"GPU": 1.0})
    host = replace(group, accelerator="CPU", threads=2)
    assert place([host], offered)[0].bundle == {"CPU": 4.0}
    emulated = replace(group, emulated=True)
    assert place([emulated], {"CPU": 1.0})[0].bundle == {}
    assert place([emulated], {"CPU": 1.0, "T4": 2.0})[0].bundle == {"T4": 2.0}
