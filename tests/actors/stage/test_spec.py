"""What the actor of a stage is told: the parts of a plan, also of a stage of several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.stage.spec import emulated_times, stage_spec, stand_in_spec
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.modelled_times import ModelledTimes
from planner.plan.spec import PlanSpec
from planner.search.find import find_plan
from planner.workload import Workload
from tests.actors.configs import CONFIGS
from tests.actors.models import save_tiny


@pytest.fixture(scope="module")
def plan() -> PlanSpec:
    """OPT-13b over a group of two T4."""
    cluster = ClusterSpec.from_counts(["T4"], [2])
    options = PlanOptions(bits=(8,), tensor_parallel=2)
    return find_plan(cluster, model_shape("opt-13b"), "opt-13b", Workload(4, 64, 16), options).plan


def test_a_group_has_the_limit_of_each_of_its_ranks(plan: PlanSpec) -> None:
    (stage,) = plan.stages
    spec = stage_spec(plan, stage)
    assert (spec.rank, spec.degree) == (0, 2)
    assert spec.memory_limit_bytes == stage.memory_limit_bytes
    assert spec.device_name.endswith("T4-16GB:0+1")
    assert replace(spec, rank=1).name == "rank 1 of stage 0"
    assert replace(spec, degree=1).name == "stage 0"


def test_emulated_ranks_compute_as_one(plan: PlanSpec, tmp_path: Path) -> None:
    """Their modelled times are those of the group, their limits together those of the process."""
    (stage,) = plan.stages
    emulated = replace(stage, emulated=True)
    plan = replace(plan, stages=(emulated,), time_scale=1.0)
    spec = stage_spec(plan, emulated)
    assert (spec.rank, spec.degree) == (0, 1)
    assert spec.memory_limit_bytes == 2 * stage.memory_limit_bytes
    times = emulated_times(plan, emulated)
    assert times is not None
    assert times.times == ModelledTimes.constant(stage.prefill_s, stage.decode_s)
    save_tiny(tmp_path, CONFIGS["llama"])
    assert stand_in_spec(spec, model_shape(str(tmp_path))).degree == 1
