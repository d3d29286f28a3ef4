"""What an emulated stage's seconds are made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.emulation.times import ScaledTimes, emulated_times
from actors.messages import MicroBatch, Park
from planner.cluster.spec import ClusterSpec
from planner.costs.communication import COPY_LAUNCH_S
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.modelled_times import ModelledTimes
from planner.search.find import find_plan
from planner.workload import Workload

ONE, ZERO = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)


def test_tokens_that_are_parked_and_restored_take_the_time_of_their_way() -> None:
    """Each of them once over PCIe, beside the pass; the time scale is that of all seconds."""
    cluster = ClusterSpec.from_dict(
        {
            "name": "one",
            "nodes": [{"name": "a", "accelerators": {"T4": 1}}],
            "emulate": {"time_scale": 0.5},
        },
        "test",
    )
    options = PlanOptions(bits=(4,), dtype="float16")
    plan = find_plan(cluster, model_shape("opt-1.3b"), "opt-1.3b", Workload(4, 64, 16), options)
    (stage,) = plan.stages
    times = emulated_times(plan, stage)
    assert times is not None
    step = MicroBatch(ZERO, 9 * ONE, ONE, ZERO)
    both = replace(step, parks=(Park(1, 0, 30),), restores=(Park(2, 90, 50), Park(3, 9, 1)))
    bytes_s = 81 * 24 * 2 * 2048 * 2 / 16e9  # 24 layers of 2,048 keys and values of 2 bytes
    starts_s = 3 * 24 * 2 * COPY_LAUNCH_S
    more_s = times.compute_s(both) - times.compute_s(step)
    assert more_s == pytest.approx(0.5 * (bytes_s + starts_s))
    plain = ScaledTimes(ModelledTimes.constant(2.0, 1.0), 3.0)
    assert plain.compute_s(both) == plain.compute_s(step) == 3.0
