"""A number is the same in the terminal and on the page, for plans of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from llmpq import Cluster, Job, Plan, Workload
from llmpq.cli import plan as plan_cli
from llmpq.report.page import report_page
from llmpq.report.plan_tables import comparison_table, front_table, latency_front_table, plan_table
from planner.explanation.what_if import WhatIfOptions
from planner.plan.parts import PerplexityForecast
from planner.search.find import FrontPoint
from tests.llmpq.bounded_plans import FRONTS, rra_plan, waa_plan
from tests.llmpq.jobs_of_prompts import job_plan
from tests.llmpq.report.pages import Page, measures, numbers
from tests.paths import DEMO_MODEL, SPECS

NO_QUESTIONS = WhatIfOptions(budget_s=0.0)


@cache
def demo_batch() -> Plan:
    cluster = Cluster.from_yaml(SPECS / "demo_mixed_cpu.yaml")
    return cluster.plan(DEMO_MODEL, Workload(4, 64, 12), theta=1.0)


@cache
def demo_job() -> Plan:
    cluster = Cluster.from_yaml(SPECS / "demo_mixed_cpu.yaml")
    return cluster.plan(DEMO_MODEL, Job.of(12, 64, 12), in_flight=4)


@cache
def two_types() -> Plan:
    cluster = Cluster.from_counts(["T4", "V100-SXM2-32GB"], [1, 1])
    return cluster.plan("opt-6.7b", Workload(8, 64, 16), theta=2.0)


def with_perplexity() -> Plan:
    plan = demo_batch()
    forecast = PerplexityForecast(44.1, 0.123, 0.0456, 0.2345, 7, 0.3, 1.234)
    return Plan(replace(plan.spec, perplexity=forecast), plan.costs)


def told_job() -> Plan:
    return Plan(job_plan())


def in_turns() -> Plan:
    return Plan(rra_plan())


def apart() -> Plan:
    return Plan(waa_plan("waa-m"))


MADE_BY_HAND = (told_job, in_turns, apart)
PLANS = (demo_batch, demo_job, two_types, with_perplexity, *MADE_BY_HAND)


@pytest.mark.parametrize("made", PLANS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("width", [80, pytest.param(160, marks=pytest.mark.rare)])
def test_every_number_of_the_terminal_is_on_the_page(made: Callable[[], Plan], width: int) -> None:
    plan = made()
    explained = None if made in MADE_BY_HAND else plan.explain(NO_QUESTIONS)
    limits = () if made in MADE_BY_HAND else plan.limits
    console = Console(width=width)
    with console.capture() as captured:
        console.print(plan_table(plan.spec, limits))
        if plan.spec.latency is None:
            console.print(comparison_table(plan.spec))
    terminal = " ".join(captured.get().split())
    page = Page(report_page(plan.spec, explained)).text
    assert len(numbers(terminal)) > 20
    assert numbers(terminal) - numbers(page) == set()
    assert measures(terminal) - measures(page) == set()


def test_a_front_that_finds_the_plan_again_shows_its_theta_and_its_seconds(
    tmp_path: Path,
) -> None:
    """28.16 and 28.20 s, theta 1.122 and 1: two searches that end at one plan."""
    spec = two_types().spec
    seconds, sensitivity = spec.predicted.latency_s, spec.solver.sensitivity
    found_again = FrontPoint(2.122, 1.0014 * seconds, 1.0, 1.0, 8, sensitivity, 12.0)
    other = FrontPoint(9.0, 2 * seconds, 1.0, 10.0, 8, sensitivity / 2, 13.0)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(front_table([found_again, other], plan=spec))
    page = Page(report_page(spec, None, (found_again, other))).text
    assert numbers(captured.get()) - numbers(page) == set()
    for text in (captured.get(), page):
        assert "2.122" not in text
    assert page.count("other theta") - page.count("another theta") == 1


@pytest.mark.parametrize("width", [80, 160])
def test_throughput_over_bounds_is_the_same_in_both(width: int) -> None:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(latency_front_table(FRONTS))
    page = Page(report_page(rra_plan(), None, FRONTS)).text
    terminal = " ".join(captured.get().split())
    assert len(numbers(terminal)) > 10
    assert numbers(terminal) - numbers(page) == set()
    assert measures(terminal) - measures(page) == set()


def test_the_command_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "page.html"
    devices = ["--device_names", "T4", "V100-SXM2-32GB", "--device_numbers", "1", "1"]
    asked = ["--model", "opt-6.7b", *devices, "--global_bz", "8", "--s", "64", "--n", "16"]
    words = [*asked, "--theta", "1", "--pareto", "--report", str(target)]
    assert plan_cli.main(words) == 0
    printed = capsys.readouterr().out
    told, _, last = printed.rstrip().rpartition("\n")
    assert last == f"wrote {target}; open it in a browser"
    page = Page(target.read_text(encoding="utf-8")).text
    assert measures(told) - measures(page) == set()
    assert numbers(told) - numbers(page) == set()
    assert f"llmpq plan {' '.join(words)}" in page
