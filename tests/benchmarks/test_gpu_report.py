"""A GPU report is assembled whatever its parts do: fail, crash, hang, or find nothing to run on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.findings import Findings, Place
from benchmarks.gpu.parts import PARTS, TIME_LIMIT_S, Part, choose
from benchmarks.gpu.report import PartResult, Report
from benchmarks.gpu.runner import NOT_RUN, Runner, child_environment
from quant.common.errors import DeviceError

MACHINE = {
    "gpu": "NVIDIA Toy", "capability": "9.0", "memory_bytes": 2**34, "multiprocessors": 7,
    "l2_bytes": 2**20, "driver": "1.2", "processor": "a CPU", "python": "3.12", "cuda": "13.0",
    "packages": {"torch": "2.11"}, "code": "abc",
}  # fmt: skip
FINDS = """
from pathlib import Path
import sys
from benchmarks.gpu.findings import Findings
findings = Findings(Path(sys.argv[1]))
table = findings.table("Times", what="{}", seconds="{:.2f}")
findings.row(table, "first", 0.5)
"""
ENDS = {
    "done": FINDS,
    "failed": FINDS + "raise ValueError('kernel 7 is wrong')",
    "crashed": FINDS + "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "missing": FINDS + f"findings.not_run('cupboard is missing'); sys.exit({NOT_RUN})",
    "silent": f"import sys; sys.exit({NOT_RUN + 1})",
}


def part(name: str, limit_s: float = 30.0) -> Part:
    return Part(name, f"Part {name}", limit_s, "none")


def command(each: Part, findings: Path, limit_s: float) -> Sequence[str]:
    return [sys.executable, "-c", ENDS[each.name], str(findings)]


def runner(folder: Path, deadline_s: float = 100.0, clock_s: float = 0.0) -> Runner:
    folder.mkdir(exist_ok=True)
    place = Place(folder, folder)
    return Runner(place, deadline_s, lambda: clock_s, command)


@pytest.mark.parametrize(
    ("name", "status", "error", "has_table"),
    [
        ("done", "done", "", True),
        ("failed", "failed", "ValueError: kernel 7 is wrong", True),
        ("crashed", "failed", "its process was ended by SIGSEGV", True),
        ("missing", "not run", "cupboard is missing", True),
        ("silent", "failed", "exit code 5", False),
    ],
)
def test_every_end_of_a_part_is_told(
    name: str, status: str, error: str, has_table: bool, tmp_path: Path
) -> None:
    result = runner(tmp_path).run(part(name))
    assert (result.status, result.error) == (status, error)
    tables = result.findings.get("tables", [])
    assert [table["rows"] for table in tables] == ([[["first", 0.5]]] if has_table else [])
    assert ("kernel 7" in result.log_tail) == (name == "failed")


def test_a_part_that_hangs_is_ended_and_what_it_had_is_kept(tmp_path: Path) -> None:
    """With what it had started: the pipe has an end once nobody holds it open for writing."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    grandchild = f"import signal; held = open({str(pipe)!r}, 'w'); signal.pause()"
    starts = f"import subprocess; subprocess.Popen([sys.executable, '-c', {grandchild!r}])"
    hanging = [sys.executable, "-c", f"{FINDS}{starts}; import signal; signal.pause()"]
    hangs = replace(runner(tmp_path), command=lambda _, path, limit_s: [*hanging, str(path)])
    result = hangs.run(part("hung", limit_s=2.0))
    assert (result.status, result.error) == ("timed out", "it ran past its limit of 2 s")
    assert result.findings["tables"][0]["rows"] == [["first", 0.5]]
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_without_time_left_a_part_is_not_begun(tmp_path: Path) -> None:
    late = runner(tmp_path, deadline_s=100.0, clock_s=90.0)
    result = late.run(part("failed"))
    assert (result.status, result.error) == ("not run", "no time was left")


