"""Devices that a run has measured take as many times the modelled seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cluster.device import Slowdown
from planner.cluster.spec import ClusterSpec
from planner.costs.adjusted_latency import SlowedLatency
from planner.costs.latency_model import RememberedLatency
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.origin import PlanOrigin
from quant.common.errors import SpecError


def test_each_phase_has_its_factor_and_devices_are_kept_apart() -> None:
    plain = RooflineLatency(model_shape("opt-6.7b"))
    slowed = RememberedLatency(SlowedLatency(plain))
    fast = ClusterSpec.from_counts(["T4"], [1]).devices[0]
    slow = replace(fast, slowdown=Slowdown(1.5, 3.0))
    for device, prefill, decode in ((fast, 1.0, 1.0), (slow, 1.5, 3.0)):
        work = device, 8, 4, 128, "float16"
        assert slowed.layer_prefill_s(*work) == pytest.approx(
            prefill * plain.layer_prefill_s(*work)
        )
        assert slowed.layer_decode_s(*work) == pytest.approx(decode * plain.layer_decode_s(*work))
        rows = device, 4, "float16"
        assert slowed.final_s(*rows) == pytest.approx(decode * plain.final_s(*rows))
        assert slowed.embedding_s(*rows) == pytest.approx(decode * plain.embedding_s(*rows))
    text = slowed.provenance(slow, "float16", [8])
    assert text.startswith("T4") or text.startswith("estimated")
    assert "times 1.5 in prefill and 3 in decode" in text
    assert "times" not in slowed.provenance(fast, "float16", [8])


def test_an_origin_keeps_what_was_measured_and_multiplies_it() -> None:
    cluster = ClusterSpec.from_counts(["T4"], [2])
    origin = PlanOrigin(cluster.to_yaml(), PlanOptions())
    name = cluster.devices[1].name
    twice = origin.slowed({name: Slowdown(1.0, 2.0)}).slowed({name: Slowdown(1.25, 1.5)})
    first, second = twice.cluster_spec().devices
    assert first == cluster.devices[0]
    assert second == replace(cluster.devices[1], slowdown=Slowdown(1.25, 3.0))
    assert twice.cluster_spec().fingerprint() == cluster.fingerprint()


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_factors_are_refused(factor: float) -> None:
    with pytest.raises(SpecError, match="above 0"):
        Slowdown(decode=factor)
