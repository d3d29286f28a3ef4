"""The curve from summed sensitivity to perplexity, and plans that keep a bound of perplexity."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.profiles.perplexity_fit import fit_perplexity
from planner.profiles.sensitivity import (
    MeasuredPoint,
    OmegaContent,
    WeighedPoint,
    default_sensitivity,
    save_omega,
)
from planner.workload import Workload
from quant.common.errors import BoundNotMetError, SpecError
from tests.planner.plan_alone import find_plan

FULL = WeighedPoint(0.0, 20.0, 0.0)


def on_curve(omegas: list[float], exponent: float, noise: float = 0.0) -> list[WeighedPoint]:
    factors = np.exp(noise * np.array([1, -1, 0.5, -0.5, 0, 0])[: len(omegas)])
    return [
        FULL,
        *(
            WeighedPoint(o, 20 + 0.3 * o**exponent * factor, 0.0)
            for o, factor in zip(omegas, factors, strict=True)
        ),
    ]


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.6])
def test_points_on_a_power_law_give_it_back(exponent: float) -> None:
    fit = fit_perplexity(on_curve([0.1, 0.5, 2, 9], exponent), "omega")
    assert (fit.coefficient, fit.exponent) == pytest.approx((0.3, exponent))
    assert fit.baseline == 20
    assert fit.forecast(1.0)[0] == pytest.approx(0.3)
    assert fit.forecast(0)[0] == 0
    assert fit.omega_within(0.3) == pytest.approx(1, rel=1e-6)
    assert fit.omega_within(1e9) == 9  # never beyond what was measured


def test_bound_is_conservative_and_inverse_to_the_upper_end() -> None:
    points = on_curve([0.1, 0.3, 1, 3, 9, 20], 1.0, noise=0.3)
    fit = fit_perplexity(points, "omega")
    for point in points[1:]:
        assert point.perplexity - 20 <= fit.forecast(point.omega)[2] * (1 + 1e-9)
    bound = fit.omega_within(0.5)
    increase, low, high = fit.forecast(bound)
    assert high == pytest.approx(0.5)
    assert low < increase < 0.5
    calm = fit_perplexity(on_curve([0.1, 0.3, 1, 3, 9, 20], 1.0, noise=0.1), "omega")
    assert calm.omega_within(0.5) > bound


def test_interval_holds_nineteen_of_twenty_plans() -> None:
    """Fits of ten noisy points; the upper end covers a new point as often as it says, or more."""
    random, covered = np.random.default_rng(0), 0
    for _ in range(400):
        omegas = random.uniform(0.1, 10, 11)
        above = 0.3 * omegas * np.exp(0.3 * random.normal(size=11))
        points = [WeighedPoint(o, 20 + a, 0.0) for o, a in zip(omegas, above, strict=True)]
        fit = fit_perplexity([FULL, *points[:-1]], "omega")
        covered += above[-1] <= fit.forecast(omegas[-1])[2]
    assert 0.93 <= covered / 400 <= 0.99


def test_noise_is_no_point() -> None:
    """A perplexity below that at 16 bit, and one within its error, leave the curve as it is."""
    sound = on_curve([0.1, 0.5, 2], 1.0)
    noisy = [*sound, WeighedPoint(0.05, 19.9, 0.2), WeighedPoint(0.04, 20.3, 0.2)]
    assert fit_perplexity(noisy, "omega") == fit_perplexity(sound, "omega")


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "omega.json holds no perplexities measured at 16 bit.*llmpq indicator --perplexity"),
        (on_curve([1, 2, 3], 1.0)[1:], "no perplexities measured at 16 bit"),
        (on_curve([1, 2], 1.0), "2 of 3 measured perplexities .* 3 are needed"),
        (on_curve([1, 1, 1], 1.0), "3 are needed"),
        ([FULL, *(WeighedPoint(o, 20.1, 0.1) for o in (1, 2, 3))], "0 of 4"),
    ],
)
def test_too_little_measured(points: list[WeighedPoint], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        fit_perplexity(points, "omega.json")


SHAPE = model_shape("opt-125m")
BITS = (3, 4, 8, 16)
WORKLOAD = Workload(global_batch=8, prompt_length=128, new_tokens=32)


def omega_file(path: Path) -> Path:
    """Sensitivities of which a unit costs half a point of perplexity."""
    matrix = default_sensitivity(SHAPE, BITS) * np.linspace(2, 0.5, SHAPE.layers)[:, None]
    content = OmegaContent(BITS, SHAPE.fingerprint(), matrix)
    layers = SHAPE.layers
    chosen = [(bits,) * layers for bits in BITS]
    chosen += [(3,) * k + (4,) * (layers - k) for k in (3, 6)]
    points = tuple(MeasuredPoint(b, 10 + 0.5 * content.summed(b), 0.0) for b in chosen)
    save_omega(path, replace(content, points=points))
    return path


def planned(
    path: Path,
    gib: float = 0.76,
    clock: Callable[[], float] = time.perf_counter,
    **options: object,
) -> PlanSpec:
    cluster = ClusterSpec.from_counts(["T4", "V100"], [1, 1])
    quick = {
        "head": "last",
        "keep_all_devices": True,
        "prefill_micro_batch": 4,
        "memory_margin": 0.0,
        "head_bits": (16,),
    }
    small = [replace(device, memory_bytes=int(gib * 2**30)) for device in cluster.devices]
    return find_plan(
        replace(cluster, devices=tuple(small)),
        SHAPE,
        SHAPE.name,
        WORKLOAD,
        PlanOptions.of({"omega_file": path, "decode_micro_batch": 4, **quick, **options}),
        clock,
    ).plan


def test_plan_stays_within_the_perplexity_asked_for(tmp_path: Path) -> None:
    path = omega_file(tmp_path / "omega.json")
    omegas = []
    for most in (0.05, 0.4, 1.5):
        plan = planned(path, max_ppl_delta=most)
        forecast = plan.perplexity
        assert forecast is not None
        assert (forecast.baseline, forecast.max_increase, forecast.points) == (10, most, 5)
        assert forecast.max_omega == pytest.approx(2 * most, rel=1e-3)
        assert forecast.increase == pytest.approx(0.5 * plan.solver.sensitivity, rel=1e-3)
        assert forecast.high <= most * (1 + 1e-6)
        omegas.append(plan.solver.sensitivity)
    assert PlanSpec.from_json(plan.to_json()) == plan
    same = planned(path, max_omega=forecast.max_omega)
    assert [s.bitwidths for s in same.stages] == [s.bitwidths for s in plan.stages]
    assert omegas == sorted(omegas)
    assert omegas[0] < omegas[-1]


def test_bound_that_no_plan_keeps(tmp_path: Path) -> None:
    path = omega_file(tmp_path / "omega.json")
    with pytest.raises(BoundNotMetError, match=r"is sure to rise by at most 0\.05") as told:
        planned(path, gib=0.74, max_ppl_delta=0.05)
    named = re.search(r"A plan is found with --max_ppl_delta (\S+)", str(told.value))
    assert named is not None
    assert "omega" not in str(told.value)
    assert "sensitivity" not in str(told.value)
    found = planned(path, gib=0.74, max_ppl_delta=float(named[1]))
    assert 0.5 * found.solver.sensitivity == pytest.approx(told.value.reachable, rel=1e-2)


@pytest.mark.parametrize("ends_by_time", [False, True])
def test_a_search_that_ended_by_its_time_says_that_more_helps(
    ends_by_time: bool, tmp_path: Path
) -> None:
    path, now = omega_file(tmp_path / "omega.json"), count(step=int(ends_by_time))
    with pytest.raises(BoundNotMetError, match="is sure to rise by at most") as told:
        planned(path, gib=0.74, clock=lambda: next(now), max_ppl_delta=0.05, search_time_limit=5)
    hint = "before time was up (--search_time_limit gives more)"
    assert (hint in str(told.value)) == ends_by_time


def test_bound_without_measured_points(tmp_path: Path) -> None:
    path = omega_file(tmp_path / "omega.json")
    assert planned(path).perplexity is not None  # a forecast needs no bound
    bare = OmegaContent(BITS, SHAPE.fingerprint(), default_sensitivity(SHAPE, BITS))
    save_omega(path, bare)
    assert planned(path).perplexity is None
    with pytest.raises(SpecError, match=r"omega\.json; .* holds no perplexities"):
        planned(path, max_ppl_delta=1.0)
    with pytest.raises(SpecError, match=r"sensitivity default.*llmpq indicator"):
        planned(path, omega_file=None, max_ppl_delta=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ppl_delta": 0.0}, "max_ppl_delta is 0.0; it must be a finite number above 0"),
        ({"max_ppl_delta": float("nan")}, "max_ppl_delta is nan"),
        ({"max_ppl_delta": 1.0, "max_omega": 1.0}, "max_omega and max_ppl_delta: give one"),
    ],
)
def test_bad_bounds(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        PlanOptions.of(options)
