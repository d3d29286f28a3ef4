"""Plans for the policy `orca`: their memory, their forecast, and which edited ones are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from actors.schedule.orca import orca_sizes
from llmpq.run.options import RunOptions
from planner.cluster.spec import ClusterSpec
from planner.costs.stored_bytes import kv_token_bytes
from planner.explanation.planned_assignment import planned_assignment, rebuilt_costs
from planner.lengths import Lengths
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.check import check_plan
from planner.plan.simulate import simulate_plan
from planner.plan.spec import PlanSpec
from planner.schedule.orca import MixedPass
from planner.schedule.passes import OrcaSizes
from planner.scheduling import CPU_PREFILL_CHUNK_TOKENS, PREFILL_CHUNK_TOKENS, PolicyOptions
from planner.search.find import PricedPlan
from planner.simulation.simulation import sizes_of_policy
from planner.workload import HOLES, Job, Workload
from quant.common.errors import InfeasibleError, SpecError
from tests.planner.edits import content_of
from tests.planner.kinds import DELTA, FULL, three_kinds
from tests.planner.plan_alone import find_plan

LENGTHS = Lengths((200,) * 31 + (1500,), (40,) * 31 + (400,))
MODEL = "opt-13b"


def planned(policy: str, **options: object) -> PricedPlan:
    cluster = ClusterSpec.from_counts(["V100"], [2])
    given = {"quality": "fast", "bits": (8, 16), "relative_gap": 0.02, **options}
    chosen = PlanOptions.of({"policy": policy, **given})
    return find_plan(cluster, model_shape(MODEL), MODEL, Job(200, LENGTHS), chosen)


@pytest.fixture(scope="module")
def orca() -> PricedPlan:
    return planned("orca")


@pytest.fixture(scope="module")
def static() -> PricedPlan:
    return planned("static")


def test_the_same_memory_holds_more_requests(orca: PricedPlan, static: PricedPlan) -> None:
    more, fewer = orca.plan.workload, static.plan.workload
    assert more.global_batch > 2 * fewer.global_batch
    assert more.n_slots is not None
    assert fewer.n_slots is None
    # each row is there as long as its output is
    weighted = (31 * 240 * 40 + 1900 * 400) / (31 * 40 + 400)
    assert more.n_slots == pytest.approx(more.global_batch * weighted / (1 - HOLES), abs=1)
    assert orca.plan.predicted.tokens_per_s > static.plan.predicted.tokens_per_s


def test_a_stage_has_the_bytes_of_its_token_slots(orca: PricedPlan) -> None:
    plan = orca.plan
    for stage in plan.stages:
        token = kv_token_bytes(model_shape(MODEL), 16, stage.dtype)
        assert stage.memory.kv_cache == len(stage.layers) * token * plan.workload.kv_tokens
        assert stage.memory_bytes <= stage.memory_limit_bytes
    check_plan(plan, model_shape(MODEL))


def test_the_file_has_the_policy(orca: PricedPlan, static: PricedPlan) -> None:
    content = content_of(orca.plan)
    assert content["policy"]["name"] == "orca"
    assert content["policy"]["max_batch_size"] == orca.plan.policy.max_batch_size
    assert PlanSpec.from_json(orca.plan.to_json()) == orca.plan
    older = content_of(static.plan)
    del older["policy"], older["workload"]["n_slots"]
    assert PlanSpec.from_json(json.dumps(older)).policy == PolicyOptions("static")
    check_plan(static.plan, model_shape(MODEL))


def test_the_forecast_is_that_of_the_policy(orca: PricedPlan) -> None:
    plan = orca.plan
    for costs in (orca.costs, rebuilt_costs(plan)):
        found = planned_assignment(plan, costs).forecast()
        assert found.seconds == pytest.approx(plan.predicted.latency_s, rel=1e-9)
        assert found.tokens_per_s == pytest.approx(plan.job.tokens_per_s)  # type: ignore[union-attr]
    assert all(isinstance(each, MixedPass) for each in simulate_plan(plan).passes)
    assert 0.5 < max(plan.predicted.busy_share) <= 1.0


def test_emulated_devices_keep_to_the_times_of_the_forecast() -> None:
    values = {
        "name": "played",
        "nodes": [{"name": "a", "accelerators": {"T4": 2}}],
        "emulate": {"time_scale": 1.0},
    }
    options = PlanOptions(policy="orca", theta=1.0, bits=(8,), in_flight=24)
    cluster, shape = ClusterSpec.from_dict(values, "played"), model_shape("opt-1.3b")
    found = find_plan(cluster, shape, "opt-1.3b", Job(60, LENGTHS), options)
    assert all(stage.modelled is not None for stage in found.plan.stages)
    forecast = planned_assignment(found.plan, found.costs).simulate()
    by_file = simulate_plan(found.plan)
    assert len(by_file.passes) == len(forecast.passes)
    assert by_file.latency_s == pytest.approx(forecast.latency_s, rel=0.03)


@pytest.mark.parametrize("has_states", [True, False])
def test_states_bound_the_requests_under_way_as_in_a_run(has_states: bool) -> None:
    """Five requests have memory for their states, where two stages could have eight under way."""
    shape = three_kinds((DELTA if has_states else FULL, FULL, FULL, FULL))
    options = PlanOptions(policy="orca", theta=1.0, bits=(8,), in_flight=5, max_batch_size=4)
    cluster = ClusterSpec.from_counts(["T4"], [2])
    found = find_plan(cluster, shape, "mixed", Job(60, LENGTHS), options)
    slots = orca_sizes(found.plan, found.plan.policy).slots
    assert slots == (5 if has_states else 4 * len(found.plan.stages))
    sizes = sizes_of_policy(found.costs, found.plan.micro_batches)
    by_file = simulate_plan(found.plan)
    assert isinstance(sizes, OrcaSizes)
    assert sizes.slots == (slots if has_states else 0)
    assert planned_assignment(found.plan, found.costs).simulate().latency_s == pytest.approx(
        by_file.latency_s, rel=0.05
    )


def test_what_a_user_fixes_is_kept() -> None:
    plan = planned("orca", max_batch_size=3, prefill_chunk_tokens=99, in_flight=8).plan
    assert plan.policy == PolicyOptions("orca", 3, 99)
    check_plan(plan, model_shape(MODEL))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"workload": {"n_slots": 1000}}, r"n_slots is 1000; .* must be 1900 to"),
        ({"workload": {"n_slots": 4000}}, r"field stages.0.memory.kv_cache"),
        ({"policy": {"max_batch_size": None}}, r"field policy.max_batch_size: null"),
        (
            {"policy": {"name": "static", "max_batch_size": None, "prefill_chunk_tokens": 0}},
            r"field workload.n_slots: \d+, but",
        ),
        ({"policy": {"name": "static"}}, r"max_batch_size has no effect with policy static"),
        ({"policy": {"name": "fifo"}}, r"policy"),
        ({"policy": {"max_batch_size": 4000}}, r"field stages.0.memory.temporary"),
    ],
)
def test_an_edited_plan_is_refused(
    orca: PricedPlan, edit: dict[str, dict[str, object]], message: str
) -> None:
    content = content_of(orca.plan)
    for section, values in edit.items():
        content[section] |= values
    with pytest.raises(SpecError, match=message):
        check_plan(PlanSpec.from_json(json.dumps(content)), model_shape(MODEL))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([{}, {}], PREFILL_CHUNK_TOKENS),
        ([{"accelerator": "CPU"}, {"accelerator": "CPU"}], CPU_PREFILL_CHUNK_TOKENS),
        ([{"accelerator": "CPU"}, {}], PREFILL_CHUNK_TOKENS),
        ([{"accelerator": "CPU"}, {"accelerator": "CPU", "emulated": True}], PREFILL_CHUNK_TOKENS),
    ],
)
def test_parts_of_prompts_are_longer_where_all_stages_are_cpus(
    static: PricedPlan, orca: PricedPlan, changed: list[dict[str, Any]], expected: int
) -> None:
    def on(plan: PlanSpec) -> PlanSpec:
        stages = [replace(plan.stages[0], **each) for each in changed]
        return replace(plan, stages=tuple(stages))

    assert RunOptions(policy="orca").scheduling(on(static.plan)).prefill_chunk_tokens == expected
    own = orca.plan.policy.prefill_chunk_tokens
    assert RunOptions().scheduling(on(orca.plan)).prefill_chunk_tokens == own
    told = RunOptions(policy="orca", prefill_chunk_tokens=7)
    assert told.scheduling(on(static.plan)).prefill_chunk_tokens == 7


def test_a_run_takes_the_plans_policy_unless_told_another(
    orca: PricedPlan, static: PricedPlan
) -> None:
    assert RunOptions().scheduling(orca.plan) == orca.plan.policy
    assert RunOptions().scheduling(static.plan) == PolicyOptions("static")
    assert RunOptions(policy="static").scheduling(orca.plan) == PolicyOptions("static")
    assert RunOptions(max_batch_size=5).scheduling(orca.plan) == replace(
        orca.plan.policy, max_batch_size=5
    )
    assert RunOptions(policy="orca").scheduling(static.plan).max_batch_size is None
    with pytest.raises(SpecError, match="max_batch_size has no effect with policy static"):
        RunOptions(max_batch_size=5).scheduling(static.plan)
    with pytest.raises(SpecError, match="max_batch_size has no effect with policy static"):
        RunOptions(policy="static", max_batch_size=5)
    with pytest.raises(SpecError, match="has no effect with policy static"):
        PlanOptions(max_batch_size=5)


def test_token_slots_of_a_workload() -> None:
    job = Job(99, LENGTHS)
    assert job.in_flight(1, "orca").kv_tokens == 1900
    assert job.in_flight(10).equal_slots == 10
    ten = job.in_flight(10, "orca")
    assert 1900 < ten.kv_tokens < 19000
    assert ten.reservable_tokens == int((1 - HOLES) * ten.kv_tokens)
    alike = Job.of(99, 30, 5).in_flight(10, "orca")
    assert alike == Workload(10, 30, 5)
    assert alike.reservable_tokens == alike.kv_tokens == 350


def small(policy: str, lengths: Lengths, **options: object) -> PlanSpec:
    cluster = ClusterSpec.from_counts(["T4"], [1])
    chosen = PlanOptions.of({"policy": policy, "bits": (16,), "relative_gap": 0.02, **options})
    return find_plan(cluster, model_shape("opt-1.3b"), "opt-1.3b", Job(150, lengths), chosen).plan


@pytest.mark.parametrize(
    ("lengths", "faster"),
    [
        (LENGTHS, "orca"),
        (Lengths((1024, 600, 800), (4, 8, 6)), "static"),
    ],
)
def test_auto_takes_the_policy_with_the_faster_forecast(lengths: Lengths, faster: str) -> None:
    plans = {name: small(name, lengths) for name in ("static", "orca")}
    rates = {name: plan.predicted.tokens_per_s for name, plan in plans.items()}
    (other,) = plans.keys() - {faster}
    assert rates[faster] > 1.01 * rates[other]
    found = small("auto", lengths)
    assert found.policy == plans[faster].policy
    assert found.predicted.tokens_per_s == pytest.approx(rates[faster], rel=0.02)
    beside = found.beside.other_policy
    assert beside is not None
    assert beside.policy == other
    assert beside.plan.tokens_per_s == pytest.approx(rates[other], rel=0.02)
    assert found.origin is not None
    assert found.origin.options.policy == faster  # by which it is planned again


def test_each_policy_has_its_own_options_and_what_is_planned_again_all_of_the_time() -> None:
    given = {"max_batch_size": 120, "prefill_chunk_tokens": 48, "search_time_limit": 8.0}
    found = small("auto", LENGTHS, **given)
    assert found.policy == PolicyOptions("orca", 120, 48)
    assert found.origin is not None
    assert found.origin.options == PlanOptions.of(
        {"policy": "orca", "bits": (16,), "relative_gap": 0.02, **given}
    )
    with pytest.raises(InfeasibleError, match="GiB"):
        small("auto", LENGTHS, memory_margin=0.95)


def test_auto_goes_with_static_where_both_are_as_fast() -> None:
    alike = Lengths.constant(64, 16)
    found = small("auto", alike, in_flight=1)
    assert found.policy.name == "static"


@pytest.mark.parametrize(
    "options", [{"predictor": "oracle"}, {"max_request_latency_s": 5.0}], ids=str
)
def test_auto_is_refused_where_one_policy_has_to_be_chosen(options: dict[str, object]) -> None:
    with pytest.raises(SpecError, match="policy"):
        PlanOptions.of({"policy": "auto", **options})
