"""Tables of a terminal: they fit its width, and say of a plan what there is to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from llmpq import Plan, Workload
from llmpq.report.answers import job_answers, job_remarks
from llmpq.report.formatting import plain
from llmpq.report.plan_tables import comparison_table, front_table, latency_front_table, plan_table
from planner.explanation.explain import StageLimits
from planner.plan.spec import Baseline, PlanSpec, StagePlan
from planner.search.find import FrontPoint
from planner.workload import MicroBatches
from tests.llmpq.bounded_plans import FRONTS, rra_plan, waa_plan
from tests.llmpq.jobs_of_prompts import BALANCED, job_plan, small_plan
from tests.paths import ROOT

PAPER_CLUSTERS = sorted((ROOT / "cluster_specs").glob("paper_*.yaml"))
LONG = "a-model-of-a-team/with-a-very-long-name-of-fifty-characters-or-more"


def lines(table: RenderableType, width: int = 400) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def words(table: RenderableType, width: int) -> str:
    return " ".join(" ".join(lines(table, width)).split())


def test_a_job_is_in_the_headline_and_its_answers_come_first_below_the_table() -> None:
    plan = replace(job_plan(), beside=replace(job_plan().beside, beaten_by=BALANCED))
    shown = [line.strip() for line in lines(plan_table(plan))]
    text = " ".join(shown)
    assert "3,000 prompts, 96 in flight (mean 200 prompt tokens, 100 new; slots of 450" in text
    answers = [answer for _, answer in job_answers(plan)]
    first = shown.index(answers[0])
    assert shown[first - 1].split()[:2] == ["0*", plan.stages[0].device]
    expected = [plain(each) for each in (*answers, *job_remarks(plan))]
    assert shown[first : first + len(expected)] == expected
    assert "predicted: 16 min 20 s for the job, 306 tokens/s; * slowest stage of a phase" in shown


def test_a_batch_is_told_as_ever() -> None:
    plan = small_plan()
    text = words(plan_table(plan), 400)
    assert "1 prompt of 8 tokens, 2 new; micro-batches 1 (prefill), 1 (decode)" in text
    milliseconds = [
        f"{1e3 * s:.2f} ms" for s in (plan.predicted.latency_s, plan.predicted.decode_s)
    ]
    assert f"predicted: {milliseconds[0]} a batch, " in text
    assert f"decode {milliseconds[1]}); * slowest stage of a phase" in text
    assert "in flight" not in text
    assert "cost" not in text


def test_baselines_and_fronts_say_whether_a_batch_or_a_job_is_timed() -> None:
    uniform = Baseline("uniform", 8, 1960.0, 153.0, 0.3)
    job, batch = (replace(each, baselines=(uniform,)) for each in (job_plan(), small_plan()))
    line = "uniform (8 bit): 32 min 40 s {}, perplexity +3 %; this plan is 2.00 times as fast"
    assert line.format("for the job") in lines(plan_table(job))
    beside = "\n".join(lines(comparison_table(job)))
    assert "time of the job" in beside
    assert "2.00 times" in beside
    assert "time a batch" in "\n".join(lines(comparison_table(batch)))
    points = [FrontPoint(1.0, 2.0, 3.0, 4.0, 6, 5.0, 8.0)]
    assert "time of the job" in "\n".join(lines(front_table(points, is_job=True)))
    assert "time a batch" in "\n".join(lines(front_table(points)))


Case = tuple[PlanSpec, Sequence[StageLimits]]


@cache
def emulated() -> Case:
    """A plan of this repository's demo, all of whose devices are emulated."""
    from llmpq import Cluster

    cluster = Cluster.from_yaml(ROOT / "cluster_specs/demo_mixed_cpu.yaml")
    plan = cluster.plan(ROOT / "examples/demo_model", Workload(4, 64, 12), theta=1.0)
    return plan.spec, plan.limits


def eight_stages(node: str, bits: Sequence[int], accelerator: str = "V100-SXM2-32GB") -> Case:
    """120 layers on eight devices of one name, with all resources used up."""
    spec, limits = emulated()
    some, limit = spec.stages[0], limits[0]
    full = replace(
        limit,
        memory=replace(limit.memory, spare=0.0, least_step=1.0),
        prefill=replace(limit.prefill, spare=0.0, least_step=1.0),
        decode=replace(limit.decode, spare=0.0, least_step=1.0),
    )
    bitwidths = tuple(bits[layer % len(bits)] for layer in range(15))

    def stage(index: int) -> StagePlan:
        return replace(
            some,
            index=index,
            device=f"{node}/{accelerator}:{index}",
            accelerator=accelerator,
            layers=range(15 * index, 15 * index + 15),
            bitwidths=bitwidths,
            prefill_s=0.9994,
            decode_s=0.1234,
            memory_bytes=31 * 2**30,
            memory_limit_bytes=32 * 2**30,
        )

    plan = replace(
        spec,
        model=replace(spec.model, name=LONG, layers=120),
        stages=tuple(map(stage, range(8))),
        predicted=replace(spec.predicted, busy_share=(0.5,) * 8),
        micro_batches=MicroBatches(16, 128),
        unused_devices=tuple(f"{node}/T4-16GB:{number}" for number in range(5)),
    )
    return plan, (full,) * 8


