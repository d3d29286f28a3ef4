"""One limit for all the searches that a plan needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.latency_bound.bounded_plan import find_bounded_plan
from planner.latency_bound.schedules import BoundRequest
from planner.lengths import LengthDistribution, RequestLengths
from planner.model.finding import model_shape
from planner.optimiser.boxes.kind_options import Makeup
from planner.optimiser.boxes.stage_options import StageOptions
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.relaxation import LinearModel
from planner.optimiser.transfer import TransferSteps
from planner.options import PlanOptions
from planner.plan import builder
from planner.plan.spec import PlanSpec
from planner.profiles.sensitivity import default_sensitivity
from planner.scheduling import ScheduleKind
from planner.search import baselines
from planner.search.candidate_search import LEAST_SOLVE_S, CandidateSearch, SearchTime
from planner.search.find import find_plan
from planner.search.pareto import within_bounds
from planner.search.qualities import chosen_by_quality
from planner.search.request import cost_model
from planner.workload import Job, Workload
from tests.planner.kinds import DELTA, EXPERT, FULL, three_kinds

LIMIT_S = 8.0


def costs_of() -> CostModel:
    """A few layers of OPT-125M on two devices that cannot hold all of them in 16 bit."""
    shape = replace(model_shape("opt-125m"), layers=4)
    cluster = ClusterSpec.from_counts(["T4", "V100-32GB"], [1, 1])
    devices = tuple(replace(d, memory_bytes=round(0.74 * 2**30)) for d in cluster.devices)
    options = PlanOptions(bits=(4, 16), search_time_limit=LIMIT_S)
    omega = default_sensitivity(shape, options.bits)
    job = Job.of(6, 128, 16)
    cluster = replace(cluster, devices=devices)
    return replace(cost_model(cluster, shape, job.in_flight(1), options, omega), job=job)


def test_each_search_gets_half_of_what_is_left() -> None:
    now_s = iter([100.0, 100.0, 104.0, 107.0, 109.0])
    time = SearchTime(LIMIT_S, lambda: next(now_s))
    assert [time.next_s() for _ in range(4)] == [4.0, 2.0, 0.5, LEAST_SOLVE_S]


@pytest.mark.parametrize("bounds", [{}, {"max_omega": 0.5}])
def test_the_searches_for_one_plan_share_the_limit(
    bounds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s: list[float] = []
    made = CandidateSearch.__init__

    def recorded(self: CandidateSearch, options: PlanOptions, *others: object) -> None:
        limits_s.append(options.search_time_limit)
        made(self, options, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(CandidateSearch, "__init__", recorded)
    costs, ticks = costs_of(), count()
    costs = replace(costs, options=replace(costs.options, **bounds))

    def clock() -> float:
        return 0.01 * next(ticks)

    if bounds:
        within_bounds(costs, clock)
    else:
        chosen_by_quality(costs, "balanced", clock)
    assert len(limits_s) > 1
    assert max(limits_s) <= LIMIT_S / 2
    assert limits_s == sorted(limits_s, reverse=True), "what is left only falls"


@pytest.mark.parametrize(
    ("work", "theta"),
    [(Workload(64, 128, 16), None), (Workload(64, 128, 16), 0.0), (Job.of(64, 128, 16), None)],
)
def test_a_plan_and_what_is_said_beside_it_keep_the_limit(
    work: Workload | Job, theta: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every search takes all the time that it is given, and nothing else takes any."""
    limits_s: list[float] = []
    made = CandidateSearch.__init__

    def made_slow(self: CandidateSearch, options: PlanOptions, *others: object) -> None:
        made(self, options, *others)  # type: ignore[arg-type]
        limits_s.append(options.search_time_limit)

    monkeypatch.setattr(CandidateSearch, "__init__", made_slow)
    costs = costs_of()
    options = replace(costs.options, theta=theta)
    find_plan(costs.cluster, costs.shape, "m", work, options, lambda: sum(limits_s))
    assert len(limits_s) > 1
    assert sum(limits_s) <= LIMIT_S + len(limits_s) * LEAST_SOLVE_S


SHAPE = three_kinds((EXPERT, DELTA, FULL, EXPERT, DELTA, DELTA, FULL, EXPERT))
HOSTS = ClusterSpec.from_dict(
    {
        "name": "hosts",
        "nodes": [
            {"name": "a", "accelerators": {"T4": 4}, "host_memory_gib": 32, "host_threads": 12},
            {"name": "b", "accelerators": {"V100-32GB": 2}},
        ],
        "network": {"internode_gbit_per_s": 10},
    }
)
BATCH, JOB = Workload(64, 128, 16), Job.of(500, 128, 16)
LENGTHS = RequestLengths(LengthDistribution((128,), (1.0,)), LengthDistribution((16,), (1.0,)))
ONE_PLAN_S = 4.0
"""The seconds below of all that must be done once time is up, so that there is a plan."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """A clock that goes on by what is computed alone, some of it far slower than it is."""
    passed_s = [0.0]

    def slow(owner: Any, name: str, seconds: float) -> None:
        compute = getattr(owner, name)

        def computed(*args: Any, **named: Any) -> Any:
            passed_s[0] += seconds
            return compute(*args, **named)

        monkeypatch.setattr(owner, name, computed)

    slow(AssignmentProblem, "__post_init__", 0.01)
    slow(LinearModel, "minimum", 0.01)
    slow(Makeup, "__init__", 0.02)
    slow(StageOptions, "where", 0.01)
    slow(TransferSteps, "_step", 0.02)
    slow(builder, "forecast_assignment", 0.2)
    slow(baselines, "forecast_assignment", 0.2)
    return lambda: passed_s[0]


@pytest.mark.parametrize(
    ("work", "changed"),
    [
        pytest.param(BATCH, {}, marks=pytest.mark.rare),
        (BATCH, {"tensor_parallel": "auto"}),
        pytest.param(BATCH, {"max_omega": 6.0}, marks=pytest.mark.rare),
        (JOB, {"quality": "high"}),
        (JOB, {"policy": "s3", "tensor_parallel": "auto"}),
    ],
)
def test_work_of_all_kinds_ends_in_time(
    work: Workload | Job, changed: dict[str, Any], clock: Callable[[], float]
) -> None:
    options = PlanOptions(search_time_limit=3.0, **changed)
    plan = find_plan(HOSTS, SHAPE, "m", work, options, clock).plan
    check_is_early(plan, clock())


@pytest.mark.parametrize("kind", ["rra", "waa-c"])
def test_work_under_a_bound_on_latency_ends_in_time(
    kind: ScheduleKind, clock: Callable[[], float]
) -> None:
    request = BoundRequest(LENGTHS, 60.0, 0.99, kinds=(kind,), prompts=500)
    options = PlanOptions(search_time_limit=3.0)
    find_bounded_plan(HOSTS, SHAPE.kind_shapes[FULL], "m", request, options, clock)
    assert clock() < 3.0 + ONE_PLAN_S


def check_is_early(plan: PlanSpec, seconds: float) -> None:
    assert plan.solver.status == "time_limit"
    assert plan.solver.gap > 0
    assert seconds < 3.0 + ONE_PLAN_S
