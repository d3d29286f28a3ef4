"""The verdict comes first, and sentences say what the figures of the forecast are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from llmpq import Cluster
from llmpq.report.answers import job_answers, job_remarks, menu, what_is_planned
from llmpq.report.formatting import count, duration, per_second, plain
from llmpq.report.page import report_page
from llmpq.report.plan_facts import facts_of, search_outcome
from llmpq.report.quality import quality_word
from planner.assumed_predictor import LONGEST, ORACLE, AssumedPredictor
from planner.lengths import Lengths
from planner.options import PlanOptions
from planner.plan.origin import origin_of
from planner.plan.parts import (
    DivergenceScale,
    MoreDevices,
    PerplexityForecast,
    PlanChoice,
    PlannedWeights,
    QualityChoice,
    QualityForecast,
)
from planner.plan.spec import PlanSpec
from planner.scheduling import PolicyName, PolicyOptions
from planner.workload import Job
from tests.llmpq.jobs_of_prompts import BALANCED, FAST, HIGH, LENGTHS, SCALE, job_plan, small_plan
from tests.llmpq.report.pages import Page


def with_bits(bits: Sequence[int]) -> PlanSpec:
    plan = small_plan()
    (stage,) = plan.stages
    layers = len(stage.layers)
    bitwidths = tuple(bits[layer * len(bits) // layers] for layer in range(layers))
    return replace(plan, stages=(replace(stage, bitwidths=bitwidths),))


def losing(nats: float, scale: DivergenceScale = SCALE) -> PlanSpec:
    return replace(with_bits((8, 4)), quality=QualityForecast(nats, nats / 2, 2 * nats, scale))


@pytest.mark.parametrize(
    ("nats", "words"),
    [
        (0.0005, "less than 0.1 % more perplexity (+0.025 % to +0.1 %, a KL divergence of 0.0005 "),
        (0.02, "about 2 % more perplexity (+1 % to +4.1 %, a KL divergence of 0.02 nats a token; "),
        (0.12, "about 13 % more perplexity (+6.2 % to +27 %, a KL divergence of 0.12 nats a token"),
        (1.0, "about 2.7 times the perplexity (+65 % to +639 %, a KL divergence of 1 nats a token"),
    ],
)
def test_quality_is_told_in_perplexity_and_nats(nats: float, words: str) -> None:
    found = quality_word(losing(nats))
    assert plain(f"{found.word} ({found.basis}").startswith(words)
    assert "6 at 8 bit and 6 at 4 bit of 12 layers" in found.basis
    assert facts_of(losing(nats)).sentence.endswith(f"with {found.word} than the checkpoint.")


def test_the_source_of_quality_is_named_and_what_measures_it() -> None:
    asks = "llmpq indicator --model opt-125m --calibration TEXT -o omega.json measures it"
    sizes = quality_word(losing(0.1)).basis
    assert "not measured, estimated from other models" in sizes
    assert asks in sizes
    no_unit = quality_word(losing(0.1, replace(SCALE, basis="no unit", source="mine.json"))).basis
    assert "mine.json has no unit" in no_unit
    assert asks in no_unit
    layers = quality_word(losing(0.1, replace(SCALE, basis="layers", source="mine.json"))).basis
    assert layers.endswith("measured one by one: mine.json")
    stored = PlannedWeights("4 bit (GPTQ)", 6, {8: 6})  # which alone cannot be measured
    again = quality_word(replace(losing(0.1), weights=stored)).basis
    assert "llmpq indicator --model FOLDER_AT_16_BIT --calibration" in again


def test_what_is_not_rounded_is_as_the_checkpoint_has_it() -> None:
    kept = replace(losing(0.1), weights=PlannedWeights("4 bit (GPTQ)", 12, {}))
    for plan, why in ((with_bits((16,)), "nothing is quantized"), (kept, "nothing is rounded")):
        found = quality_word(plan)
        assert found.word == "as the checkpoint has it"
        assert why in found.basis
        assert "llmpq indicator" not in found.basis
        assert facts_of(plan).sentence.endswith("its quality as the checkpoint has it.")


def test_a_file_that_does_not_say_its_quality_asks_for_another_plan() -> None:
    former = replace(losing(0.1), quality=None)
    assert quality_word(former).word == "not known"
    assert "plan again" in quality_word(former).basis
    assert "sensitivity" in Page(report_page(former)).text


def test_quality_that_was_measured_names_its_text() -> None:
    measured = PerplexityForecast(44.1, 0.123, 0.05, 0.23, 7)
    found = quality_word(replace(losing(0.0028), perplexity=measured))
    assert plain(found.word) == "about 0.28 % more perplexity"
    assert "+0.123 over 44.1 at 16 bit" in found.basis


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
    assert "306 new tokens per second, with about 2.1 % more perplexity than the" in plain(text)


def test_what_makes_the_figures_uncertain_is_a_warning() -> None:
    plan = job_plan()
    (estimate,) = facts_of(plan).warnings
    assert "llmpq profile" in estimate
    stage = replace(plan.stages[0], provenance="T4-16GB measured", emulated=True)
    late = replace(plan, stages=(stage,), solver=replace(plan.solver, gap=0.0217))
    search, emulated = facts_of(late).warnings
    assert "up to 2.17\N{NO-BREAK SPACE}% better" in search
    assert "emulated" in emulated
    assert facts_of(late).rests_on[0].startswith("Seconds: from measured layer times of every")


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


def changed(**fields: Any) -> PlanSpec:
    """The job's plan with other fields of the forecast or of the plans beside it."""
    plan = job_plan()
    assert plan.job is not None
    names = {name for name in fields if hasattr(plan.beside, name)}
    beside = replace(plan.beside, **{name: fields[name] for name in names})
    job = {name: value for name, value in fields.items() if name not in names}
    return replace(plan, job=replace(plan.job, **job), beside=beside)


