"""LLM-PQ's bits laid over another model's layers, and ORCA's engine alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.reproduction.orca.engine import NEW, batch_s
from benchmarks.reproduction.paper_quality import stretched
from planner.plan.modelled_times import ModelledTimes


def test_bits_keep_their_depth() -> None:
    assert stretched([3, 4, 8, 16], 8) == (3, 3, 4, 4, 8, 8, 16, 16)
    assert stretched([3, 3, 4, 4, 8, 8, 16, 16], 4) == (3, 4, 8, 16)
    shared = stretched([4] * 30 + [8] * 10, 30)
    assert (shared.count(4), shared.count(8)) == (22, 8)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("requests", [1, 5])
def test_a_batch_of_equal_requests_is_one_prefill_and_its_steps(stages: int, requests: int) -> None:
    pipeline: Any = SimpleNamespace(times=[ModelledTimes.constant(3.0, 1.0)] * stages)
    assert batch_s(pipeline, requests, 32) == pytest.approx(stages * (3 + NEW - 1))
