"""Plans under a bound on latency in a terminal, and throughput over bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.cells import cell_len

from llmpq.tables import latency_front_table, plan_table
from planner.plan.spec import PlanSpec
from tests.llmpq.bounded_plans import FRONTS, rra_plan, waa_plan
from tests.llmpq.tables.test_plans import lines, words


def test_a_schedule_in_turns_in_words() -> None:
    text = words(plan_table(rra_plan()), 80)
    for told in (
        "99 % of requests within 20 s; 44 in flight",
        "throughput: 5.25 requests/s, 158 tokens/s",
        "latency: 99 % of requests within 18.20 s (20 s allowed), 9.10 s in the mean",
        "RRA: every stage prefills and decodes in turns. A turn prefills 6 requests in "
        "micro-batches of up to 2, then about 40 requests make 4 decode steps in 2 groups",
        "a request waits at most 1.30 s for its turn",
        "prompts of 200 tokens in the mean, 300 at most; answers of 30 in the mean, 99 % of at "
        "most 50, 50 at most",
        "solver: 417 schedules evaluated",
    ):
        assert told in text


@pytest.mark.parametrize(("kind", "by"), [("waa-c", "computing"), ("waa-m", "memory")])
def test_stages_that_prefill_have_a_table_of_their_own(kind: str, by: str) -> None:
    shown = lines(plan_table(waa_plan(kind)), 80)  # type: ignore[arg-type]
    text = " ".join(" ".join(shown).split())
    assert f"{kind.upper()}: 1 stage prefills turns of 4 requests" in text
    assert (
        f"2 others decode about 40 requests in 2 groups all the time; devices are divided by {by}"
        in text
    )
    first, second = (shown.index(f"stages that {does}:") for does in ("prefill", "decode"))
    assert "prefill" in shown[first + 1]
    assert "decode" not in shown[first + 1]
    assert "A100-SXM4-40GB" in " ".join(shown[first:second])
    assert "T4-16GB" in " ".join(shown[second:])
    assert "times of prefill stage 0: A100-SXM4-40GB" in text


def test_bits_of_both_copies_count() -> None:
    plan = waa_plan()
    assert plan.prefill_plan is not None
    stage = plan.prefill_plan.stages[0]
    fewer = replace(stage, bitwidths=(3,) * 10 + (16,) * (len(stage.layers) - 10))
    text = words(
        plan_table(replace(plan, prefill_plan=replace(plan.prefill_plan, stages=(fewer,)))), 80
    )
    assert "expected quality: clearly below 16 bit (24 at 16 bit of 24 layers where stages" in text
    assert "where stages decode, 14 at 16 bit and 10 at 3 bit where they prefill" in text
    assert "micro-batches 2 (prefill), 22 (decode)" in text


def test_what_is_known_is_told() -> None:
    plan = rra_plan(None)
    assert plan.latency is not None
    assert "(any time allowed)" in words(plan_table(plan), 80)
    rarer = replace(plan, latency=replace(plan.latency, quantile=0.999, prompts=3000))
    text = words(plan_table(rarer), 80)
    assert "99.9 % of requests within any time" in text
    assert "3,000 requests: about 9 min 41 s in all" in text  # 3000 / 5.25 and 9.1


@pytest.mark.parametrize("plan", [rra_plan(), waa_plan()], ids=["rra", "waa"])
def test_all_of_it_fits_80_columns(plan: PlanSpec) -> None:
    assert max(map(cell_len, lines(plan_table(plan), 80))) <= 80
    assert max(map(cell_len, lines(latency_front_table(FRONTS), 80))) <= 80


def test_bounds_ascend_and_name_the_best_with_its_reason() -> None:
    shown = lines(latency_front_table(FRONTS), 80)
    rows = [line.split() for line in shown[3:8]]
    assert rows == [
        ["2.00", "s", "-", "1.5", "WAA-C", "1.80", "s"],
        ["4.00", "s", "2.2", "1.5", "RRA", "3.60", "s"],
        ["5.00", "s", "2.2", "2.6", "WAA-C", "4.50", "s"],
        ["20.00", "s", "6.2", "2.6", "RRA", "18.00", "s"],
        ["60.00", "s", "9.1", "4.2", "RRA", "54.00", "s"],
    ]
    assert " ".join(" ".join(shown[8:]).split()) == (
        "from 2.00 s to 4.00 s: WAA-C, the only one that keeps the bound "
        "from 4.00 s to 5.00 s: RRA, one copy of the layers leaves room: 20 requests decode at a "
        "time, 12 with WAA-C "
        "from 5.00 s to 20.00 s: WAA-C, its decode steps wait for no prefill, where RRA prefills 6 "
        "requests after every 4 steps "
        "from 20.00 s on: RRA, one copy of the layers leaves room: 90 requests decode at a time, "
        "30 with WAA-C "
        "no WAA-M: two copies need 3.1 GiB more"
    )


def test_a_single_kind_is_compared_with_none() -> None:
    own = replace(FRONTS, points=tuple(FRONTS.front("rra")), left_out=())
    assert len(lines(latency_front_table(own), 80)) == 3 + 3
