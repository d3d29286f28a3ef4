"""Tables of a terminal: what a plan for a whole job says beside one for a batch."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console, RenderableType

from llmpq.report.job_answers import job_answers, job_remarks
from llmpq.tables import comparison_table, front_table, plan_table
from planner.plan.spec import Baseline
from planner.search.tradeoffs.front import FrontPoint
from tests.llmpq.jobs_of_prompts import BALANCED, job_plan, small_plan


def lines(table: RenderableType) -> list[str]:
    console = Console(width=400)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


def test_a_job_is_in_the_headline_and_its_answers_come_first_below_the_table() -> None:
    plan = replace(job_plan(), beside=replace(job_plan().beside, beaten_by=BALANCED))
    shown = [line.strip() for line in lines(plan_table(plan))]
    text = " ".join(shown)
    assert "3,000 prompts, 96 in flight (mean 200 prompt tokens, 100 new; slots of 450" in text
    answers = [answer.text for answer in job_answers(plan)]
    first = shown.index(answers[0])
    assert shown[first - 1].startswith("└")
    expected = [*answers, *job_remarks(plan)]
    assert shown[first : first + len(expected)] == expected
    assert "predicted: 980 s for the job, 306 tokens/s; * slowest stage of a phase" in shown


def test_a_batch_is_told_as_ever() -> None:
    plan = small_plan()
    text = " ".join(line.strip() for line in lines(plan_table(plan)))
    assert "1 prompt of 8 tokens, 2 new; micro-batches 1 (prefill), 1 (decode)" in text
    p = plan.predicted
    assert (
        f"predicted: {p.latency_s:.4g} s a batch, {p.tokens_per_s:.4g} tokens/s (prefill "
        f"{p.prefill_s:.4g} s, decode {p.decode_s:.4g} s); * slowest stage of a phase"
    ) in text
    assert "in flight" not in text
    assert "cost" not in text


def test_baselines_and_fronts_of_a_job_are_in_seconds_for_the_job() -> None:
    uniform = Baseline("uniform", 8, 1960.0, 153.0, 0.3)
    job, batch = (replace(each, baselines=(uniform,)) for each in (job_plan(), small_plan()))
    line = "uniform (8 bit): 1960 s {}, sensitivity 0.3; this plan is 2.00 times as fast"
    assert line.format("for the job") in lines(plan_table(job))
    beside = "\n".join(lines(comparison_table(job)))
    assert "s for the job" in beside
    assert "2.00x" in beside
    assert "s a batch" in "\n".join(lines(comparison_table(batch)))
    points = [FrontPoint(1.0, 2.0, 3.0, 4.0, 6, 5.0, 8.0)]
    assert "s for the job" in "\n".join(lines(front_table(points, is_job=True)))
    assert "s a batch" in "\n".join(lines(front_table(points)))