def test_the_report_shows_all_parts_and_later_calls_add_to_it(tmp_path: Path) -> None:
    order = ["failed", "done", "missing"]
    report = Report.begun(tmp_path, MACHINE, dry_run=False)
    for name in ("missing", "failed"):
        report = report.with_result(runner(tmp_path).run(part(name)), order)
        report.save(tmp_path)
    again = Report.begun(tmp_path, MACHINE, dry_run=False)
    again = again.with_result(runner(tmp_path).run(part("done")), order)
    again.save(tmp_path)
    assert [each.name for each in again.results] == order
    content = json.loads((tmp_path / "gpu_report.json").read_text())
    assert [each["status"] for each in content["results"]] == ["failed", "done", "not run"]
    page = (tmp_path / "gpu_report.md").read_text()
    for expected in ("NVIDIA Toy", "| done | done |", "cupboard is missing", "| first | 0.50 |",
                     "    ValueError: kernel 7 is wrong"):  # fmt: skip
        assert expected in page
    assert "dry run" not in page
    for other in (dict(MACHINE, gpu="another"), dict(MACHINE, code="later")):
        assert Report.begun(tmp_path, other, dry_run=False).results == ()
    assert Report.begun(tmp_path, MACHINE, dry_run=True).results == ()


def test_a_dry_run_says_so(tmp_path: Path) -> None:
    Report(dict(MACHINE, gpu=None), dry_run=True).save(tmp_path)
    assert "no GPU was used" in (tmp_path / "gpu_report.md").read_text()


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["done"], 0),
        (["done", "not run"], 0),
        (["not run"], 1),
        (["done", "failed"], 1),
        (["done", "timed out"], 1),
    ],
)
def test_exit_code(statuses: list[str], code: int) -> None:
    results = tuple(PartResult(str(i), "", status) for i, status in enumerate(statuses))
    assert Report(MACHINE, False, results).exit_code == code


def test_parts_are_chosen_by_name_or_kind_in_their_own_order() -> None:
    assert choose([]) == list(PARTS)
    meant = [each for each in PARTS if each.name.split(".")[0] in ("plan", "kernels")]
    assert choose(["plan", "kernels"]) == meant
    assert 0 < meant.index(choose(["plan"])[0]) < len(meant) - 1
    assert [each.name for each in choose(["graphs.16bit"])] == ["graphs.16bit"]
    with pytest.raises(ValueError, match="no part 'kernel'; choose among tests, kernels"):
        choose(["kernel"])


def test_all_limits_together_fit_in_the_time_that_is_promised() -> None:
    assert sum(each.limit_s for each in PARTS) <= TIME_LIMIT_S == 35 * 60
    assert len({each.name for each in PARTS}) == len(PARTS)


@pytest.mark.parametrize(
    ("dry_run", "gpus", "before", "visible"),
    [
        (True, 1, "0", ""),
        (False, 1, None, "0"),
        (False, 1, "3,1", "3"),
        (False, 2, None, "0,1"),
        (False, 2, "3,1,2", "3,1"),
    ],
)
def test_a_part_sees_the_gpus_that_it_takes_or_none(
    dry_run: bool,
    gpus: int,
    before: str | None,
    visible: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    found = child_environment(Place(tmp_path, tmp_path, dry_run), gpus)
    assert found["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize("error", [RuntimeError("a kernel\nfailed"), DeviceError("a kernel")])
def test_what_is_tried_does_not_end_the_part(error: Exception, tmp_path: Path) -> None:
    findings = Findings(tmp_path / "found.json")
    with findings.trying("4 bit"):
        raise error
    assert findings.complaints == [f"4 bit: {type(error).__name__}: a kernel"]
    with pytest.raises(TypeError), findings.trying("8 bit"):
        raise TypeError


def test_rows_have_a_cell_for_every_column(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "found.json")
    table: Any = findings.table("", one_way="{}", other="{:.1f}")
    assert table.columns == ("one way", "other")
    with pytest.raises(ValueError, match="3 cells"):
        findings.row(table, 1, 2, 3)
