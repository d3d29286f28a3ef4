"""Tensor-parallel groups in the search: which groupings there are, and the best one found."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from planner.cluster.groups import grouped_cluster, ungrouped
from planner.cluster.spec import ClusterSpec
from planner.explanation.explain import explain
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.check import check_plan
from planner.plan.spec import PlanSpec
from planner.search.candidate_search import search
from planner.search.fitting import first_sets, groupings, neighbours
from planner.search.request import PlanningRequest, costs_of
from planner.workload import Workload
from quant.common.errors import DoesNotFitError, SpecError
from tests.paths import SPECS
from tests.planner.plan_alone import find_plan

SHAPE = replace(model_shape("opt-13b"), layers=4, name="four layers of opt-13b")
WORK = Workload(global_batch=4, prompt_length=128, new_tokens=16)
MIXED = ClusterSpec.from_counts(["V100", "T4"], [2, 4])
OPTIONS = PlanOptions(tensor_parallel="auto", theta=1.0, bits=(4, 8, 16), head="last")


def costs(cluster: ClusterSpec, options: PlanOptions = OPTIONS):
    return costs_of(PlanningRequest(cluster, SHAPE, WORK, options))[0]


def test_every_grouping_of_few_devices_is_tried() -> None:
    found = groupings(costs(MIXED))
    sizes = {tuple(sorted(device.degree for device in devices)) for devices in found}
    two, four = [(1, 1), (2,)], [(1, 1, 1, 1), (1, 1, 2), (2, 2), (4,)]
    assert len(found) == 8
    assert sizes == {tuple(sorted(a + b)) for a in two for b in four}
    for devices in found:
        assert {d.name for d in ungrouped(devices)} == {d.name for d in MIXED.devices}


def test_processors_are_grouped_where_a_degree_asks_for_it_alone() -> None:
    cpus = ClusterSpec.from_dict(
        {
            "name": "processors",
            "nodes": [
                {"accelerators": {"CPU": 4}, "threads": 1, "memory_gib": 8},
                {"accelerators": {"T4": 2}},
            ],
            "network": {"internode_gbit_per_s": 10},
        }
    )
    found = groupings(costs(cpus))
    assert {tuple(sorted(d.degree for d in each)) for each in found} == {(1,) * 6, (1,) * 4 + (2,)}
    for each in neighbours(costs(cpus), found[0]):
        assert all(d.degree == 1 for d in each if d.accelerator.is_cpu)
    (pairs,) = groupings(costs(cpus, replace(OPTIONS, tensor_parallel=2)))
    assert sum(d.accelerator.is_cpu for d in pairs) == 2


def test_many_devices_have_even_groupings_and_their_neighbours() -> None:
    large = ClusterSpec.from_dict(
        {
            "name": "large",
            "nodes": [{"accelerators": {"T4": 8}} for _ in range(4)],
            "network": {"internode_gbit_per_s": 10},
        }
    )
    found = groupings(costs(large))
    assert sorted(len(devices) for devices in found) == [4, 8, 16, 32]
    fours = next(devices for devices in found if len(devices) == 8)
    changed = [sorted(d.degree for d in each) for each in neighbours(costs(large), fours)]
    assert [2, 2, *[4] * 7] in changed
    assert [*[4] * 6, 8] in changed


def test_best_grouping_is_that_of_brute_force() -> None:
    """Every grouping planned for itself, with its groups as devices that stay as they are."""
    each_s = []
    for devices in groupings(costs(MIXED)):
        cluster = grouped_cluster(MIXED, tuple(device.member_names for device in devices))
        alone = replace(OPTIONS, tensor_parallel=1, keep_all_devices=True)
        each_s.append(search(costs(cluster, alone)).assignment.objective)
    plan = find_plan(MIXED, SHAPE, "m", WORK, replace(OPTIONS, keep_all_devices=True)).plan
    assert plan.solver.status == "optimal"
    assert plan.solver.objective == pytest.approx(min(each_s), rel=1e-4)
    assert len({round(each, 6) for each in each_s}) > 4


def test_auto_is_no_worse_than_any_degree_where_time_runs_out() -> None:
    """While the clock is asked 250 times not even the 15,120 orders of single devices are tried."""
    cluster = ClusterSpec.from_yaml(SPECS / "mixed_24.yaml")
    shape, work = model_shape("opt-66b"), Workload(32, 512, 100)
    found: dict[object, float] = {}
    for degree in (1, 2, 4, "auto"):
        options = PlanOptions(tensor_parallel=degree, theta=1.0, search_time_limit=1.0)
        costs, _ = costs_of(PlanningRequest(cluster, shape, work, options))
        asked = count()
        best = search(costs, lambda asked=asked: 0.004 * next(asked)).assignment
        found[degree] = best.objective
    assert best.status == "time_limit"
    assert found.pop("auto") <= min(found.values())


def test_plan_with_groups_is_written_read_checked_and_explained(tmp_path) -> None:
    found = find_plan(MIXED, SHAPE, "m", WORK, replace(OPTIONS, tensor_parallel=2))
    plan = found.plan
    assert {stage.degree for stage in plan.stages} == {2}
    plan.save(tmp_path / "plan.json")
    again = PlanSpec.load(tmp_path / "plan.json")
    assert again == plan
    check_plan(again, SHAPE)
    used = [name for stage in plan.stages for name in stage.device_names]
    assert sorted([*used, *plan.unused_devices]) == sorted(d.name for d in MIXED.devices)
    assert explain(plan, found.costs)
    wrong = replace(plan.stages[0], devices=(plan.stages[0].device, "node1/other:1"))
    with pytest.raises(SpecError, match="devices"):
        check_plan(replace(plan, stages=(wrong, *plan.stages[1:])), SHAPE)


@pytest.mark.parametrize(
    ("degree", "words"), [(8, "no node of cluster"), (3, "auto or one of"), ("all", "auto or one")]
)
def test_what_no_node_has_is_refused(degree: object, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        find_plan(MIXED, SHAPE, "m", WORK, replace(OPTIONS, tensor_parallel=degree))


def test_groups_that_do_not_fit_say_why_and_that_others_do() -> None:
    """All seven devices hold the model one by one; the three V100 are in no group of four."""
    cluster = ClusterSpec.from_counts(["T4", "V100-32GB"], [4, 3])
    shape, work = replace(model_shape("bloom-176b"), layers=64), Workload(1, 128, 16)
    with pytest.raises(DoesNotFitError, match=r"64 layers need .*one rank.*tensor_parallel auto"):
        find_plan(cluster, shape, "m", work, PlanOptions(tensor_parallel=4, theta=1.0))
    alone = costs_of(PlanningRequest(cluster, shape, work, PlanOptions(theta=1.0)))[0]
    assert list(first_sets(alone)) == [cluster.devices]


def test_devices_without_a_group_of_the_degree_stay_unused() -> None:
    three = ClusterSpec.from_counts(["T4"], [3])
    (devices,) = first_sets(costs(three, replace(OPTIONS, tensor_parallel=2)))
    assert [device.label for device in devices] == ["node0/T4-16GB:0+1"]
