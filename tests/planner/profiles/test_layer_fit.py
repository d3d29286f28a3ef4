"""Fits of attention and of the rest of a layer: each recovers its own law, and they add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.cluster.groups import group_of
from planner.cluster.spec import ClusterSpec
from planner.costs.adjusted_latency import GroupLatency
from planner.costs.latency_model import LayerSeconds, unlike_prompts_s
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_shape
from planner.profiles.fit import FittedLatency, ProfiledLatency
from planner.profiles.layer_fit import NO_CORRECTION, fit_correction
from planner.profiles.layer_terms import LayerTerms
from planner.profiles.rows import ProfileRow, read_profiles, write_profiles
from planner.scheduling import PHASES, Phase
from quant.common.errors import SpecError

SHAPE = model_shape("opt-1.3b")
ROOFLINE = RooflineLatency(SHAPE)
T4 = ClusterSpec.from_counts(["T4"], [1]).devices[0]
LENGTHS = {"prefill": (20, 60, 200, 700), "decode": (30, 200, 1000)}


def law(phase: Phase, requests: int, length: int) -> LayerSeconds:
    """A device whose products run row by row at first, and whose attention is as it should be."""
    if phase == "decode":
        return LayerSeconds(1e-5 + requests * (2e-6 + 3e-8 * length), 4e-4 + 1e-6 * requests)
    tokens = requests * length
    rest_s = 5e-4 + 4e-6 * tokens + 3e-6 * min(tokens, 96)
    return LayerSeconds(1e-5 + requests * (5e-6 + 2e-8 * length + 2e-9 * length**2), rest_s)


def row(phase: Phase, requests: int, length: int, apart: bool = True) -> ProfileRow:
    parts = law(phase, requests, length)
    return ProfileRow(
        device="T4-16GB",
        model="opt-1.3b",
        layer=LayerTerms.of(SHAPE),
        intermediate_size=8192,
        phase=phase,
        bits=16,
        batch_size=requests,
        prompt_length=length if phase == "prefill" else 1,
        context_length=length if phase == "decode" else 0,
        seconds=parts.whole_s,
        attention_s=parts.attention_s if apart else None,
    )


def rows(apart: bool = True) -> tuple[ProfileRow, ...]:
    return tuple(
        row(phase, requests, length, apart)
        for phase in PHASES
        for requests in (1, 3, 8, 24)
        for length in LENGTHS[phase]
    )


def parts_of(
    model: FittedLatency | ProfiledLatency, phase: Phase, requests: int, length: int
) -> LayerSeconds:
    return model.layer_seconds(T4, 16, phase, requests, length, "float16")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("unseen", [(2, 40), (5, 300), (16, 500), (30, 100)])
def test_both_parts_are_foretold_where_they_were_measured_apart(
    phase: Phase, unseen: tuple[int, int]
) -> None:
    found, true = parts_of(FittedLatency(rows(), ROOFLINE), phase, *unseen), law(phase, *unseen)
    assert found.attention_s == pytest.approx(true.attention_s, rel=0.03)
    assert found.rest_s == pytest.approx(true.rest_s, rel=0.03)


def test_the_rest_that_was_measured_apart_goes_by_tokens_alone() -> None:
    """Also where noise has to be corrected for."""
    noise = np.random.default_rng(0)
    noisy = tuple(
        replace(each, seconds=each.seconds * float(noise.uniform(1.0, 1.2))) for each in rows()
    )
    model = FittedLatency(noisy, ROOFLINE)
    sizes = [(1, 960), (4, 240), (32, 30)]
    first, *others = [parts_of(model, "prefill", *each).rest_s for each in sizes]
    assert others == pytest.approx([first] * 2)
    assert len({parts_of(model, "decode", 7, context).rest_s for context in (1, 90, 1500)}) == 1


@pytest.mark.parametrize("phase", PHASES)
def test_without_attention_the_terms_divide_the_time(phase: Phase) -> None:
    """Attention's products are found even so; what it has by calls or tokens is with the rest."""
    model = FittedLatency(rows(apart=False), ROOFLINE)
    whole = model.layer_prefill_s if phase == "prefill" else model.layer_decode_s
    for requests, length in ((4, 600), (20, 400)):
        parts, true = parts_of(model, phase, requests, length), law(phase, requests, length)
        assert parts.whole_s == whole(T4, 16, requests, length, "float16")
        assert parts.whole_s == pytest.approx(true.whole_s, rel=0.02)
        products_s = requests * (3e-8 * length if phase == "decode" else 2e-9 * length**2)
        assert parts.attention_s == pytest.approx(products_s, rel=0.05)


def test_a_few_rows_with_attention_do_not_stand_for_the_others() -> None:
    old = rows(apart=False)
    added = (row("prefill", 2, 100), row("decode", 2, 100))
    assert parts_of(FittedLatency((*old, *added), ROOFLINE), "prefill", 4, 300) == parts_of(
        FittedLatency((*old, *(replace(each, attention_s=None) for each in added)), ROOFLINE),
        "prefill", 4, 300,
    )  # fmt: skip
    most = FittedLatency((*rows(), row("prefill", 2, 100, apart=False)), ROOFLINE)
    assert parts_of(most, "prefill", 4, 300) == parts_of(
        FittedLatency(rows(), ROOFLINE), "prefill", 4, 300
    )


