"""Plans for the policy `s3`: what predicted lengths free, and what is kept of the predictor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.assumed_predictor import LONGEST, ORACLE, PREDICTOR_FILE, AssumedPredictor
from planner.cluster.spec import ClusterSpec
from planner.explanation.planned_assignment import planned_assignment, rebuilt_costs
from planner.lengths import Lengths
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.check import check_plan
from planner.plan.spec import PlanSpec
from planner.scheduling import PolicyOptions
from planner.search.find import PricedPlan
from planner.workload import GROWING_HOLES, Job, Workload
from quant.common.errors import SpecError
from tests.planner.edits import content_of
from tests.planner.plan_alone import find_plan

OUTPUTS = (10, 40, 25, 90) * 7 + (20, 30, 15, 400)
LENGTHS = Lengths((200, 60, 300, 100) * 8, OUTPUTS, "seen", 400)
MODEL = "opt-13b"
BUCKETS = (40, 100, 400)
CONFUSION = ((20, 3, 1), (2, 6, 0), (0, 1, 1))


def planned(
    policy: str, lengths: Lengths = LENGTHS, prompts: int = 200, **options: object
) -> PricedPlan:
    cluster, shape = ClusterSpec.from_counts(["V100"], [2]), model_shape(MODEL)
    given = {"theta": 0.0, "bits": (8, 16), "relative_gap": 0.02, **options}
    chosen = PlanOptions.of({"policy": policy, **given})
    return find_plan(cluster, shape, MODEL, Job(prompts, lengths), chosen)


def folder_of_predictor(folder: Path, **changed: object) -> Path:
    values = {"kind": "boosting", "buckets": BUCKETS, "trained_rows": 90, "confusion": CONFUSION}
    (folder / PREDICTOR_FILE).write_text(json.dumps(values | changed))
    return folder


@pytest.fixture(scope="module")
def oracle() -> PricedPlan:
    return planned("s3", predictor=ORACLE)


@pytest.fixture(scope="module")
def orca() -> PricedPlan:
    return planned("orca")


def test_what_prediction_frees_becomes_requests_in_flight(
    oracle: PricedPlan, orca: PricedPlan
) -> None:
    more, fewer = oracle.plan, orca.plan
    assert more.workload.global_batch > 1.2 * fewer.workload.global_batch
    assert more.predicted.tokens_per_s > 1.2 * fewer.predicted.tokens_per_s
    assert more.policy == PolicyOptions("s3", more.policy.max_batch_size, 64)
    check_plan(more, model_shape(MODEL))
    assert more.job is not None
    mean = more.job.job.mean_held("s3")
    assert mean < 0.6 * LENGTHS.mean_reserved
    needed = more.workload.global_batch * mean / (1 - GROWING_HOLES)
    assert more.workload.n_slots == pytest.approx(needed, abs=1)


@pytest.mark.parametrize(
    "lengths",
    [
        Lengths((30,) * 9, (100, 100, 100, 900, 100, 100, 100, 100, 800), "seen", 1000),
        pytest.param(
            Lengths((120, 40, 300, 80, 20, 500), (30, 90, 10, 200, 60, 350), "seen", 800),
            marks=pytest.mark.rare,
        ),
    ],
)
def test_where_memory_is_scarce_no_oracle_is_below_orca(lengths: Lengths) -> None:
    with_oracle = planned("s3", lengths, prompts=100, predictor=ORACLE)
    without = planned("orca", lengths, prompts=100)
    faster = with_oracle.plan.predicted.tokens_per_s
    assert faster >= without.plan.predicted.tokens_per_s


def test_without_a_predictor_memory_is_that_of_orca(orca: PricedPlan) -> None:
    assert orca.plan.job is not None
    in_flight = orca.plan.workload.global_batch
    found = planned("s3-published", in_flight=in_flight).plan
    assert found.job is not None
    assert found.job.job.predictor is not None
    assert found.job.job.predictor.source == LONGEST
    assert found.workload == orca.plan.workload
    assert found.job.job.mean_held("s3-published") == pytest.approx(LENGTHS.mean_reserved)
    assert orca.plan.job.job.predictor is None


def test_the_file_has_what_was_assumed_of_the_predictor(oracle: PricedPlan) -> None:
    plan = oracle.plan
    content = content_of(plan)
    assert content["job"]["job"]["predictor"]["source"] == ORACLE
    assert PlanSpec.from_json(plan.to_json()) == plan
    for costs in (oracle.costs, rebuilt_costs(PlanSpec.from_json(plan.to_json()))):
        found = planned_assignment(plan, costs).forecast()
        assert found.seconds == pytest.approx(plan.predicted.latency_s, rel=1e-9)


def test_a_plan_from_before_predictors_is_read(orca: PricedPlan) -> None:
    content = content_of(orca.plan)
    del content["job"]["job"]["predictor"], content["origin"]["options"]["predictor"]
    assert PlanSpec.from_json(json.dumps(content)) == orca.plan


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (("workload",), {"n_slots": 5000}, r"memory.kv_cache"),
        (("policy",), {"max_batch_size": None}, r"field policy.max_batch_size: null; s3 needs"),
        (("job", "job", "predictor"), {"buckets": [3, 2]}, "buckets are"),
        (("job", "job", "predictor"), {"confusion": [[1]]}, "confusion has 1 rows"),
    ],
)
def test_an_edited_plan_is_refused(
    oracle: PricedPlan, section: tuple[str, ...], values: dict[str, object], message: str
) -> None:
    content = content_of(oracle.plan)
    part = content
    for name in section:
        part = part[name]
    part |= values
    with pytest.raises(SpecError, match=message):
        check_plan(PlanSpec.from_json(json.dumps(content)), model_shape(MODEL))


def test_a_predictors_folder_says_how_often_it_is_right(tmp_path: Path) -> None:
    folder = folder_of_predictor(tmp_path)
    plan = planned("s3", predictor=folder, in_flight=20).plan
    assert plan.job is not None
    assert plan.origin is not None
    assumed = plan.job.job.predictor
    assert assumed == AssumedPredictor(str(folder), BUCKETS, CONFUSION)
    assert assumed is not None
    assert assumed.accuracy == pytest.approx(27 / 34)
    assert plan.origin.options.predictor == str(folder)
    assert PlanSpec.from_json(plan.to_json()) == plan
    # a job that was planned before needs the folder no more
    (folder / PREDICTOR_FILE).unlink()
    cluster, shape = ClusterSpec.from_counts(["V100"], [1]), model_shape(MODEL)
    options = replace(plan.origin.options, in_flight=5)
    again = find_plan(cluster, shape, MODEL, plan.job.job, options).plan
    assert again.job is not None
    assert again.job.job.predictor == assumed


def test_a_predictor_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=str(tmp_path / PREDICTOR_FILE)):
        planned("s3", predictor=tmp_path)
    folder_of_predictor(tmp_path, confusion=CONFUSION[:2])
    with pytest.raises(SpecError, match="confusion: it must have 3 rows and columns"):
        planned("s3", predictor=tmp_path)


def test_a_predictor_where_nothing_is_predicted_is_refused() -> None:
    for policy in ({"policy": "orca"}, {"policy": "static"}, {}):
        with pytest.raises(SpecError, match=r"predictor has no effect .*policy s3"):
            PlanOptions.of({"predictor": ORACLE, **policy})
    with pytest.raises(SpecError, match="predictor has no effect with policy orca"):
        PlanOptions(policy="orca", predictor=ORACLE)
    cluster, options = ClusterSpec.from_counts(["T4"], [1]), PlanOptions(policy="s3")
    shape, batch = model_shape("opt-125m"), Workload(4, 30, 20)
    with pytest.raises(SpecError, match="predictor is oracle beside a batch of 4"):
        find_plan(cluster, shape, "opt-125m", batch, replace(options, predictor=ORACLE))
    alike = find_plan(cluster, shape, "opt-125m", batch, replace(options, theta=1.0)).plan
    assert (alike.policy.name, alike.workload) == ("s3", batch)