def texts(plan: PlanSpec) -> list[str]:
    return [plain(answer) for _, answer in job_answers(plan)]


def all_at(plan: PlanSpec, bits: int) -> PlanSpec:
    stages = (replace(each, bitwidths=(bits,) * len(each.layers)) for each in plan.stages)
    return replace(plan, stages=tuple(stages))


def test_five_questions_are_answered() -> None:
    assert texts(job_plan()) == [
        "3,000 prompts: 16 min 20 s at 306 tokens/s, 96 in flight (without loading)",
        "quality: high 281 tokens/s, perplexity +1.2 %; balanced (taken) 306, +2.1 %; "
        "fast 310, +9.4 %",
        "16 bit fits: 14 % slower, 48 in flight",
        "one more T4-16GB: 1.21 times the tokens/s; 2 more V100-SXM2-32GB: 1.35 times",
        # 980 s at 3.10 an hour; 980 s at 306 tokens/s are 299,880 tokens
        "cost: 3.10 per hour, 2.81 per million tokens, 0.84 for the job",
    ]
    assert texts(small_plan()) == []
    assert job_remarks(small_plan()) == []


def test_qualities_that_share_a_plan_are_named_once() -> None:
    same = tuple(QualityChoice(name, 1.0, BALANCED) for name in ("high", "balanced"))
    both = changed(qualities=(*same, QualityChoice("fast", 0.0, FAST)))
    assert texts(both)[1] == (
        "quality: high and balanced (taken) 306 tokens/s, perplexity +2.1 %; fast 310, +9.4 %"
    )
    every = changed(qualities=(*same, QualityChoice("fast", 0.0, BALANCED)))
    assert texts(every)[1] == (
        "quality: high, balanced (taken) and fast 306 tokens/s, perplexity +2.1 %"
    )
    theta = changed(quality=None, qualities=(QualityChoice("high", 1.0, HIGH),))
    assert texts(theta)[1] == "quality: high 281 tokens/s, perplexity +1.2 %"
    assert not any("quality" in text for text in texts(changed(qualities=())))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: changed(full_precision=None), "16 bit does not fit"),
        (lambda: all_at(changed(full_precision=None), 16), "16 bit: all layers have it"),
        (
            lambda: all_at(changed(full_precision=PlanChoice(96, 300.0, 0.3, 8.0)), 4),
            "8 bit fits: 2 % slower, 96 in flight",
        ),
        (
            lambda: all_at(changed(full_precision=PlanChoice(96, 306.1, 0.0, 16.0)), 8),
            "16 bit fits, and is as fast: 96 in flight",
        ),
        (
            lambda: all_at(changed(full_precision=PlanChoice(96, 300.0, 0.0, 10.0)), 8),
            "nothing rounded again fits: 2 % slower, 96 in flight",
        ),
    ],
)
def test_the_most_bits_are_named(made: Callable[[], PlanSpec], expected: str) -> None:
    assert texts(made())[2] == expected


