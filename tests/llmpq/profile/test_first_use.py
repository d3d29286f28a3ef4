"""Plans for this machine's CPU rest on its own times, which are measured once."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmpq import Cluster, Workload
from llmpq.profile import first_use
from llmpq.profile.first_use import OFF, CpuTimes, with_own_times
from planner.cluster.file import local_cpus
from planner.cluster.spec import ClusterSpec
from planner.options import PlanOptions
from planner.profiles.layer_terms import HEAD
from planner.profiles.rows import read_profiles, write_profiles
from quant.common.errors import SpecError
from quant.kept_loops import loops_folder
from tests.actors.profiling.test_layers import TINY

HERE = ClusterSpec.from_dict(
    {"name": "here", "nodes": [{"name": "any", **local_cpus(1), "threads": 1, "memory_gib": 1.0}]}
)


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny model, an empty cache, and a child that is this process and passes everything once."""

    def here(task: Mapping[str, Any], threads: int) -> None:
        first_use.measure_here(task)

    monkeypatch.delenv(OFF)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(loops_folder()))  # compiled once for all tests
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(first_use, "_measure_in_child", here)
    monkeypatch.setattr(CpuTimes, "others_since", lambda *_: 0.0)
    monkeypatch.setattr(first_use, "_DESIGN", replace(first_use._DESIGN, rounds=1))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_times_are_measured_once_and_planned_with(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Cluster(HERE).plan(model, Workload(4, 16, 8), bits=[4, 8, 16])
    assert "measuring this CPU's kernels, once: layers of" in capsys.readouterr().err
    assert plan.spec.origin is not None
    path = str(plan.spec.origin.options.profiles)
    rows = read_profiles(path)
    assert {row.bits for row in rows} == {3, 4, 5, 6, 8, 16}
    assert {row.bits for row in rows if row.layer.kind == HEAD} == {6, 8, 16}
    (stage,) = plan.stages
    assert f"profile rows of {Path(path).name}" in stage.provenance
    assert "estimated" not in stage.provenance
    for options in (PlanOptions(), PlanOptions(bits=(6, 16))):
        again = with_own_times(HERE, model, options)
        assert (again.profiles, capsys.readouterr().err) == (path, "")
    monkeypatch.setattr(
        first_use, "_measure_in_child", lambda task, threads: write_profiles(task["path"], ())
    )
    float32 = with_own_times(HERE, model, PlanOptions(dtype="float32"))
    assert float32.profiles != path


def test_times_of_a_busy_cpu_serve_until_it_is_idle(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(while_measured: float, before: float = 0.0) -> tuple[str, str]:
        monkeypatch.setattr(CpuTimes, "others_since", lambda *_: while_measured)
        monkeypatch.setattr(first_use, "others_now", lambda: before)
        name = Path(str(with_own_times(HERE, model, PlanOptions()).profiles)).name
        return name, capsys.readouterr().err

    def quickly(task: Mapping[str, Any], threads: int) -> None:
        write_profiles(task["path"], ())

    monkeypatch.setattr(first_use, "_measure_in_child", quickly)
    busy = pytest.warns(UserWarning, match="while other programs had 37 % of it")
    with busy:
        first, said = planned(0.37)
    assert first.endswith("-busy-37.csv")
    assert "kernels, once" in said
    with busy:
        assert planned(0.0, before=0.4) == (first, "")
    with busy:  # others came in between
        name, said = planned(0.5)
    assert name == first
    assert "kernels, again, as others had 37 % of it" in said
    quiet, said = planned(0.02)
    assert "again" in said
    assert planned(0.9) == (quiet, "")
    names = {each.name for each in (tmp_path / "cache" / "llmpq" / "cpu_times").glob("*.csv")}
    assert names == {quiet, first, first.replace("37", "50")}  # plans may name them


def test_nothing_is_measured_where_it_is_not_wanted_or_the_machine_is_another(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = PlanOptions(profiles="times.csv")
    assert with_own_times(HERE, model, named) is named
    off = PlanOptions(no_measuring=True)
    assert with_own_times(HERE, model, off) is off
    node = {"accelerators": {"CPU": 1}, "memory_gib": 1.0, "threads": (os.cpu_count() or 1) + 1}
    larger = ClusterSpec.from_dict({"name": "larger", "nodes": [{"name": "other", **node}]})
    gpu = ClusterSpec.from_counts(["T4"], [1])
    for cluster in (larger, gpu):
        assert with_own_times(cluster, model, PlanOptions()).profiles is None
    monkeypatch.setenv(OFF, "1")
    assert with_own_times(HERE, model, PlanOptions()).profiles is None
    assert not (tmp_path / "cache").exists()


def test_what_cannot_be_measured_is_estimated(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(task: Mapping[str, Any], threads: int) -> None:
        raise SpecError("no torch")

    monkeypatch.setattr(first_use, "_measure_in_child", fails)
    with pytest.warns(UserWarning, match="no torch.*estimated"):
        assert with_own_times(HERE, model, PlanOptions()).profiles is None


def test_what_takes_too_long_is_not_tried_again(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(task: Mapping[str, Any], threads: int) -> None:
        raise subprocess.TimeoutExpired("measuring", 120)

    monkeypatch.setattr(first_use, "_measure_in_child", hangs)
    with pytest.warns(UserWarning, match="not all within 120 s.*estimated"):
        first = with_own_times(HERE, model, PlanOptions())
    assert "measuring" in capsys.readouterr().err
    assert with_own_times(HERE, model, PlanOptions()) == first
    assert capsys.readouterr().err == ""
    assert read_profiles(str(first.profiles)) == ()
    plan = Cluster(HERE).plan(model, Workload(4, 16, 8), bits=[8, 16])
    assert plan.stages[0].provenance.startswith("CPU estimated")


def test_nothing_is_measured_for_what_cannot_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmpq.cluster.with_own_times", lambda *_: pytest.fail("was measured"))
    with pytest.raises(SpecError, match="shared_tokens is 9, but prompts have at most 8 tokens"):
        Cluster.from_counts(["T4"], [1]).plan("opt-125m", Workload(2, 8, 4), shared_tokens=9)
