"""Stages slower than planned are named with the numbers; others never."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from actors.stage_figures import PhaseWork, QueueDepth, SharedPrompts, StageStats, Supervision
from llmpq import Plan
from llmpq.run.display import RunProgress, summary_table
from llmpq.run.meter import RunState
from llmpq.run.summary import RunSummary, slow_stages

PREFILL_S, DECODE_S = 0.5, 0.05


@pytest.fixture(scope="module")
def timed(plan: Plan) -> Any:
    """The plan with times of its own, followed at a scale of 2, and measured ones on stage 1."""
    stages = tuple(
        replace(stage, prefill_s=PREFILL_S, decode_s=DECODE_S) for stage in plan.spec.stages
    )
    measured = replace(stages[1], provenance="V100 fitted to 40 rows of somewhere.csv")
    return replace(plan.spec, time_scale=2.0, stages=(stages[0], measured, *stages[2:]))


def stats_with(prefill_s: float, decode_s: float, count: int = 100) -> StageStats:
    """`count` full micro-batches of each phase and as many of half the size, twice as slow."""

    def work(seconds: float) -> PhaseWork:
        full_s = count * seconds
        return PhaseWork(2 * count, 1, 1, full_s + 2 * count * seconds, count, full_s, count)

    prefill, decode = work(prefill_s), work(decode_s)
    busy_s = prefill.seconds + decode.seconds
    return StageStats(busy_s, 1, 1, 4 * count, 5, 5, prefill, decode)


FAST = stats_with(2 * PREFILL_S, 2 * DECODE_S)
SLOW = stats_with(2 * PREFILL_S * 1.19, 2 * DECODE_S * 1.25)


def test_a_stage_a_fifth_slower_is_named_with_numbers_and_remedy(timed: Any) -> None:
    (slow,) = slow_stages(timed, [FAST, SLOW, FAST])
    assert (slow.stage, slow.phase) == (1, "decode")
    text = str(slow)
    for part in ("stage 1", "25%", "125 ms", "100 ms", "llmpq profile", "--profiles"):
        assert part in text
    assert "estimated" not in text


def test_estimates_are_called_so(timed: Any) -> None:
    (slow,) = slow_stages(timed, [SLOW, FAST, FAST])
    assert slow.is_estimate
    assert "estimated from a datasheet" in str(slow)


def test_nothing_is_said_of_runs_that_follow_no_plan_or_are_too_short(timed: Any) -> None:
    both_slow = stats_with(10.0, 10.0)
    assert len(slow_stages(timed, [both_slow] * 3)) == 6
    assert slow_stages(replace(timed, time_scale=0.0), [both_slow] * 3) == ()
    few = stats_with(10.0, 10.0, count=19)
    assert slow_stages(timed, [few] * 3) == ()
    short = replace(timed, time_scale=0.01)
    assert slow_stages(short, [stats_with(0.006, 0.0006)] * 3) == ()
    assert slow_stages(timed, [FAST] * 3) == ()
    none = StageStats(0.0, 0, 0, 0, 5, 5)
    assert slow_stages(timed, [none] * 3) == ()


def test_progress_names_a_slow_stage_once(timed: Any) -> None:
    out = StringIO()
    state = RunState(1.0, 1, 2, 3, 4, 5.0, (), (), None, None, (FAST, SLOW, FAST))
    with RunProgress(Console(file=out), 10, lambda: 0.0, timed) as progress:
        progress.show(state)
        progress.show(state)
    assert out.getvalue().count("slower than planned") == 1


def test_summary_shows_rates_shares_and_times_beside_the_planned_ones(timed: Any) -> None:
    def text(plan: Any) -> str:
        out = StringIO()
        summary = RunSummary(12, 2, 480, 1.0, FAST.busy_s * 2, (FAST, SLOW, FAST))
        Console(file=out, width=200).print(summary_table(plan, summary))
        return out.getvalue()

    shown = text(timed)
    rows = [line for line in shown.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"])]
    assert "50%" in rows[0]
    for part in ("1.19 s", "1.00 s", "125.0 ms", "100.0 ms"):
        assert part in rows[1]
    seconds = FAST.busy_s * 2
    assert f"{480 / seconds:.3g} tokens/s, {10 / seconds:.3g} prompts/s" in shown
    assert "too short" not in shown
    assert shown.count("slower than planned") == 1
    unplanned = text(replace(timed, time_scale=0.0))
    assert "slower" not in unplanned
    assert "100.0 ms" in unplanned
    assert unplanned.count("1.00 s") == 2, "of the two stages' own times only"


def test_summary_tells_of_reservations_that_were_too_short_and_of_shared_heads(timed: Any) -> None:
    counts = Supervision(grown=7, parked=3, parked_tokens=250, recomputed=2, recomputed_tokens=90)
    shared = SharedPrompts(1, 512, 997, 997 * 512, 640_000)
    first = replace(FAST, queue=QueueDepth(0, 0, 4, 0, counts, shared=shared))
    out = StringIO()
    summary = RunSummary(12, 0, 480, 1.0, 2.0, (first, SLOW, FAST))
    Console(file=out, width=200).print(summary_table(timed, summary))
    assert (
        "12 reservations were too short: 7 grew, 3 requests were parked in host memory (250 "
        "tokens), 2 computed again (90 tokens)"
    ) in out.getvalue()
    assert (
        "a head of 512 tokens computed once for 997 rows: 509,952 of 640,000 prompt tokens not "
        "computed"
    ) in out.getvalue()