def test_without_prices_the_remedy_is_named() -> None:
    assert texts(changed(price_per_hour=None))[-1] == (
        "cost: not known, as the nodes of the cluster file have no price_per_hour"
    )
    assert texts(changed(price_per_hour=0.001))[-1] == (
        "cost: 0.001 per hour, 0.00091 per million tokens, 0.00027 for the job"
    )


def test_a_kind_of_device_on_two_nodes_is_told_apart() -> None:
    faster = PlanChoice(96, 459.0, 0.2, 6.0)
    twice = tuple(MoreDevices("T4-16GB", node, 1, faster) for node in ("a", "b"))
    assert texts(changed(more_devices=twice))[3] == (
        "one more T4-16GB on a: 1.50 times the tokens/s; one more T4-16GB on b: 1.50 times"
    )
    assert len(texts(changed(more_devices=()))) == 4


@pytest.mark.parametrize(
    ("policy", "name", "expected"),
    [
        (  # 50 of 50 and 150 of 150 new tokens expected: (50 * 150 + 150 * 450) / 200 slots
            "s3-published",
            ORACLE,
            "KV memory of a request: 3.66 MiB expected in the mean (375 tokens), 3.91 MiB "
            "reserved for the longest answer (400); so 96 in flight instead of 90 (oracle: always "
            "the right one of 2 lengths)",
        ),
        (  # 17 tokens in 116, 16 in 132 and 148, 1 in 164; 17 in 316, 16 in 332 and so on, 5 in 450
            "s3",
            LONGEST,
            "KV memory of a request: 3.12 MiB held in the mean (320 tokens), 3.91 MiB reserved for "
            "the longest answer (400); so 96 in flight instead of 93 (the longest answers are "
            "expected until some end; --predictor FOLDER for better)",
        ),
        (
            "s3-published",
            LONGEST,
            "KV memory of a request: 3.91 MiB in the mean (400 tokens), as every answer is "
            "expected to be the longest; --predictor FOLDER of llmpq lengths for less",
        ),
    ],
)
def test_what_predicted_lengths_save_is_told(policy: PolicyName, name: str, expected: str) -> None:
    lengths = Lengths((100, 300), (50, 150), "seen", 150)
    assumed = AssumedPredictor.named(name, lengths)
    # a token slot has 10 KiB; of all of them 95 % may be reserved, 98 % under s3
    plan = changed(job=Job(3000, lengths, predictor=assumed))
    slots = replace(plan.workload, n_slots=38148)
    stage = replace(plan.stages[0].memory, kv_cache=38148 * 10240)
    plan = replace(
        plan,
        stages=(replace(plan.stages[0], memory=stage),),
        workload=slots,
        policy=PolicyOptions(policy, 24),
    )
    assert texts(plan)[-1] == expected
    assert texts(replace(plan, policy=PolicyOptions("orca", 24)))[-1].startswith("cost")
    folder = AssumedPredictor("lengths/", (50, 150), ((3, 1), (0, 4)))
    trained = replace(plan, job=replace(plan.job, job=Job(3000, lengths, predictor=folder)))  # type: ignore[type-var]
    assert texts(trained)[-1].endswith(
        "(predictor lengths/: the right one of 2 lengths for 88% of the rows held out)"
    )


def test_long_rows_have_their_time_and_their_share_of_the_cost() -> None:
    longer = replace(
        changed(job=Job(12, LENGTHS), seconds=196.0),
        workload=replace(job_plan().workload, global_batch=4),
    )
    plan = replace(job_plan(), long_rows=longer)
    assert job_remarks(plan)[0] == (
        "12 longer prompts run by themselves: 3 min 16 s, 4 in flight; 19 min 36 s in all"
    )
    assert texts(plan)[-1].endswith(", 2.81 per million tokens, 1.01 for the job")  # 1.2 times 0.84


