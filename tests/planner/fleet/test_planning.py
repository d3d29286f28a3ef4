"""Fleets: whole, below the ceiling, not below one pipeline, refused where they cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from planner.cluster.spec import ClusterSpec
from planner.fleet.fleet_spec import FleetSpec, make_up_text, plan_devices, shown_plan
from planner.fleet.planning import FleetRequest, as_job, find_fleet
from planner.fleet.pricing import ceiling_tokens_per_s
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.check import check_plan
from planner.search.request import PlanningRequest, costs_of
from planner.workload import Job, Workload
from quant.common.errors import InfeasibleError, SpecError
from tests.planner.plan_alone import find_plan

CLUSTER = ClusterSpec.from_dict(
    {
        "name": "left over",
        "nodes": [
            *({"name": f"t{i}", "accelerators": {"T4": 4}} for i in range(2)),
            *({"name": f"v{i}", "accelerators": {"V100-32GB": 2}} for i in range(2)),
        ],
        "network": {"internode_gbit_per_s": 10},
    }
)
SHAPE = model_shape("opt-13b")
JOB = Job.of(2000, 256, 64)
OPTIONS = PlanOptions(search_time_limit=1.5, quality="fast", bits=(4, 8))


def ticking() -> Callable[[], float]:
    """A clock that goes on by 5 ms whenever it is read."""
    reads = count()
    return lambda: next(reads) * 5e-3


REQUEST = FleetRequest(CLUSTER, SHAPE, "opt-13b", JOB, OPTIONS)


@pytest.fixture(scope="module")
def fleet() -> FleetSpec:
    return find_fleet(REQUEST, ticking())


def test_each_device_is_in_one_pipeline_or_unused(fleet: FleetSpec, tmp_path: Path) -> None:
    used = [name for plan in fleet.replicas for name in plan_devices(plan)]
    assert sorted([*used, *fleet.unused_devices]) == sorted(d.name for d in CLUSTER.devices)
    for plan in fleet.replicas:
        check_plan(plan, SHAPE)
    fleet.save(tmp_path / "fleet.json")
    again = FleetSpec.from_json((tmp_path / "fleet.json").read_text())
    assert again == fleet
    assert sum(len(plans) for plans in fleet.make_ups().values()) == len(fleet.replicas)
    assert len(shown_plan(fleet).stages) == sum(len(plan.stages) for plan in fleet.replicas)


def test_fleet_is_below_the_ceiling_and_not_below_one_pipeline(fleet: FleetSpec) -> None:
    costs, _ = costs_of(PlanningRequest.of(CLUSTER, SHAPE, JOB, OPTIONS))
    ceiling = ceiling_tokens_per_s(costs, JOB, CLUSTER.devices)
    one = find_plan(CLUSTER, SHAPE, "opt-13b", JOB, OPTIONS, ticking()).plan
    assert fleet.record.ceiling_tokens_per_s == pytest.approx(ceiling)
    assert one.predicted.tokens_per_s < ceiling
    assert 0.98 * one.predicted.tokens_per_s < fleet.tokens_per_s < ceiling
    assert len(fleet.replicas) > 1


def test_number_is_kept(fleet: FleetSpec) -> None:
    two = find_fleet(replace(REQUEST, number=2), ticking())
    assert len(two.replicas) == 2
    assert two.tokens_per_s <= 1.02 * fleet.tokens_per_s


def test_device_in_two_pipelines_is_refused(fleet: FleetSpec) -> None:
    twice = replace(fleet, replicas=(fleet.replicas[0], fleet.replicas[0]))
    with pytest.raises(SpecError, match="is in 2 pipelines"):
        FleetSpec.from_json(twice.to_json())
    assert make_up_text(fleet.replicas[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"number": 13}, "has 12 devices"),
        ({"options": replace(OPTIONS, in_flight=8)}, "in_flight is of one pipeline"),
        ({"options": PlanOptions(method="uniform")}, "leave replicas out"),
        ({"options": PlanOptions(max_omega=1.0)}, "max_omega is of one pipeline"),
        ({"options": replace(OPTIONS, tensor_parallel=8)}, "so many equal devices .at most 4"),
    ],
)
def test_what_cannot_be_asked_of_a_fleet_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        find_fleet(replace(REQUEST, **changes))


def test_model_that_fits_nowhere_says_so() -> None:
    with pytest.raises(InfeasibleError, match="does not fit"):
        find_fleet(
            replace(
                REQUEST,
                cluster=ClusterSpec.from_counts(["T4"], [2]),
                shape=model_shape("bloom-176b"),
            )
        )


LARGE = replace(model_shape("bloom-176b"), layers=40, name="40 layers of bloom-176b")
T4_NODES = [{"accelerators": {"T4": 4}}] * 12
SIXTEEN_BIT = PlanOptions(search_time_limit=1.5, quality="fast", bits=(16,))


def large_request(nodes: list[dict[str, object]]) -> FleetRequest:
    """A model that no 16 devices of these nodes hold in 16 bit."""
    network = {"internode_gbit_per_s": 25}
    cluster = ClusterSpec.from_dict({"name": "large", "nodes": nodes, "network": network})
    return FleetRequest(cluster, LARGE, "m", JOB, SIXTEEN_BIT)


def test_model_that_needs_more_devices_than_most_pipelines_have_is_planned() -> None:
    request = large_request(T4_NODES)
    found = find_fleet(request, ticking())
    assert [len(plan.stages) > 16 for plan in found.replicas] == [True, True]
    with pytest.raises(InfeasibleError, match=r"replicas is 9.*at most 2 pipelines.*1 to 2"):
        find_fleet(replace(request, number=9), ticking())


def test_model_that_no_kind_holds_alone_is_planned() -> None:
    p100 = [{"accelerators": {"P100-16GB": 4}}] * 3
    found = find_fleet(large_request([*T4_NODES[:4], *p100]), ticking())
    (plan,) = found.replicas
    assert len({stage.accelerator for stage in plan.stages}) == 2


def test_every_stage_has_the_degree_that_is_asked_for() -> None:
    """A third V100 is in no group of two, and no pipeline has it as a stage."""
    cluster = ClusterSpec.from_counts(["T4", "V100-32GB"], [4, 3])
    options = replace(OPTIONS, tensor_parallel=2)
    found = find_fleet(replace(REQUEST, cluster=cluster, options=options), ticking())
    stages = [stage for plan in found.replicas for stage in plan.stages]
    assert {stage.degree for stage in stages} == {2}
    assert [name.split(":")[0] for name in found.unused_devices] == ["node1/V100-SXM2-32GB"]


def test_batch_is_a_job_of_like_prompts() -> None:
    assert as_job(Workload(32, 100, 10)) == Job.of(32, 100, 10)
