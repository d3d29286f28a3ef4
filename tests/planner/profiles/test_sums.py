"""Measured sums of groups: the line fitted to them, its use by the planner, and bad files."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cluster.groups import group_of
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.profiles.links import (
    SumRow,
    fit_sums,
    read_measured,
    sums_beside,
    sums_path,
)
from planner.profiles.rows import write_table
from planner.profiles.sensitivity import default_sensitivity
from planner.search.request import cost_model, files_of_costs
from planner.workload import Workload
from quant.common.errors import SpecError
from tests.planner.plan_alone import find_plan
from tests.planner.problems import FOUR_BITS

CLUSTER = ClusterSpec.from_counts(["T4"], [4])
SIZES = (4096, 65536, 1 << 20, 16 << 20)
HEADER = "version,accelerator,degree,summed_bytes,seconds,spread,repetitions"
GOOD = "1,T4,2,4096,0.001,0.1,9"
LAYER_HEADER = "device,model,h1,h2,prompt_length,context_length,phase,bits,batch_size,ms_per_layer"


def line(degree: int, latency_s: float, s_per_byte: float) -> tuple[SumRow, ...]:
    return tuple(
        SumRow("T4", degree, size, latency_s + size * s_per_byte, 0.1, 30) for size in SIZES
    )


def test_a_line_is_found_again_for_each_degree() -> None:
    two, four = fit_sums((*line(4, 3e-4, 1e-9), *line(2, 1e-4, 2e-10)), "t.sums.csv")
    assert (two.accelerator, two.degree, two.source) == ("T4-16GB", 2, "t.sums.csv")
    assert two.latency_s == pytest.approx(1e-4)
    assert two.s_per_byte == pytest.approx(2e-10)
    assert four.degree == 4
    assert four.seconds(10**6) == pytest.approx(1.3e-3)
    assert fit_sums(line(2, 1e-4, 1e-9)[:1]) == ()


def test_what_does_not_grow_has_no_negative_term() -> None:
    falling = [SumRow("T4", 2, size, 1e-3 / size, 0.0, 1) for size in SIZES]
    (found,) = fit_sums(falling)
    assert found.latency_s >= 0
    assert found.s_per_byte >= 0


def test_costs_take_them_from_beside_the_profile(tmp_path: Path) -> None:
    profile = tmp_path / "times.csv"
    profile.write_text(LAYER_HEADER + "\n")
    write_table(sums_path(profile), SumRow, line(2, 1e-3, 0.0))
    shape, options = model_shape("opt-13b"), PlanOptions(profiles=profile, bits=FOUR_BITS)
    sensitivity = default_sensitivity(shape, options.bits)
    found = cost_model(CLUSTER, shape, Workload(8, 128, 10), options, sensitivity)
    sums_path(profile).unlink()
    before = cost_model(CLUSTER, shape, Workload(8, 128, 10), options, sensitivity)
    two, four = (group_of(CLUSTER.devices[:degree]) for degree in (2, 4))
    decode = (16, 8, 128, "float16")
    longer = [
        found.latency.layer_decode_s(group, *decode) - before.latency.layer_decode_s(group, *decode)
        for group in (two, four)
    ]
    estimated = found.latency.provenance(four, "float16", (16,))
    assert longer[0] > 1.5e-3  # two sums a layer of a millisecond each
    assert longer[1] == 0
    assert "measured (times.sums.csv)" in found.latency.provenance(two, "float16", (16,))
    assert "estimated by its links" in estimated
    assert found.cluster.fingerprint() != before.cluster.fingerprint()
    assert sums_path(profile) in files_of_costs(options)


def test_a_plan_of_groups_is_made_with_them(tmp_path: Path) -> None:
    profile = tmp_path / "times.csv"
    profile.write_text(LAYER_HEADER + "\n")
    shape, workload = model_shape("opt-13b"), Workload(8, 128, 10)
    options = PlanOptions(profiles=profile, group=10, tensor_parallel=2)
    before = find_plan(CLUSTER, shape, "opt-13b", workload, options).plan
    write_table(sums_path(profile), SumRow, line(2, 5e-3, 0.0))
    after = find_plan(CLUSTER, shape, "opt-13b", workload, options).plan
    assert after.predicted.latency_s > before.predicted.latency_s
    assert "measured (times.sums.csv)" in after.stages[0].provenance


def test_rows_come_back_and_none_are_needed(tmp_path: Path) -> None:
    path = sums_path(tmp_path / "times.csv")
    assert path.name == "times.sums.csv"
    assert sums_beside(tmp_path / "times.csv") == ()
    rows = (*line(2, 1e-4, 1e-9), *line(8, 1 / 3, 1e-9))
    write_table(path, SumRow, rows)
    assert read_measured(path, SumRow) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2", ":1: the columns must be version,accelerator"),
        (f"{HEADER}\n{GOOD.replace('1,T4', '2,T4')}", "version 2 of a newer llmpq"),
        (f"{HEADER}\n{GOOD.replace('T4', 'X9')}", ":2: accelerator is 'X9'"),
        (f"{HEADER}\n{GOOD.replace('T4,2', 'T4,1')}", ":2: degree is '1'"),
        (f"{HEADER}\n{GOOD.replace('T4,2', 'T4,16')}", ":2: degree is '16'"),
        (f"{HEADER}\n{GOOD.replace('0.001', 'inf')}", ":2: seconds is 'inf'"),
        (f"{HEADER}\n{GOOD.replace('4096', '0')}", ":2: summed_bytes is '0'"),
        (f"{HEADER}\n{GOOD},1", "as many fields"),
    ],
)
def test_bad_rows_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "times.sums.csv"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        read_measured(path, SumRow)
