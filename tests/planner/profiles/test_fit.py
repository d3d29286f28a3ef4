"""Profiles: a fit recovers a known law, measured rows win, and bad rows are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_shape
from planner.profiles.fit import (
    FitError,
    FittedLatency,
    ProfiledLatency,
    all_together,
    held_out_errors,
    relative_errors,
)
from planner.profiles.layer_terms import LayerTerms, layer_features
from planner.profiles.rows import ProfileRow, read_profiles, write_profiles
from planner.profiles.selection import applies
from planner.scheduling import Phase
from quant.common.errors import InputError, SpecError
from quant.scheme import BITWIDTHS

SHAPE = model_shape("opt-1.3b")
LAYER = LayerTerms.of(SHAPE)
ROOFLINE = RooflineLatency(SHAPE)
T4 = ClusterSpec.from_counts(["T4"], [1]).devices[0]
LAW = {
    "prefill": np.array([1e-9, 2e-9, 3e-14, 4e-13, 5e-12, 0, 0, 0]),
    "decode": np.array([5e-13, 6e-12, 7e-11, 8e-12]),
}
HEADER = "device,model,h1,h2,prompt_length,context_length,phase,bits,batch_size,ms_per_layer"
GOOD = "T4-16GB,opt-1.3b,2048,8192,512,0,prefill,16,4,12.5"


def row(
    phase: Phase, batch: int, length: int, bits: int = 16, layer: LayerTerms = LAYER
) -> ProfileRow:
    return ProfileRow(
        device="T4-16GB",
        model="opt-1.3b",
        layer=layer,
        intermediate_size=8192,
        phase=phase,
        bits=bits,
        batch_size=batch,
        prompt_length=length if phase == "prefill" else 1,
        context_length=length if phase == "decode" else 0,
        seconds=float(LAW[phase] @ layer_features(phase, layer, batch, length)),
    )


def grid(
    lengths: tuple[int, ...] = (128, 256, 512), layer: LayerTerms = LAYER
) -> tuple[ProfileRow, ...]:
    phases: tuple[Phase, Phase] = ("prefill", "decode")
    return tuple(
        row(phase, batch, length, layer=layer)
        for phase in phases
        for batch in (1, 2, 4, 8)
        for length in lengths
    )


@pytest.mark.parametrize(("batch", "length"), [(3, 384), (7, 768), (16, 200)])
def test_fit_predicts_unseen_workloads(batch: int, length: int) -> None:
    fitted = FittedLatency(grid(), ROOFLINE)
    prefill = fitted.layer_prefill_s(T4, 16, batch, length, "float16")
    decode = fitted.layer_decode_s(T4, 16, batch, length, "float16")
    assert prefill == pytest.approx(row("prefill", batch, length).seconds, rel=0.02)
    assert decode == pytest.approx(row("decode", batch, length).seconds, rel=0.02)


def test_fit_withstands_noise_within_the_papers_error() -> None:
    noise = np.random.default_rng(0)
    rows = tuple(
        replace(each, seconds=each.seconds * float(noise.uniform(0.95, 1.05))) for each in grid()
    )
    fitted = FittedLatency(rows, ROOFLINE)
    errors = [
        abs(
            fitted.layer_decode_s(T4, 16, batch, 384, "float16") / row("decode", batch, 384).seconds
            - 1
        )
        for batch in (3, 5, 7)
    ]
    assert float(np.mean(errors)) < 0.06


def test_profile_of_another_model_scales() -> None:
    other = LayerTerms.of(model_shape("opt-6.7b"))
    fitted = FittedLatency(grid(layer=other), ROOFLINE)
    for batch, length in ((2, 256), (8, 512)):
        assert fitted.layer_prefill_s(T4, 16, batch, length, "float16") == pytest.approx(
            row("prefill", batch, length).seconds, rel=0.03
        )


def test_one_length_only_still_extrapolates_like_the_roofline() -> None:
    """Collinear rows: the time at half the length must be about half, not a quarter or the same."""
    fitted = FittedLatency(grid(lengths=(512,)), ROOFLINE)
    whole = fitted.layer_prefill_s(T4, 16, 8, 512, "float16")
    half = fitted.layer_prefill_s(T4, 16, 8, 256, "float16")
    expected = ROOFLINE.layer_prefill_s(T4, 16, 8, 256, "float16") / ROOFLINE.layer_prefill_s(
        T4, 16, 8, 512, "float16"
    )
    assert whole == pytest.approx(row("prefill", 8, 512).seconds, rel=0.02)
    assert half / whole == pytest.approx(expected, rel=0.2)


def test_a_single_row_scales_the_roofline() -> None:
    fitted = FittedLatency((row("decode", 8, 512),), ROOFLINE)
    assert fitted.layer_decode_s(T4, 16, 8, 512, "float16") == pytest.approx(
        row("decode", 8, 512).seconds, rel=0.01
    )
    ratio = fitted.layer_decode_s(T4, 16, 2, 256, "float16") / ROOFLINE.layer_decode_s(
        T4, 16, 2, 256, "float16"
    )
    measured = row("decode", 8, 512).seconds / ROOFLINE.layer_decode_s(T4, 16, 8, 512, "float16")
    assert ratio == pytest.approx(measured, rel=0.25)


def test_measured_rows_win_where_measured() -> None:
    odd = replace(row("decode", 4, 256), seconds=1.0)
    model = ProfiledLatency(FittedLatency((*grid(lengths=(128, 512)), odd), ROOFLINE))
    assert model.layer_decode_s(T4, 16, 4, 256, "float16") == 1.0
    assert model.layer_decode_s(T4, 16, 3, 256, "float16") != 1.0
    assert model.layer_prefill_s(T4, 16, 8, 512, "float16") == row("prefill", 8, 512).seconds
    provenance = model.provenance(T4, "float16", BITWIDTHS)
    assert provenance.startswith("measured in 17 profile rows (bits 16)")


def test_what_is_not_profiled_is_estimated() -> None:
    fitted = FittedLatency(grid(), ROOFLINE)
    v100 = ClusterSpec.from_counts(["V100"], [1]).devices[0]
    datasheet = "estimated: roofline of the datasheet"
    assert fitted.provenance(v100, "float16", (8,)) == f"{datasheet} (bits 8: taken on T4-16GB)"
    assert fitted.provenance(T4, "float16", BITWIDTHS) == (
        f"fitted to 24 profile rows (bits 16); {datasheet} (bits 3, 4, 5, 6, 8: no rows); "
        f"embedding and LM head {datasheet}"
    )
    assert fitted.provenance(T4, "float16", (16,)).count("estimated") == 1
    for bits, dtype in ((8, "float16"), (16, "float32")):
        assert fitted.layer_prefill_s(T4, bits, 2, 128, dtype) == ROOFLINE.layer_prefill_s(
            T4, bits, 2, 128, dtype
        )
    assert fitted.final_s(T4, 4, "float16") == ROOFLINE.final_s(T4, 4, "float16")


def test_rows_of_other_kernels_or_threads_do_not_apply() -> None:
    foreign = replace(row("decode", 4, 256, bits=4), backend="gptq_cuda")
    ours = replace(foreign, backend="bnb_nf4", backend_version="0.48")
    assert not applies(foreign, T4, "float16")
    assert applies(ours, T4, "float16")
    v100 = ClusterSpec.from_counts(["V100"], [1]).devices[0]
    here = replace(ours, device=v100.accelerator.name, batch_size=3)
    assert applies(here, v100, "float16")
    assert not applies(replace(here, batch_size=8), v100, "float16"), "whose plans take another"
    assert applies(replace(here, batch_size=8, backend="cuda_4bit"), v100, "float16")
    provenance = FittedLatency((ours,), ROOFLINE).provenance(T4, "float16", (4,))
    assert "bnb_nf4 0.48" in provenance
    assert "prefill of bits 4: no rows" in provenance
    values = {"accelerators": {"CPU": 1}, "memory_gib": 1, "threads": 2}
    cpu = ClusterSpec.from_dict({"name": "c", "nodes": [values]}).devices[0]
    measured = replace(foreign, device="CPU", backend="int4pack", threads=2)
    assert applies(measured, cpu, "bfloat16")
    assert not applies(replace(measured, threads=1), cpu, "bfloat16")


def test_an_emulated_device_uses_its_gpus_profile() -> None:
    played = replace(T4, emulated=True)
    fitted = FittedLatency(grid(), ROOFLINE)
    assert fitted.layer_decode_s(played, 16, 4, 256, "bfloat16") == pytest.approx(
        row("decode", 4, 256).seconds, rel=0.02
    )


def test_csv_round_trip(tmp_path: Path) -> None:
    rows = (*grid(), replace(row("decode", 2, 64, bits=8), backend="cuda_w8a8", threads=3))
    rows += (replace(row("decode", 3, 64), unlike=True),)
    write_profiles(tmp_path / "p.csv", rows)
    back = read_profiles(tmp_path / "p.csv")
    assert [replace(each, seconds=0) for each in back] == [
        replace(each, seconds=0) for each in rows
    ]
    assert [each.seconds for each in back] == pytest.approx([each.seconds for each in rows])
    model = ProfiledLatency(FittedLatency(back, ROOFLINE))
    assert model.layer_decode_s(T4, 16, 2, 128, "float16") == pytest.approx(
        row("decode", 2, 128).seconds
    )
    provenance = model.provenance(replace(T4, threads=3), "float16", BITWIDTHS)
    assert "profile rows of p.csv (bits 8, 16; cuda_w8a8)" in provenance


def test_decode_without_context_is_no_division_by_zero() -> None:
    rows = tuple(row("decode", batch, 0) for batch in (1, 4))
    fitted = FittedLatency(rows, ROOFLINE)
    assert fitted.layer_decode_s(T4, 16, 2, 0, "float16") == pytest.approx(
        row("decode", 2, 0).seconds, rel=0.02
    )


def test_published_columns_suffice(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(f"{HEADER}\n{GOOD}\n")
    (found,) = read_profiles(tmp_path / "p.csv")
    assert found.layer == LAYER
    assert found.seconds == pytest.approx(0.0125)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEADER}\n{GOOD.replace('T4-16GB', 'T5')}", "p.csv:2: .*unknown accelerator 'T5'"),
        (f"{HEADER}\n{GOOD}\n{GOOD.replace('12.5', 'nan')}", "p.csv:3: .*positive number"),
        (f"{HEADER}\n{GOOD.replace('12.5', '0')}", "p.csv:2: .*positive number"),
        (f"{HEADER}\n{GOOD.replace('12.5', 'x')}", "ms_per_layer 'x'; a number"),
        (f"{HEADER}\n{GOOD.replace('prefill', 'train')}", "phase 'train'"),
        (f"{HEADER}\n{GOOD.replace('16,4', '7,4')}", "bits 7; one of 3, 4, 5, 6, 8, 16"),
        (f"{HEADER}\n{GOOD.replace('16,4', '16,0')}", "batch_size '0'"),
        (f"{HEADER}\n{GOOD.replace('2048', '2k')}", "h1 '2k'"),
        (f"{HEADER}\nT4,opt", "not as many fields"),
        (f"{HEADER}\n{GOOD},1,2", "not as many fields"),
        (f"{HEADER},dtype\n{GOOD},int8", "dtype 'int8'"),
        (HEADER.replace("bits", "bit"), "p.csv:1: profile lacks the columns bits"),
        (f"{HEADER},colour", "p.csv:1: profile has unknown columns colour"),
        ("", "lacks the columns"),
    ],
)
def test_bad_csv_is_named_with_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.csv").write_text(text + "\n")
    with pytest.raises(SpecError, match=message):
        read_profiles(tmp_path / "p.csv")


def test_missing_csv(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"profile .* cannot be read"):
        read_profiles(tmp_path / "none.csv")


def test_a_kernel_that_changes_its_ways_is_followed() -> None:
    """4 bit on a CPU: row by row up to 96 rows, then restored weights and a fast product."""

    def seconds(batch: int, length: int) -> float:
        rows = batch * length
        return (190e-6 * rows if rows < 96 else 10.8e-3 + 77e-6 * rows) + 30e-9 * rows * length

    points = [(1, 16), (1, 67), (2, 47), (6, 16), (1, 167), (4, 116), (32, 16), (12, 52)]
    points += [(2, 414), (1, 1024), (4, 288), (32, 47), (12, 228), (3, 1024), (6, 682), (32, 128)]
    rows = tuple(replace(row("prefill", *p), seconds=seconds(*p)) for p in points)
    fitted = FittedLatency(rows, ROOFLINE)
    for unseen in ((1, 40), (3, 29), (5, 30), (9, 20), (2, 200), (7, 300), (20, 100)):
        found = fitted.layer_prefill_s(T4, 16, *unseen, "float16")
        assert found == pytest.approx(seconds(*unseen), rel=0.04)


def test_spread_and_a_torn_end(tmp_path: Path) -> None:
    rows = tuple(replace(row("decode", 2, n), spread=0.25, repetitions=7) for n in (64, 128))
    path = tmp_path / "p.csv"
    write_profiles(path, rows)
    assert [(each.spread, each.repetitions) for each in read_profiles(path)] == [(0.25, 7)] * 2
    text = path.read_text()
    for cut in (3, 12, 40):
        path.write_text(text[:-cut])
        with pytest.raises(SpecError, match=r"p.csv:3: "):
            read_profiles(path)
        assert len(read_profiles(path, torn_end=True)) == 1
    path.write_text(text.replace("0.25", "-1", 1))
    with pytest.raises(SpecError, match=r"p.csv:2: .*spread -1; a number of at least 0"):
        read_profiles(path, torn_end=True)


def test_profiles_are_written_aside_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*none/p.csv"):
        write_profiles(tmp_path / "none" / "p.csv", ())


def test_a_cpu_passes_prompts_in_parts() -> None:
    """24 prompts of 170 tokens: four passes of six; 3 of 1,024: three; and a fit knows it."""
    one = layer_features("prefill", LAYER, 6, 170)
    assert layer_features("prefill", LAYER, 24, 170, 1024) == pytest.approx(4 * one)
    last = layer_features("prefill", LAYER, 1, 170)
    assert layer_features("prefill", LAYER, 25, 170, 1024) == pytest.approx(4 * one + last)
    alone = layer_features("prefill", LAYER, 1, 2000)
    assert layer_features("prefill", LAYER, 3, 2000, 1024) == pytest.approx(3 * alone)
    node = {"accelerators": {"CPU": 1}, "memory_gib": 1}
    cpu = ClusterSpec.from_dict({"name": "c", "nodes": [node]}).devices[0]
    law = LAW["prefill"]

    def seconds(batch: int, length: int) -> float:
        return float(law @ layer_features("prefill", LAYER, batch, length, 1024))

    points = [(b, s) for b in (1, 2, 4, 8, 16, 32) for s in (16, 100, 300, 700) if b * s < 5000]
    rows = tuple(
        replace(row("prefill", *point), device="CPU", seconds=seconds(*point)) for point in points
    )
    fitted = FittedLatency(rows, ROOFLINE)
    for point in ((3, 500), (12, 300), (5, 128)):
        found = fitted.layer_prefill_s(cpu, 16, *point, "bfloat16")
        assert found == pytest.approx(seconds(*point), rel=0.05)


def test_rows_of_a_law_are_foretold() -> None:
    errors = held_out_errors(grid(), ROOFLINE, T4, "float16")
    assert [(each.bits, each.phase) for each in errors] == [(16, "prefill"), (16, "decode")]
    assert all((each.fitted, len(each.errors)) == (9, 3) for each in errors)
    assert all_together(errors).most < 0.02


def test_a_held_out_row_does_not_enter_the_fit() -> None:
    """One wrong row in four: its own error is what it is wrong by, the others have hardly any."""
    rows = list(grid())
    ordered = sorted(
        (each for each in rows if each.phase == "decode"),
        key=lambda each: (each.batch_size * each.context_length, each.batch_size),
    )
    wrong = ordered[2]
    rows[rows.index(wrong)] = replace(wrong, seconds=2 * wrong.seconds)
    found = {each.phase: each for each in held_out_errors(rows, ROOFLINE, T4, "float16")}
    assert found["decode"].errors[0] == pytest.approx(0.5, abs=0.01)
    assert max(found["decode"].errors[1:]) < 0.02


def test_relative_errors_and_their_summary() -> None:
    model = FittedLatency(grid(), ROOFLINE)
    doubled = [replace(each, seconds=2 * each.seconds) for each in grid()]
    errors = relative_errors(model, T4, doubled, "float16")
    assert errors == pytest.approx([0.5] * len(doubled), abs=0.01)
    error = FitError(16, "decode", 3, (0.0, 0.1, 0.2))
    assert (error.mean, error.most) == pytest.approx((0.1, 0.2))
    assert error.percentile_95 == pytest.approx(float(np.quantile([0, 0.1, 0.2], 0.95)))


def test_too_few_rows_have_no_error() -> None:
    assert held_out_errors((row("decode", 1, 64),), ROOFLINE, T4, "float16") == ()
