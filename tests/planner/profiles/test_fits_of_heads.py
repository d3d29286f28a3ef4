"""Measured LM heads: at their own bits, at 16 bit alone as in files of before, of other models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.options import PlanOptions
from planner.profiles.fit import FittedLatency
from planner.profiles.layer_terms import LayerTerms
from planner.profiles.rows import ProfileRow, write_profiles
from planner.search.find import find_plan
from planner.search.request import PlanningRequest, latency_model_of
from planner.workload import Workload
from quant.scheme import HEAD_BITWIDTHS

SHAPE, OTHER = model_shape("smollm2-135m"), model_shape("qwen2.5-0.5b")
CLUSTER = ClusterSpec.from_counts(["T4"], [1])
(T4,) = CLUSTER.devices
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SLOWER = {16: 2.0, 8: 3.0, 6: 5.0}


def estimate_s(shape: ModelShape, bits: int, rows: int) -> float:
    return RooflineLatency(shape.with_all(head_bits=bits)).final_s(T4, rows, "float16")


def measured(
    shape: ModelShape = SHAPE, slower: Mapping[int, float] = SLOWER
) -> tuple[ProfileRow, ...]:
    """Rows of a device that takes so many times the estimate."""
    return tuple(
        ProfileRow(
            device=T4.accelerator.name,
            model=shape.name,
            layer=LayerTerms.of_head(shape),
            intermediate_size=shape.intermediate_size,
            phase="decode",
            bits=bits,
            batch_size=rows,
            prompt_length=1,
            context_length=0,
            seconds=factor * estimate_s(shape, bits, rows),
        )
        for bits, factor in slower.items()
        for rows in ROWS
    )


def final_s(rows: tuple[ProfileRow, ...], bits: int, tokens: int) -> float:
    shape = SHAPE.with_all(head_bits=bits)
    return FittedLatency(rows, RooflineLatency(shape)).final_s(T4, tokens, "float16")


@pytest.mark.parametrize("bits", HEAD_BITWIDTHS)
@pytest.mark.parametrize("tokens", [1, 8, 20, 32])
def test_a_head_takes_what_was_measured_at_its_bits(bits: int, tokens: int) -> None:
    own, expected = final_s(measured(), bits, tokens), estimate_s(SHAPE, bits, tokens)
    assert own == pytest.approx(SLOWER[bits] * expected, rel=0.05)
    assert final_s((), bits, tokens) == expected
    scaled = final_s(measured(OTHER), bits, tokens)
    assert scaled == pytest.approx(SLOWER[bits] * expected, rel=0.5), "launches are not scaled"


@pytest.mark.parametrize("bits", [6, 8])
def test_without_rows_of_its_bits_it_has_a_share_of_16(bits: int) -> None:
    full = measured(slower={16: 2.0})
    for tokens in (1, 32):
        expected = pytest.approx(2.0 * estimate_s(SHAPE, bits, tokens), rel=0.05)
        assert final_s(full, bits, tokens) == expected
        # The very head at 16 bit tells more than another model's at these bits.
        assert final_s((*full, *measured(OTHER, {bits: 9.0})), bits, tokens) == expected


def test_rows_of_heads_are_none_of_layers(tmp_path: Path) -> None:
    """A bitwidth of which there is but a head is not one that plans choose from by themselves."""
    path, workload = tmp_path / "times.csv", Workload(1, 64, 16)
    write_profiles(path, measured())
    fitted = FittedLatency(measured(), RooflineLatency(SHAPE))
    told = fitted.provenance(T4, "float16", (6, 8))
    assert told == "estimated: roofline of the datasheet (bits 6, 8: no rows)"
    request = PlanningRequest.of(CLUSTER, SHAPE, workload, PlanOptions(profiles=path))
    assert len(request.options.bits) == 6


def test_plans_take_the_head_that_is_measured_as_the_fastest(tmp_path: Path) -> None:
    path, workload = tmp_path / "times.csv", Workload(1, 64, 16)
    chosen = []
    for slow in HEAD_BITWIDTHS:
        times = dict.fromkeys(HEAD_BITWIDTHS, 1.0) | {slow: 30.0}
        write_profiles(path, measured(slower=times))
        options = PlanOptions(bits=(16,), head_bits=HEAD_BITWIDTHS, theta=0.0, profiles=path)
        chosen.append(find_plan(CLUSTER, SHAPE, "smollm2-135m", workload, options).plan.head_bits)
        shape = SHAPE.with_all(head_bits=slow)
        found = latency_model_of(CLUSTER, shape, options).final_s(T4, 1, "float16")
        assert found == pytest.approx(30 * estimate_s(SHAPE, slow, 1), rel=0.05)
    assert chosen == [8, 6, 6]