def test_measured_parts_win_where_measured() -> None:
    odd = replace(row("decode", 3, 200), seconds=1.0, attention_s=0.75)
    others = tuple(each for each in rows(apart=False) if each.batch_size != 3)
    model = ProfiledLatency(FittedLatency((*others, odd), ROOFLINE))
    assert parts_of(model, "decode", 3, 200) == LayerSeconds(0.75, 0.25)
    divided, fitted = (parts_of(each, "decode", 8, 200) for each in (model, model.model))
    assert divided.whole_s == pytest.approx(law("decode", 8, 200).whole_s)
    assert divided.attention_s / divided.whole_s == pytest.approx(
        fitted.attention_s / fitted.whole_s
    )


@pytest.mark.parametrize("phase", PHASES)
def test_ranks_share_out_measured_attention(phase: Phase) -> None:
    """32 heads of OPT-1.3b."""
    fitted = FittedLatency(rows(), ROOFLINE)
    group = group_of(ClusterSpec.from_counts(["T4"], [4]).devices)
    shared = GroupLatency(fitted).layer_seconds(group, 16, phase, 8, 600, "float16")
    alone = parts_of(fitted, phase, 8, 600)
    assert shared.attention_s == pytest.approx(alone.attention_s / 4)
    assert shared.rest_s > alone.rest_s / 4


def test_attention_is_a_column_that_old_files_lack(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    written = (row("prefill", 2, 100), row("decode", 3, 40, apart=False))
    write_profiles(path, written)
    first, second = read_profiles(path)
    assert first.attention_s == pytest.approx(law("prefill", 2, 100).attention_s)
    assert second.attention_s is None
    text = path.read_text()
    header, *lines = text.splitlines()
    at = header.split(",").index("attention_ms_per_layer")
    old = [
        ",".join(v for i, v in enumerate(line.split(",")) if i != at) for line in (header, *lines)
    ]
    path.write_text("\n".join(old) + "\n")
    assert [replace(each, attention_s=None) for each in (first, second)] == list(
        read_profiles(path)
    )


@pytest.mark.parametrize("attention", ["0", "-1", "nan", "x", "7.5"])
def test_attention_is_less_than_the_layer(tmp_path: Path, attention: str) -> None:
    path = tmp_path / "p.csv"
    write_profiles(path, [replace(row("decode", 2, 9), seconds=7.5e-3, attention_s=1.25e-3)])
    path.write_text(path.read_text().replace(",1.25,", f",{attention},"))
    with pytest.raises(SpecError, match=r"p.csv:2: profile row has attention_ms_per_layer"):
        read_profiles(path)


@pytest.mark.parametrize(
    "prompts", [[600] + [20] * 7, [300, 40, 10, 150], [90, 500], [20, 25, 30, 35, 60, 700]]
)
def test_unlike_prompts_are_foretold_from_prompts_alike(prompts: list[int]) -> None:
    """By the law: the rest of all tokens together, attention's terms of each, and one pass."""
    model = FittedLatency(rows(), ROOFLINE)

    def parts(requests: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        found = parts_of(model, "prefill", requests, length)
        return np.array([found.attention_s]), np.array([found.rest_s])

    alone_s = [law("prefill", 1, prompt).attention_s - 1e-5 for prompt in prompts]
    true_s = law("prefill", 1, sum(prompts)).rest_s + sum(alone_s) + 1e-5
    assert unlike_prompts_s(prompts, parts)[0] == pytest.approx(true_s, rel=0.03)


GRID = [(batch, length) for batch in (1, 3, 8, 20) for length in (16, 60, 250, 1000)]


def departure(batch: int, length: int) -> float:
    """A kernel that loses up to 30 % with the batch, less for long prompts."""
    return 1.0 + 0.3 * np.tanh(np.log(batch) - 1.0) / (1.0 + length / 500)


def test_a_smooth_departure_is_foretold_between_the_points() -> None:
    found = fit_correction(GRID, np.array([departure(*each) for each in GRID]))
    for unseen in ((2, 30), (5, 120), (12, 500), (6, 700)):
        assert found.factor(*unseen) == pytest.approx(departure(*unseen), rel=0.03)
        assert abs(departure(*unseen) - 1) < 0.3


def test_far_from_every_point_the_terms_stand_alone() -> None:
    found = fit_correction(GRID, np.full(len(GRID), 1.2))
    assert found.factor(4, 100) == pytest.approx(1.2, rel=0.02)
    assert found.factor(10**9, 10**9) == pytest.approx(1.0, abs=1e-6)


def test_noise_hardly_moves_anything() -> None:
    draw = np.random.default_rng(0)
    moved = []
    for _ in range(20):
        found = fit_correction(GRID, np.exp(draw.normal(0, 0.05, len(GRID))))
        moved.append(np.mean([abs(found.factor(b + 1, s + 9) - 1) for b, s in GRID]))
    assert np.mean(moved) < 0.02


def test_few_points_or_equal_ones_give_none() -> None:
    assert fit_correction(GRID[:7], np.full(7, 1.3)) is NO_CORRECTION
    assert fit_correction(GRID, np.ones(len(GRID))) is NO_CORRECTION
    assert NO_CORRECTION.factor(3, 0) == 1.0
