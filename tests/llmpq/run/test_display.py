"""The table of a finished run fits the terminal too, with planned beside measured times."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from rich.console import Console

from actors.stage_figures import LatencyCounts, PhaseWork, StageStats
from llmpq.report.latency import LatencyFigures, PlannedLatency
from llmpq.run.display import summary_table
from llmpq.run.summary import RunSummary
from tests.llmpq.report.test_plan_tables import eight_stages

STATS = StageStats(
    busy_s=1234.5,
    prefill_tokens=1,
    decode_tokens=1,
    micro_batches=10240,
    weight_bytes=33 * 2**30,
    kv_cache_bytes=9 * 2**30,
    prefill=PhaseWork(10, 1, 1, 1.0, 10, 12.34, 10),
    decode=PhaseWork(10, 1, 1, 1.0, 10, 0.1234, 10),
)


@pytest.mark.parametrize("width", [80, 120, 160])
def test_a_run_fits(width: int) -> None:
    plan, _ = eight_stages("rack-7-of-building-2", (16, 8))
    planned = PlannedLatency(0.99, 11.0, 20.0)
    latency = LatencyFigures.of([LatencyCounts.of([0.5, 12.0])], planned)
    summary = RunSummary(1200, 2, 480_000, 12.5, 2469.0, (STATS,) * 8, latency=latency)
    console = Console(width=width)
    with console.capture() as captured:
        console.print(summary_table(plan, summary))
    shown = captured.get().splitlines()
    assert max(map(cell_len, shown)) <= width
    together = "".join(captured.get().split())
    for stage in plan.stages:
        assert f"V100-SXM2-32GB:{stage.index}" in together
    for figure in ("1234.5s", "50%", "10240", "33.00GiB", "9.00GiB"):
        assert together.count(figure) == 8, figure
    words = "(planned 11.00 s, within the bound of 20.00 s), half within"
    assert "".join(words.split()) in together
    assert "1,200 prompts (2 with errors)" in " ".join(captured.get().split())
    assert "…" not in together
