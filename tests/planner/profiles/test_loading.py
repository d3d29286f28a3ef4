"""Measured loading: rows written and read again, and the loading time of a plan by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.profiles.csv_table import read_table, write_table
from planner.profiles.loading import LoadRow, Origin, loading_path, loading_s
from planner.search.find import find_plan
from planner.workload import Workload
from quant.common.errors import SpecError
from quant.common.units import MIB


def load(bits: int, origin: Origin, seconds: float, device: str = "T4") -> LoadRow:
    backend = "plain" if bits == 16 else "rows"
    return LoadRow(
        device, "opt", "float16", 0, bits, backend, origin, seconds, 10 * MIB, 5 * MIB, 3
    )


@pytest.fixture(scope="module")
def plan() -> PlanSpec:
    cluster = ClusterSpec.from_counts(["T4"], [3])
    options = PlanOptions(bits=(4, 16), keep_all_devices=True, group=4)
    return find_plan(cluster, model_shape("opt-30b"), "opt-30b", Workload(8, 128, 10), options)


def test_the_slowest_stage_counts(plan: PlanSpec) -> None:
    name = plan.stages[0].accelerator
    rows = [
        load(16, "checkpoint", 1.0, name),
        *(load(4, "checkpoint", s, name) for s in (2.9, 3.0, 9.0)),
        load(4, "cache", 0.5, name),
        load(4, "cache", 0.1, "A100"),
    ]
    four = [sum(b == 4 for b in stage.bitwidths) for stage in plan.stages]
    full = [len(s.bitwidths) - n for s, n in zip(plan.stages, four, strict=True)]
    assert max(four) > 0
    for origin, each in (("checkpoint", 3.0), ("cache", 0.5)):
        # layers of twice the size take twice as long
        wanted = max(2 * (n * each + f) for n, f in zip(four, full, strict=True))
        found = loading_s(rows, plan, 20 * MIB, "cache" if origin == "cache" else "checkpoint")
        assert found == pytest.approx(wanted)
    assert loading_s(rows[:1], plan, MIB, "checkpoint") is None
    assert loading_s([replace(r, dtype="float32") for r in rows], plan, MIB, "cache") is None
    assert loading_s([replace(r, threads=3) for r in rows], plan, MIB, "cache") is None


def test_rows_come_back(tmp_path: Path) -> None:
    path = loading_path(tmp_path / "t.csv")
    assert path.name == "t.loading.csv"
    rows = (load(3, "cache", 1 / 3), load(16, "checkpoint", 2.0))
    write_table(path, LoadRow, rows)
    assert read_table(path, LoadRow) == rows
    path.write_text(path.read_text().replace(",3,rows", ",5,rows"))
    with pytest.raises(SpecError, match=":2: bits is '5'"):
        read_table(path, LoadRow)
