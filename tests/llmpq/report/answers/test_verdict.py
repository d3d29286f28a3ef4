"""The verdict comes first, and a word for quality says what it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from llmpq.report import report_page
from llmpq.report.answers.menu import menu
from llmpq.report.answers.verdict import quality_word, verdict
from planner.plan.forecasts import PerplexityForecast
from planner.plan.spec import MoreDevices, PlanChoice, PlanSpec
from tests.llmpq.jobs_of_prompts import job_plan, small_plan
from tests.llmpq.report.pages import Page


def with_bits(bits: Sequence[int]) -> PlanSpec:
    plan = small_plan()
    (stage,) = plan.stages
    layers = len(stage.layers)
    bitwidths = tuple(bits[layer * len(bits) // layers] for layer in range(layers))
    return replace(plan, stages=(replace(stage, bitwidths=bitwidths),))


@pytest.mark.parametrize(
    ("bits", "word"),
    [
        ((16,), "that of 16 bit"),
        ((16, 8), "close to 16 bit"),
        ((16, 8, 4), "a little below 16 bit"),
        ((8, 4, 4), "below 16 bit"),
        ((8, 8, 8, 8, 4, 3), "below 16 bit"),
        ((4, 3), "clearly below 16 bit"),
    ],
)
def test_quality_is_a_word_for_the_bits(bits: Sequence[int], word: str) -> None:
    plan = with_bits(bits)
    found = quality_word(plan)
    assert found.word == word
    counts = [each for stage in plan.stages for each in stage.bitwidths]
    for each in set(bits):
        assert f"{counts.count(each)} at {each} bit" in found.basis
    assert ("llmpq indicator --perplexity" in found.basis) == (word != "that of 16 bit")


def test_quality_is_in_perplexity_where_it_was_measured() -> None:
    plan = replace(small_plan(), perplexity=PerplexityForecast(44.1, 0.123, 0.05, 0.23, 7))
    assert quality_word(plan).word == "perplexity +0.123"
    assert "+0.123 over 44.1 at 16 bit" in quality_word(plan).basis
    assert verdict(plan).sentence.endswith("with perplexity +0.123 expected.")


def test_the_verdict_stands_before_the_menu_and_the_menu_before_the_reasons() -> None:
    text = Page(report_page(job_plan())).text
    order = [
        text.index(part)
        for part in (
            "It fits.",
            "16 min 20 s",
            "Mind",
            "Plans to choose from",
            "--quality high",
            "Why these bits",
        )
    ]
    assert order == sorted(order)
    assert "306 new tokens per second, at a quality close to 16 bit." in text


def test_what_makes_the_figures_uncertain_is_a_warning() -> None:
    plan = job_plan()
    (estimate,) = verdict(plan).warnings
    assert "llmpq profile" in estimate
    stage = replace(plan.stages[0], provenance="T4-16GB measured", emulated=True)
    late = replace(plan, stages=(stage,), solver=replace(plan.solver, gap=0.0217))
    search, emulated = verdict(late).warnings
    assert "up to 2.17\N{NO-BREAK SPACE}% better" in search
    assert "emulated" in emulated
    assert verdict(late).rests_on[0].startswith("Seconds: from measured layer times of every")


def test_the_menu_leaves_out_what_gains_less_than_a_percent() -> None:
    plan = job_plan()
    names = [course.name for course in menu(plan)]
    assert names == [
        "this plan (balanced)",
        "high",
        "fast",
        "all layers at 16 bit",
        "1 more T4-16GB",
        "2 more V100-SXM2-32GB",
    ]
    hardly = MoreDevices("T4-16GB", "a", 1, PlanChoice(96, 309.0, 0.2, 6.0))  # 0.98 %
    less = replace(plan, beside=replace(plan.beside, more_devices=(hardly,)))
    assert not any("more" in course.name for course in menu(less))
    text = Page(report_page(less)).text
    assert "one more device of any kind: less than 1 % more tokens/s" in text
    seconds = {course.name: course.seconds for course in menu(plan)}
    assert seconds["fast"] == pytest.approx(306 * 980 / 310)
