"""Options that another one makes useless: each is an error that names both and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from llmpq.cli import algo, dist, evaluate, indicator, profile, submit
from llmpq.cli.common import Parser
from llmpq.cli.options.algo import ALGO_RULES, algo_parser
from llmpq.cli.options.dist import DIST_RULES, dist_parser
from llmpq.cluster import Cluster
from planner.option_rules import Rule, refuse_ignored
from planner.options import FRONT_RULES, PLAN_RULES, PlanOptions
from planner.workload import Workload
from quant.common.errors import SpecError

Main = Callable[[Sequence[str]], int]
PLAN = ["--model", "opt-125m", "--device-names", "T4", "--device-numbers", "1"]
RUN = ["--plan", "p.json", "--input", "a.jsonl", "--output", "r.jsonl"]
SUBMIT = ["--submit", "http://127.0.0.1:1"]
MEASURE = ["--model", "m", "--calibration", "t.txt", "-o", "o.json"]
RANDOM = ["--model", "m", "-o", "o.json", "--method", "random"]
TIMES = ["--model", "opt-125m", "-o", "times.csv"]
REFUSED: list[tuple[Main, list[str], tuple[str, ...]]] = [
    (algo.main, [*PLAN, "--shaq-efficient", "--method", "auto"], ("--method", "--shaq-efficient")),
    (algo.main, [*PLAN, "--model-size", "13b"], ("--model-size", "--model-name")),
    (
        algo.main,
        ["--model", "m", "--cluster", "c.yaml", "--address", "a"],
        ("--address", "--cluster"),
    ),
    (algo.main, [*PLAN, "--address", "auto"], ("--address", "--device-names")),
    (algo.main, [*PLAN, "--pareto", "-o", "p.json"], ("--output", "--pareto", "--report")),
    (algo.main, [*PLAN, "--pareto", "--trace", "t.json"], ("--trace", "--pareto")),
    (algo.main, [*PLAN, "--pareto", "--compare"], ("--compare", "--pareto")),
    (algo.main, [*PLAN, "--pareto", "--theta", "2"], ("--theta", "--pareto", "report")),
    (algo.main, [*PLAN, "--pareto", "--max_omega", "2"], ("--max-omega", "--pareto")),
    (algo.main, [*PLAN, "--pareto", "--method", "uniform"], ("--pareto", "--method uniform")),
    (algo.main, [*PLAN, "--json", "--compare"], ("--compare", "--json")),
    (algo.main, [*PLAN, "--theta", "1", "--max_omega", "2"], ("--theta", "--max-omega")),
    (algo.main, [*PLAN, "--theta", "1", "--max_latency_s", "2"], ("--theta", "--max-latency-s")),
    (algo.main, [*PLAN, "--theta", "1", "--max_ppl_delta", "2"], ("--theta", "--max-ppl-delta")),
    (
        algo.main,
        [*PLAN, "--method", "transfer", "--solver", "cbc"],
        ("--solver", "--method transfer"),
    ),
    (algo.main, [*PLAN, "--shaq_efficient", "--solver", "cbc"], ("solver", "method transfer")),
    (algo.main, [*PLAN, "--method", "uniform", "--group", "2"], ("--group", "--method uniform")),
    (algo.main, [*PLAN, "--method", "uniform", "--head", "first"], ("--head", "--method uniform")),
    (
        algo.main,
        [*PLAN, "--method", "pipeedge", "--all_orders"],
        ("--all-orders", "--method pipeedge"),
    ),
    (
        algo.main,
        [*PLAN, "--method", "pipeedge", "--ilp_time_limit", "9"],
        ("--ilp-time-limit", "--method pipeedge"),
    ),
    (
        algo.main,
        [*PLAN, "--method", "pipeedge", "--decode_micro_batch", "4"],
        ("--decode-micro-batch", "--method pipeedge"),
    ),
    (algo.main, [*PLAN, "--prompts", "9", "--input", "a"], ("--prompts", "--input")),
    (algo.main, [*PLAN, "--prompts", "9", "--global_bz", "4"], ("--prompts", "--global-batch")),
    (
        algo.main,
        [*PLAN, "--input", "a", "--in_flight", "8", "--global_bz", "4"],
        ("--in-flight", "--global-batch"),
    ),
    (
        algo.main,
        [*PLAN, "--input", "a", "--lengths", "l.csv", "--global_bz", "4"],
        ("--lengths", "--global-batch"),
    ),
    (
        algo.main,
        [*PLAN, "--prompts", "9", "--policy", "orca", "--predictor", "oracle"],
        ("--predictor", "--policy orca", "policy s3"),
    ),
    (algo.main, [*PLAN, "--prompts", "9", "--predictor", "oracle"], ("--predictor", "--policy")),
    (
        algo.main,
        [*PLAN, "--policy", "s3", "--predictor", "oracle"],
        ("--predictor", "--input", "--prompts"),
    ),
    (
        algo.main,
        [*PLAN, "--input", "a", "--policy", "s3", "--predictor", "p", "--global_bz", "4"],
        ("--predictor", "--global-batch"),
    ),
    (
        algo.main,
        [*PLAN, "--input", "a", "--long_rows", "error", "--global_bz", "4"],
        ("--long-rows", "--global-batch"),
    ),
    (algo.main, [*PLAN, "--in_flight", "auto"], ("--in-flight", "--input", "--prompts")),
    (algo.main, [*PLAN, "--lengths", "l.csv"], ("--lengths", "--input", "--prompts")),
    (algo.main, [*PLAN, "--prompts", "9", "--long_rows", "error"], ("--long-rows", "--input")),
    (
        algo.main,
        [*PLAN, "--prompts", "9", "--lengths", "l.csv", "--s", "64"],
        ("--prompt-length", "--lengths"),
    ),
    (algo.main, [*PLAN, "--prompts", "9", "--quality", "fast", "--theta", "1"], ("quality",)),
    (algo.main, [*PLAN, "--quality", "fast", "--max_omega", "1"], ("--quality", "--max-omega")),
    (algo.main, [*PLAN, "--use_profiler_prediction"], ("--use_profiler_prediction", "--profiles")),
    (
        algo.main,
        [*PLAN, "--profiles", "p.csv", "--fit", "--use_profiler_prediction"],
        ("--fit", "--use-profiler-prediction"),
    ),
    (dist.main, [*RUN, "--overwrite", "--retry-errors"], ("--overwrite", "--retry-errors")),
    (dist.main, [*RUN, "--overwrite", "--extend"], ("--extend", "--overwrite")),
    (dist.main, [*RUN, "--no-cache", "--cache_dir", "d"], ("--no-cache", "--cache-dir")),
    (dist.main, [*RUN, "--no-cache", "--cache_limit_gib", "1"], ("--cache-limit-gib",)),
    (dist.main, [*RUN, *SUBMIT, "--address", "10.0.0.1:6379"], ("--address", "--submit")),
    (dist.main, [*RUN, "--no-wait"], ("--no-wait", "--submit")),
    (dist.main, ["--stop-job", "x"], ("--stop-job", "--submit")),
    (dist.main, [*SUBMIT, "--stop-job", "x", "--follow-job", "y"], ("--stop-job", "--follow-job")),
    (dist.main, [*SUBMIT, "--follow-job", "x", "--no-wait"], ("--no-wait", "--follow-job")),
    (dist.main, [*SUBMIT, "--stop-job", "x", *RUN], ("--plan", "--stop-job")),
    (
        evaluate.main,
        ["--plan", "p", "--text", "t", "--rounding", "nearest"],
        ("--rounding", "--bits"),
    ),
    (
        indicator.main,
        [*MEASURE, "--method", "hessian", "--scales", "group"],
        ("--scales", "hessian"),
    ),
    (indicator.main, [*MEASURE, "--max_tokens", "9"], ("--max-tokens", "--perplexity")),
    (indicator.main, [*RANDOM, "--calibration", "t"], ("--calibration", "--method random")),
    (indicator.main, [*RANDOM, "--device", "cpu"], ("--device", "--perplexity", "random")),
    (profile.main, [*TIMES, "--cluster", "c.yaml", "--threads", "2"], ("--threads", "--cluster")),
    (profile.main, [*TIMES, "--address", "auto", "--threads", "2"], ("--threads", "--address")),
]


@pytest.mark.parametrize(("main", "arguments", "named"), REFUSED)
def test_what_would_be_ignored_is_an_error(
    main: Main, arguments: list[str], named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as left:
        code = int(left.code or 0)
    message = capsys.readouterr().err.splitlines()[-1]
    assert code == 2
    assert "error" in message
    for name in named:
        assert name in message


ACCEPTED: list[tuple[Parser, Sequence[Rule], list[str]]] = [
    (algo_parser(None), ALGO_RULES, [*PLAN, "--shaq-efficient", "--method", "transfer"]),
    (
        algo_parser(None),
        ALGO_RULES,
        [*PLAN, "--method", "uniform", "--head", "last", "--theta", "2"],
    ),
    (algo_parser(None), ALGO_RULES, [*PLAN, "--method", "ilp", "--solver", "cbc", "--group", "2"]),
    (
        algo_parser(None),
        ALGO_RULES,
        [*PLAN, "--pareto", "--report", "r", "--theta", "2", "-o", "p"],
    ),
    (algo_parser(None), ALGO_RULES, [*PLAN, "--profiles", "p.csv", "--fit"]),
    (
        algo_parser(None),
        ALGO_RULES,
        [*PLAN, "--input", "a", "--lengths", "l", "--s", "9", "--long_rows", "error"],
    ),
    (algo_parser(None), ALGO_RULES, [*PLAN, "--prompts", "9", "--in_flight", "4", "--n", "8"]),
    (dist_parser(None), DIST_RULES, [*RUN, *SUBMIT, "--address", "auto", "--no-wait"]),
    (dist_parser(None), DIST_RULES, [*RUN, "--resume", "--retry-errors", "--extend"]),
    (evaluate._parser(), evaluate._RULES, ["--plan", "p", "--bits", "4", "--rounding", "nearest"]),
    (indicator._parser(), indicator._RULES, [*RANDOM, "--perplexity", "t", "--device", "cpu"]),
]


@pytest.mark.parametrize(("parser", "rules", "arguments"), ACCEPTED)
def test_what_has_an_effect_is_accepted(
    parser: Parser, rules: Sequence[Rule], arguments: list[str]
) -> None:
    assert vars(parser.parse(arguments, rules)) == vars(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("parser", "rules"),
    [
        *((module._parser(), module._RULES) for module in (evaluate, indicator, profile)),
        (algo_parser(None), ALGO_RULES),
        (dist_parser(None), DIST_RULES),
        (submit.submit_parser(), submit._RULES),
    ],
)
def test_rules_name_options_that_exist(parser: Parser, rules: Sequence[Rule]) -> None:
    usage = parser.format_help()
    for rule in rules:
        beside = () if rule.beside is None else (rule.beside,)
        for name in (*rule.options, *beside, *rule.without):
            assert f"--{name.replace('_', '-')}" in usage


def test_python_callers_are_told_the_same() -> None:
    cluster, workload = Cluster.from_counts(["T4"], [1]), Workload(4, 64, 16)
    with pytest.raises(SpecError, match="solver has no effect beside method uniform: only methods"):
        cluster.plan("opt-125m", workload, method="uniform", solver="cbc")
    with pytest.raises(SpecError, match="theta has no effect beside max_omega"):
        PlanOptions.of({"theta": 1.0, "max_omega": 0.5})
    with pytest.raises(SpecError, match="max_omega has no effect beside pareto"):
        cluster.pareto("opt-125m", workload, max_omega=1.0)
    assert PlanOptions.of({"theta": 2.0, "max_omega": None, "all_orders": False}).theta == 2.0


def test_options_of_plans_made_before_are_still_read() -> None:
    """A saved origin holds every option, ignored or not."""
    assert PlanOptions(method="uniform", solver="cbc", group=2).solver == "cbc"


def test_a_rule_needs_its_value_and_is_lifted() -> None:
    rule = Rule(("a",), "no", beside="b", values=(1, 2), without=("c",), honoured=(7,))
    for given in ({"a": 1}, {"a": 1, "b": 3}, {"a": 1, "b": 1, "c": 0}, {"a": 7, "b": 1}):
        refuse_ignored(given, [rule])
    for given in ({"a": 1, "b": 2}, {"a": 0, "b": 1}, {"a": 1, "b": 1, "c": None}):
        with pytest.raises(SpecError, match=r"a has no effect beside b [12]: no"):
            refuse_ignored(given, [rule])
    assert {option for each in (*PLAN_RULES, *FRONT_RULES) for option in each.options} >= {"theta"}