def test_a_plan_that_another_one_beats_says_so() -> None:
    plan = job_plan()
    slow = replace(
        plan,
        workload=replace(plan.workload, global_batch=128),
        predicted=replace(plan.predicted, tokens_per_s=275.0),
        solver=replace(plan.solver, sensitivity=2.4),
        beside=replace(plan.beside, beaten_by=BALANCED),
    )
    sentence = (
        "96 in flight would give 306 tokens/s (this plan 275) at perplexity +2.1 % (+27 %): "
        "leave out --global_bz"
    )
    assert plain(job_remarks(slow)[0]) == sentence
    assert [plain(each) for each in job_remarks(replace(slow, job=None))] == [sentence]
    assert not any("would give" in each for each in job_remarks(plan))


def test_groups_that_bring_more_are_told_with_the_option_to_copy() -> None:
    plan = job_plan()
    grouped = replace(plan, beside=replace(plan.beside, grouped=FAST))
    assert (
        "devices of a node that share every layer would give 310 tokens/s (this plan 306) at "
        "perplexity +9.4 % (+2.1 %): --tensor_parallel auto"
    ) in texts(grouped)
    assert ("in groups of devices", "--tensor_parallel auto") in [
        (course.name, course.how) for course in menu(grouped)
    ]
    assert not any("--tensor_parallel" in each for each in texts(plan))


def test_the_source_of_the_output_lengths_is_named() -> None:
    assert job_remarks(job_plan()) == [
        "lengths: outputs are taken as long as their limits allow; --lengths FILE for measured ones"
    ]
    measured = replace(LENGTHS, outputs_from="answers.jsonl")
    assert job_remarks(changed(job=Job(9, measured))) == [
        "lengths: prompts up to 300 tokens, outputs 100 in the mean, 150 at most (answers.jsonl)"
    ]


def test_what_is_planned() -> None:
    assert what_is_planned(small_plan()) == "1 prompt of 8 tokens, 2 new"
    assert what_is_planned(job_plan()) == (
        "3,000 prompts, 96 in flight (mean 200 prompt tokens, 100 new; slots of 450 tokens)"
    )
    alike = changed(job=Job(3000, Lengths.constant(300, 150)))
    assert what_is_planned(alike) == "3,000 prompts, 96 in flight (300 prompt tokens, 150 new)"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (lambda: duration(0.0314), "31.40 ms"),
        (lambda: duration(59.4), "59.40 s"),
        (lambda: duration(99.994), "99.99 s"),
        (lambda: duration(99.996), "1 min 40 s"),
        (lambda: duration(119.6), "2 min"),
        (lambda: duration(980), "16 min 20 s"),
        (lambda: duration(3599.6), "1 h"),
        (lambda: duration(11100), "3 h 5 min"),
        (lambda: duration(86399), "1 d"),
        (lambda: duration(86400 * 2 + 3700), "2 d 1 h"),
        (lambda: duration(86400 * 5000), "5,000 d"),
        (lambda: per_second(1126.6), "1,127"),
        (lambda: per_second(8.256), "8.26"),
        (lambda: count(1_000_000), "1,000,000"),
    ],
)
def test_figures_read_well(written: Callable[[], str], expected: str) -> None:
    assert written().replace("\N{NO-BREAK SPACE}", " ") == expected


def test_out_of_time_is_said_only_where_time_was_up() -> None:
    def told(plan: PlanSpec, status: str, seconds: float) -> str:
        solver = replace(plan.solver, status=status, seconds=seconds)
        return search_outcome(replace(plan, solver=solver))

    origin = origin_of(Cluster.from_counts(["T4"], [1]).spec, PlanOptions(search_time_limit=60.0))
    job = replace(job_plan(), origin=origin)
    assert told(job, "optimal", 3.0) == "optimal"
    assert told(job, "time_limit", 3.0) == "best found"
    assert told(job, "time_limit", 61.0) == "out of time"
    assert told(replace(job, job=None), "time_limit", 3.0) == "out of time"
