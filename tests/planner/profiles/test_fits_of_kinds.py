"""Measured rows of one kind of layer, and what they say of layers with experts or a mixer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import RooflineLatency
from planner.model.shape import ModelShape
from planner.profiles.fit import FittedLatency, ProfiledLatency
from planner.profiles.layer_terms import LayerTerms
from planner.profiles.rows import ProfileRow, read_profiles, write_profiles
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


def experts_law(tokens: int) -> float:
    """Seconds of 64 experts, of which a token asks 4: each that is read, and each product."""
    return 2e-5 * (64 - 64 * (60 / 64) ** tokens) + 3e-7 * tokens


def test_experts_measured_apart_are_fitted_by_the_tokens_of_a_pass(tmp_path: Path) -> None:
    """Whatever these are, prompts or steps; the rest of a layer has its bits apart from theirs."""
    expert = SHAPE.kinds[EXPERT]
    rows = [
        replace(row, bits=bits, attention_s=1e-3, experts_s=experts_s, seconds=rest_s + experts_s)
        for row in rows_of(expert)
        for bits, rest_s in ((4, 3e-3), (16, 5e-3))
        for experts_s in [experts_law(row.batch_size * row.prompt_length) * bits]
    ]
    write_profiles(tmp_path / "times.csv", rows)
    read = read_profiles(tmp_path / "times.csv")
    assert [row.layer for row in read] == [row.layer for row in rows]
    fitted = FittedLatency(read, RooflineLatency(SHAPE)).of_kind(EXPERT)
    for tokens in (3, 12, 700):
        found = fitted.experts_s(T4, 4, tokens, "float16")
        assert found == pytest.approx(4 * experts_law(tokens), rel=0.05)
    rest, experts = (
        part.layer_seconds(T4, bits, "decode", 6, 128, "float16").whole_s
        for part, bits in ((fitted.parts.rest, 16), (fitted.parts.experts, 4))
    )
    assert rest == pytest.approx(5e-3, rel=0.03)
    assert experts == pytest.approx(4 * experts_law(6), rel=0.05)


@pytest.mark.parametrize(("threads", "backend"), [(6, "int4pack"), (5, "int4pack"), (6, "other")])
def test_experts_on_hosts_take_what_was_measured_on_a_cpu_like_theirs(
    threads: int, backend: str
) -> None:
    """A CPU of as many threads as a GPU has of its host, in the host's type, with its kernels."""
    node = {"name": "a", "accelerators": {"T4": 2}, "host_memory_gib": 64, "host_threads": 12}
    t4 = ClusterSpec.from_dict({"name": "c", "nodes": [node]}).devices[0]
    measured_s = [
        (row, experts_law(row.batch_size * row.prompt_length)) for row in rows_of(SHAPE.kinds[0])
    ]
    cpu = {"device": "CPU", "bits": 4, "dtype": "bfloat16", "threads": threads, "backend": backend}
    rows = tuple(
        replace(row, seconds=1.0, attention_s=1e-3, experts_s=experts_s, **cpu)
        for row, experts_s in measured_s
    )
    fitted = FittedLatency(rows, RooflineLatency(SHAPE)).of_kind(EXPERT)
    estimated = RooflineLatency(SHAPE.kinds[EXPERT])
    for tokens in (3, 12, 700):
        found = fitted.hosted_experts_s(t4, 4, tokens, "float16")
        known = estimated.hosted_experts_s(t4, 4, tokens, "float16")
        if (threads, backend) == (6, "int4pack"):
            assert found.computed_s == pytest.approx(experts_law(tokens), rel=0.05)
        else:
            assert found.computed_s == known.computed_s
        assert found._replace(computed_s=0.0) == known._replace(computed_s=0.0)


def test_rows_of_other_kinds_do_not_scale_to_a_layer() -> None:
    """Those of a mixer say nothing of attention, and a window is not one layer with another."""
    plain = RooflineLatency(SHAPE.kinds[FULL])
    rows = rows_of(SHAPE.kinds[DELTA])
    fitted = FittedLatency(rows, plain)
    workload = T4, 16, "decode", 4, 256, "float16"
    assert fitted.layer_seconds(*workload) == plain.layer_seconds(*workload)
    told = fitted.provenance(T4, "float16", (16,))
    assert told.startswith("estimated: roofline of the datasheet (bits 16: taken of state 16x128")
    sliding = replace(SHAPE.kinds[FULL], kind="sliding_attention", sliding_window=64)
    own = FittedLatency(rows_of(sliding), RooflineLatency(sliding))
    short, long = (own.layer_decode_s(T4, 16, 16, length, "float16") for length in (64, 4096))
    assert long == pytest.approx(short, rel=0.05)
    scaled = FittedLatency(rows_of(SHAPE.kinds[FULL]), RooflineLatency(sliding))
    estimate = RooflineLatency(sliding).layer_decode_s(T4, 16, 4, 4096, "float16")
    assert scaled.layer_decode_s(T4, 16, 4, 4096, "float16") == pytest.approx(
        SLOWER * estimate, rel=0.05
    )


def test_without_rows_of_the_device_all_is_estimated() -> None:
    fitted = FittedLatency(rows_of(SHAPE.kinds[FULL]), RooflineLatency(SHAPE))
    v100 = ClusterSpec.from_counts(["V100"], [1]).devices[0]
    for kind, shape in enumerate(SHAPE.kinds):
        found = fitted.of_kind(kind).layer_decode_s(v100, 4, 8, 128, "float16")
        assert found == RooflineLatency(shape).layer_decode_s(v100, 4, 8, 128, "float16")
    assert fitted.provenance(v100, "float16", (4,)).startswith("estimated: roofline")
