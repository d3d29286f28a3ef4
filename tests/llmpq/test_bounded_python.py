"""Plans under a bound on the latency of requests, asked for in Python."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from llmpq import Cluster, Job, LengthDistribution, RequestLengths, Workload
from quant.common.errors import BoundNotMetError, SpecError
from tests.paths import DEMO_MODEL, ROOT

LENGTHS = RequestLengths(
    LengthDistribution.truncated_normal(30, 10, 64), LengthDistribution.of_sample([6, 9, 9, 13])
)
QUICK: dict[str, Any] = {
    "schedule": "rra",
    "quantile": 0.9,
    "search_time_limit": 60.0,
    "bits": [8],
    "theta": 0.0,
}


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster.from_yaml(ROOT / "tests/llmpq/one_device.yaml")


def test_a_looser_bound_never_has_less_throughput(cluster: Cluster) -> None:
    rates = []
    for bound_s in (0.3, math.inf):
        plan = cluster.plan(DEMO_MODEL, LENGTHS, max_request_latency_s=bound_s, **QUICK)
        assert plan.spec.latency is not None
        assert plan.spec.latency.latency_s <= bound_s
        rates.append(plan.spec.latency.requests_per_s)
    assert all(b > 0.98 * a for a, b in itertools.pairwise(rates)), "within the tolerance"


def test_a_job_is_known_by_its_number_of_prompts(cluster: Cluster) -> None:
    job = Job.of(500, 32, 16)
    plan = cluster.plan(DEMO_MODEL, job, max_request_latency_s=1, **QUICK)
    assert plan.spec.latency is not None
    assert plan.spec.latency.prompts == 500
    least_s = 500 / plan.spec.latency.requests_per_s
    most_s = least_s + plan.spec.latency.latency_s
    assert least_s < (plan.spec.latency.seconds or 0) <= most_s * (1 + 1e-9)
    with pytest.raises(SpecError, match="told of plans for a batch or a job"):
        plan.explain()


def test_the_error_has_the_bound_that_can_be_kept(cluster: Cluster) -> None:
    with pytest.raises(BoundNotMetError) as caught:
        cluster.plan(DEMO_MODEL, LENGTHS, max_request_latency_s=1e-6, **QUICK)
    assert caught.value.option == "max_request_latency_s"
    reachable = caught.value.reachable
    plan = cluster.plan(DEMO_MODEL, LENGTHS, max_request_latency_s=reachable, **QUICK)
    assert plan.spec.latency is not None
    assert plan.spec.latency.latency_s <= reachable


def test_what_does_not_go_together(cluster: Cluster) -> None:
    with pytest.raises(SpecError, match="not about a batch; give request_lengths"):
        cluster.plan(DEMO_MODEL, Workload(4, 16, 8), max_request_latency_s=1.0)
    with pytest.raises(SpecError, match="give max_request_latency_s"):
        cluster.plan(DEMO_MODEL, LENGTHS)
    with pytest.raises(SpecError, match="max_latency_s has no effect beside max_request_latency_s"):
        cluster.plan(DEMO_MODEL, LENGTHS, max_request_latency_s=1.0, max_latency_s=2.0)
    with pytest.raises(SpecError, match="schedule is 'waa'; it must be one of"):
        cluster.plan(DEMO_MODEL, LENGTHS, max_request_latency_s=1.0, schedule="waa")
    with pytest.raises(SpecError, match="max_request_latency_s is 'soon'; give seconds, or inf"):
        cluster.plan(DEMO_MODEL, LENGTHS, max_request_latency_s="soon")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="max_request_latency_s is of one pipeline"):
        cluster.fleet(DEMO_MODEL, Job.of(9, 16, 8), max_request_latency_s=1.0)