CASES: dict[str, Callable[[], Case]] = {
    "emulated": emulated,
    "uniform": lambda: eight_stages("node0", (16,)),
    "mixed": lambda: eight_stages("rack-7-of-building-2", (16, 8, 8, 8, 4, 3, 3)),
    "too mixed for runs": lambda: eight_stages("old", (16, 3, 8, 4)),
    "long type": lambda: eight_stages("n", (8, 4), "RTX-6000-Ada-Generation-48GB"),
}


@pytest.mark.parametrize("width", [80, 100, 120, 160])
@pytest.mark.parametrize("name", CASES)
def test_everything_fits_and_nothing_is_cut(name: str, width: int) -> None:
    plan, limits = CASES[name]()
    for table in (plan_table(plan, limits), comparison_table(plan)):
        shown = lines(table, width)
        assert max(map(cell_len, shown)) <= width
        assert "…" not in "".join(shown)
    together = "".join("".join(lines(plan_table(plan, limits), width)).split())
    for stage in plan.stages:
        node, _, device = stage.device.partition("/")
        assert node in together
        if len(device) <= 20 or width >= 160:
            assert device in together
        assert f"{stage.layers.start}-{stage.layers.stop - 1}" in together


@pytest.mark.parametrize("path", PAPER_CLUSTERS, ids=lambda path: path.stem)
def test_devices_of_the_papers_clusters_are_whole_at_80_columns(path: object) -> None:
    from planner.cluster.spec import ClusterSpec

    for device in ClusterSpec.from_yaml(str(path)).devices:
        node, _, number = device.name.rpartition(":")
        spec, limits = eight_stages(*node.split("/")[:1], (16, 8, 4), node.split("/")[1])
        shown = lines(plan_table(spec, limits), 80)
        assert any(f"{node.split('/')[1]}:0" in line for line in shown), shown
        assert number


@pytest.mark.parametrize("width", [80, 120])
def test_sentences_break_between_words(width: int) -> None:
    plan, limits = emulated()
    broken = words(plan_table(plan, limits), width)
    assert all(plain(answer) in broken for _, answer in job_answers(plan))
    assert plan.sensitivity_source in broken
    for line in lines(plan_table(plan, limits), width):
        assert len(line) <= width


def test_a_loaded_plan_has_the_same_table() -> None:
    spec, limits = emulated()
    again = PlanSpec.from_json(spec.to_json())
    assert lines(plan_table(again, Plan(again).limits), 80) == lines(plan_table(spec, limits), 80)


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
    assert "24 at 16 bit of 24 layers where stages decode, 14 at 16 bit and 10 at 3" in text
    assert "micro-batches 2 (prefill), 22 (decode)" in text


def test_what_is_known_is_told() -> None:
    plan = rra_plan(None)
    assert plan.latency is not None
    assert "(any time allowed)" in words(plan_table(plan), 80)
    rarer = replace(plan.latency, quantile=0.999, prompts=3000, latency_s=18.2, latency_error_s=0.1)
    text = words(plan_table(replace(plan, latency=rarer)), 80)
    assert "99.9 % of requests within 18.20 s ± 0.5 % (any time allowed)" in text
    assert "99.9 % of requests within any time" in text
    assert "3,000 requests: about 9 min 41 s in all" in text  # 3000 / 5.25 and 9.1


@pytest.mark.parametrize("made", [rra_plan, waa_plan], ids=["rra", "waa"])
def test_all_of_it_fits_80_columns(made: Callable[[], PlanSpec]) -> None:
    assert max(map(cell_len, lines(plan_table(made()), 80))) <= 80
    assert max(map(cell_len, lines(latency_front_table(FRONTS), 80))) <= 80


def test_bounds_ascend_and_name_the_best_with_its_reason() -> None:
    shown = lines(latency_front_table(FRONTS), 80)
    rows = [line.split() for line in shown[3:8]]
    assert rows == [
        ["2.00", "s", "-", "1.5", "WAA-C", "1.80", "s", "8.0"],
        ["4.00", "s", "2.2", "1.5", "RRA", "3.60", "s", "8.0"],
        ["5.00", "s", "2.2", "2.6", "WAA-C", "4.50", "s", "8.0"],
        ["20.00", "s", "6.2", "2.6", "RRA", "18.00", "s", "8.0"],
        ["60.00", "s", "9.1", "4.2", "RRA", "54.00", "s", "8.0"],
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
