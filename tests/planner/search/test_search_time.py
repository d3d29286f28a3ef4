"""One limit for all the searches that a plan needs."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.profiles.sensitivity import default_sensitivity
from planner.search.candidate_search import LEAST_SOLVE_S, CandidateSearch, SearchTime
from planner.search.find import find_plan
from planner.search.pareto import within_bounds
from planner.search.qualities import chosen_by_quality
from planner.search.request import cost_model
from planner.workload import Job, Workload

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
