"""What the kernel counts of other programs is told from what this one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmpq.profile.first_use import CpuTimes

SPIN = "import os\nwhile os.times().user < 0.3: pass"


def test_ticks_of_allowed_cpus_are_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
    lines = ("cpu 9 9 9 9 9 9 9 9 9 9", "cpu0 7 7 7 7 7 7 7 7 7 7", "intr 5 5")
    stat.write_text("\n".join([*lines, "cpu1 0 0 0 0 0 0 0 0 0 0", "cpu2 0 0 0 0 0 0 0 0 0 0"]))
    before = CpuTimes.now(stat)
    stat.write_text(
        "\n".join([*lines, "cpu1 1 2 3 600 5 6 7 8 9 9", "cpu2 0 0 0 400 0 0 0 99 0 0"])
    )
    after = CpuTimes.now(stat)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert after.passed_s == pytest.approx(1131 * tick_s)
    assert after.worked_s == pytest.approx(126 * tick_s)
    own = CpuTimes(after.worked_s, after.passed_s, before.own_s + 26 * tick_s)
    assert own.others_since(before) == pytest.approx(100 / 1131)
    assert CpuTimes.now(tmp_path / "none") == CpuTimes()
    assert CpuTimes().others_since(CpuTimes()) == 0.0


def test_ended_children_are_no_others() -> None:
    before = CpuTimes.now()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    after = CpuTimes.now()
    assert after.own_s - before.own_s >= 0.3
    with subprocess.Popen([sys.executable, "-c", SPIN + "\nprint(1, flush=True)\ninput()"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as busy:  # fmt: skip
        assert busy.stdout is not None
        busy.stdout.readline()
        meanwhile = CpuTimes.now()
    if meanwhile.passed_s == 0.0:
        pytest.skip("this kernel does not count")
    assert meanwhile.own_s - after.own_s < 0.3
    assert meanwhile.worked_s - after.worked_s > 0.25
    assert meanwhile.others_since(after) > 0
