"""ExeGPT's evaluation: every part can be called, and its figures beside the paper's."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.reproduction.latency_bounds.__main__ import PARTS, main
from benchmarks.reproduction.latency_bounds.claims import simulated
from benchmarks.reproduction.latency_bounds.models import (
    MODELS,
    TASKS,
    Layout,
    Pipeline,
)
from benchmarks.reproduction.latency_bounds.schedules import RraSchedules, WaaSchedules, divided_of
from benchmarks.reproduction.latency_bounds.search_costs import Swept
from benchmarks.reproduction.latency_bounds.setting import QUANTILE, Placed, Setting
from benchmarks.reproduction.latency_bounds.tables import PAPER_SCHEDULES, as_published

OPT_13B, S = MODELS[0], TASKS["S"]


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting(OPT_13B, S.lengths)


def test_help_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert all(f"\n{part} " in printed for part in PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_options(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([part, "--help"])
    assert not ended.value.code
    assert f"latency_bounds {part}" in capsys.readouterr().out


def test_hosts_take_their_seconds_of_every_pass(setting: Setting) -> None:
    both = [Setting(OPT_13B, S.lengths, host_s).pipeline.times for host_s in (0.0, 0.5)]
    passes = [(x.prefill_s(3, 40), x.decode_s(7, 90), x.decode_hop_s(7)) for x in both]
    more = [float((hosted - free).sum()) for free, hosted in zip(*passes, strict=True)]
    assert more == pytest.approx([0.5, 0.5, 0.0])


def test_points_at_which_a_control_falls_are_counted() -> None:
    """Of 3 steps along rows two are known, of which one falls by 2; none does by more than that."""
    latency_s = np.array([[1.0, 3.0], [4.0, 2.0], [5.0, np.nan]])
    swept = Swept(("a", "b"), np.ones((3, 2)), latency_s)
    assert swept.falls("b", 1.0, 0.1) == "(50.0, 0.0)"
    assert swept.falls("b", 2.0, 0.1) == "(0.0, 0.0)"
    assert swept.falls("a", 0.5, 0.1) == "(33.3, 0.0)"


@pytest.mark.rare
def test_ours_serve_more_than_ft(capsys: pytest.CaptureFixture[str]) -> None:
    main(["throughput", "--models", "13B", "--tasks", "S"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    cells = [row for row in rows if row[0] == f"| {OPT_13B.label}"]
    assert len(cells) == 4
    for ft, rra, waa in ((row[3], row[7], row[8]) for row in cells):
        assert max(float(rra), float(waa)) > 1.5 * float(ft)


@pytest.mark.parametrize("number", [0, 2, 3])
def test_the_schedules_of_table_6_do_what_was_measured(setting: Setting, number: int) -> None:
    row = PAPER_SCHEDULES[number]
    found = as_published(setting, row)
    assert found.latency_s == pytest.approx(row.latency_s, rel=0.15)
    assert found.requests_per_s == pytest.approx(row.requests_per_s, rel=0.15)


def test_events_of_rra_are_near_its_timeline(setting: Setting) -> None:
    costs = OPT_13B.costs
    pipeline = Pipeline.of(costs, costs.cluster.devices, Layout(4, 4), setting.lengths)
    assert pipeline is not None
    schedules = RraSchedules(setting, Layout(4, 4), pipeline, QUANTILE)
    point = schedules.newcomers.index(24), schedules.steps.index(16)
    performance = schedules.performance(point)
    seen = simulated(Placed(schedules, point, performance), 1000, 0)
    assert seen.requests_per_s == pytest.approx(performance.requests_per_s, rel=0.05)
    assert seen.latency_s(QUANTILE) == pytest.approx(performance.latency_s, rel=0.1)


def test_waa_has_as_many_newcomers_as_end(setting: Setting) -> None:
    divided = divided_of(setting, Layout(2, 2), 2)
    assert divided is not None
    schedules = WaaSchedules(setting, "waa-c", Layout(2, 2), divided)
    for newcomers in (1, 2, 3):
        (decoding,) = point = schedules.point_of(newcomers)
        schedule = schedules.schedule_at(point)
        assert decoding == pytest.approx(newcomers * (S.outputs.mean - 1), rel=0.02)
        assert (schedule.prefill_requests, schedule.decode_requests) == (newcomers, decoding)
