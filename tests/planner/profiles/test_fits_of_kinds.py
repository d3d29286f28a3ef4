"""Measured rows of one kind of layer, and what they say of layers with experts or a mixer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import RooflineLatency
from planner.model.shape import ModelShape
from planner.profiles.fit import FittedLatency, ProfiledLatency
from planner.profiles.rows import LayerTerms, ProfileRow
from planner.scheduling import PHASES, Phase
from tests.planner.kinds import DELTA, EXPERT, FULL, three_kinds

SHAPE = three_kinds((EXPERT, DELTA, FULL, DELTA))
T4 = ClusterSpec.from_counts(["T4"], [1]).devices[0]
SLOWER = 2.0


def rows_of(shape: ModelShape) -> tuple[ProfileRow, ...]:
    """Rows of a device that takes twice the estimated time."""
    estimate = RooflineLatency(shape)
    return tuple(
        ProfileRow(
            device=T4.accelerator.name,
            model=shape.kind,
            layer=LayerTerms.of(shape),
            intermediate_size=shape.intermediate_size,
            phase=phase,
            bits=16,
            batch_size=batch,
            prompt_length=length if phase == "prefill" else 1,
            context_length=length if phase == "decode" else 0,
            seconds=SLOWER
            * estimate.layer_seconds(T4, 16, phase, batch, length, "float16").whole_s,
        )
        for phase in PHASES
        for batch in (1, 2, 4, 8, 16)
        for length in (64, 128, 256, 512)
    )


@pytest.mark.parametrize("phase", PHASES)
def test_rows_of_one_kind_scale_the_estimates_of_others(phase: Phase) -> None:
    fitted = FittedLatency(rows_of(SHAPE.kinds[FULL]), RooflineLatency(SHAPE))
    for kind, shape in enumerate(SHAPE.kinds):
        workload = T4, 16, phase, 4, 256, "float16"
        found = fitted.of_kind(kind).layer_seconds(*workload).whole_s
        estimate = RooflineLatency(shape).layer_seconds(*workload).whole_s
        assert found == pytest.approx(SLOWER * estimate, rel=0.03 if kind == FULL else 0.25)
    told = fitted.provenance(T4, "float16", (16,))
    assert told.startswith("fitted to 40 profile rows")
    assert "estimated: roofline of the datasheet, in proportion to a layer of attention" in told


def test_own_rows_of_layers_with_experts_are_taken() -> None:
    expert, full = SHAPE.kinds[EXPERT], SHAPE.kinds[FULL]
    slower = tuple(replace(row, seconds=5 * row.seconds) for row in rows_of(expert))
    profiled = ProfiledLatency(FittedLatency((*slower, *rows_of(full)), RooflineLatency(SHAPE)))
    for kind, factor in ((EXPERT, 5 * SLOWER), (FULL, SLOWER)):
        found = profiled.of_kind(kind).layer_decode_s(T4, 16, 8, 128, "float16")
        estimate = RooflineLatency(SHAPE.kinds[kind]).layer_decode_s(T4, 16, 8, 128, "float16")
        assert found == pytest.approx(factor * estimate)


def test_without_rows_of_the_device_all_is_estimated() -> None:
    fitted = FittedLatency(rows_of(SHAPE.kinds[FULL]), RooflineLatency(SHAPE))
    v100 = ClusterSpec.from_counts(["V100"], [1]).devices[0]
    for kind, shape in enumerate(SHAPE.kinds):
        found = fitted.of_kind(kind).layer_decode_s(v100, 4, 8, 128, "float16")
        assert found == RooflineLatency(shape).layer_decode_s(v100, 4, 8, 128, "float16")
    assert fitted.provenance(v100, "float16", (4,)).startswith("estimated: roofline")
