"""Options that another one makes useless: each is an error that names both and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from llmpq.cli.measure.forecast_options import profile_parser
from llmpq.cli.measure.forecasts import profile_main
from llmpq.cli.measure.quality import evaluate_main, indicator_main
from llmpq.cli.measure.weight_options import evaluate_parser, indicator_parser
from llmpq.cli.parser import Parser
from llmpq.cli.plan import main as plan
from llmpq.cli.plan_options import plan_parser
from llmpq.cli.run import main as run
from llmpq.cli.run_options import run_parser, submit_parser
from llmpq.cluster import Cluster
from planner.option_rules import Rule, refuse_ignored
from planner.options import PlanOptions
from planner.planning_rules import FRONT_RULES, PLAN_RULES
from planner.workload import Workload
from quant.common.errors import SpecError
from tests.llmpq.commands import exit_code

Main = Callable[[Sequence[str]], int]
PLAN = ["--model", "opt-125m", "--device_names", "T4", "--device_numbers", "1"]
RUN = ["--plan", "p.json", "--input", "a.jsonl", "--output", "r.jsonl"]
SUBMIT = ["--submit", "http://127.0.0.1:1"]
MEASURE = ["--model", "m", "--calibration", "t.txt", "-o", "o.json"]
RANDOM = ["--model", "m", "-o", "o.json", "--method", "random"]
BOUND = [*PLAN, "--max_request_latency_s", "20"]
TIMES = ["--model", "opt-125m", "-o", "times.csv"]
REFUSED: list[tuple[Main, list[str], tuple[str, ...]]] = [
    (plan, [*PLAN, "--shaq_efficient", "--method", "auto"], ("--method", "--shaq_efficient")),
    (plan, [*PLAN, "--model_size", "13b"], ("--model_size", "--model_name")),
    (
        plan,
        ["--model", "m", "--cluster", "c.yaml", "--address", "a"],
        ("--address", "--cluster"),
    ),
    (plan, [*PLAN, "--address", "auto"], ("--address", "--device_names")),
    (plan, [*PLAN, "--pareto", "-o", "p.json"], ("--output", "--pareto", "--report")),
    (plan, [*PLAN, "--pareto", "--trace", "t.json"], ("--trace", "--pareto")),
    (plan, [*PLAN, "--pareto", "--compare"], ("--compare", "--pareto")),
    (plan, [*PLAN, "--pareto", "--theta", "2"], ("--theta", "--pareto", "report")),
    (plan, [*PLAN, "--pareto", "--max_omega", "2"], ("--max_omega", "--pareto")),
    (plan, [*PLAN, "--pareto", "--method", "uniform"], ("--pareto", "--method uniform")),
    (plan, [*PLAN, "--json", "--compare"], ("--compare", "--json")),
    (plan, [*PLAN, "--theta", "1", "--max_omega", "2"], ("--theta", "--max_omega")),
    (plan, [*PLAN, "--theta", "1", "--max_latency_s", "2"], ("--theta", "--max_latency_s")),
    (plan, [*PLAN, "--theta", "1", "--max_ppl_delta", "2"], ("--theta", "--max_ppl_delta")),
    (
        plan,
        [*PLAN, "--method", "transfer", "--solver", "cbc"],
        ("--solver", "--method transfer"),
    ),
    (plan, [*PLAN, "--shaq_efficient", "--solver", "cbc"], ("solver", "method transfer")),
    (plan, [*PLAN, "--method", "uniform", "--group", "2"], ("--group", "--method uniform")),
    (plan, [*PLAN, "--method", "uniform", "--head", "first"], ("--head", "--method uniform")),
    (
        plan,
        [*PLAN, "--method", "pipeedge", "--all_orders"],
        ("--all_orders", "--method pipeedge"),
    ),
    (
        plan,
        [*PLAN, "--method", "pipeedge", "--ilp_time_limit", "9"],
        ("--ilp_time_limit", "--method pipeedge"),
    ),
    (
        plan,
        [*PLAN, "--method", "pipeedge", "--decode_micro_batch", "4"],
        ("--decode_micro_batch", "--method pipeedge"),
    ),
    (plan, [*PLAN, "--prompts", "9", "--input", "a"], ("--prompts", "--input")),
    (plan, [*PLAN, "--prompts", "9", "--global_bz", "4"], ("--prompts", "--global_batch")),
    (
        plan,
        [*PLAN, "--input", "a", "--in_flight", "8", "--global_bz", "4"],
        ("--in_flight", "--global_batch"),
    ),
    (
        plan,
        [*PLAN, "--input", "a", "--lengths", "l.csv", "--global_bz", "4"],
        ("--lengths", "--global_batch"),
    ),
    (
        plan,
        [*PLAN, "--prompts", "9", "--policy", "orca", "--predictor", "oracle"],
        ("--predictor", "--policy orca", "policy s3"),
    ),
    (plan, [*PLAN, "--prompts", "9", "--predictor", "oracle"], ("--predictor", "--policy")),
    (
        plan,
        [*PLAN, "--policy", "s3", "--predictor", "oracle"],
        ("--predictor", "--input", "--prompts"),
    ),
    (
        plan,
        [*PLAN, "--input", "a", "--policy", "s3", "--predictor", "p", "--global_bz", "4"],
        ("--predictor", "--global_batch"),
    ),
    (
        plan,
        [*PLAN, "--input", "a", "--long_rows", "error", "--global_bz", "4"],
        ("--long_rows", "--global_batch"),
    ),
    (plan, [*PLAN, "--in_flight", "auto"], ("--in_flight", "--input", "--prompts")),
    (plan, [*PLAN, "--lengths", "l.csv"], ("--lengths", "--input", "--prompts")),
    (plan, [*PLAN, "--prompts", "9", "--long_rows", "error"], ("--long_rows", "--input")),
    (
        plan,
        [*PLAN, "--prompts", "9", "--lengths", "l.csv", "--s", "64"],
        ("--prompt_length", "--lengths"),
    ),
    (plan, [*PLAN, "--prompts", "9", "--quality", "fast", "--theta", "1"], ("quality",)),
    (plan, [*PLAN, "--quality", "fast", "--max_omega", "1"], ("--quality", "--max_omega")),
    (plan, [*PLAN, "--use_profiler_prediction"], ("--use_profiler_prediction", "--profiles")),
    (
        plan,
        [*PLAN, "--profiles", "p.csv", "--fit", "--use_profiler_prediction"],
        ("--fit", "--use_profiler_prediction"),
    ),
    (plan, [*BOUND, "--global_bz", "4"], ("--global_batch", "--max_request_latency_s")),
    (plan, [*BOUND, "--policy", "orca"], ("--policy", "--max_request_latency_s", "exegpt")),
    (plan, [*BOUND, "--replicas", "2"], ("--replicas", "--max_request_latency_s")),
    (
        plan,
        [*BOUND, "--max_latency_s", "9"],
        ("--max_latency_s", "whole batch or job", "each request"),
    ),
    (plan, [*BOUND, "--prompts", "9", "--in_flight", "4"], ("--in_flight", "the schedule")),
    (plan, [*BOUND, "--decode_micro_batch", "4"], ("--decode_micro_batch", "the schedule")),
    (plan, [*BOUND, "--objective", "paper"], ("--objective", "--max_request_latency_s")),
    (plan, [*BOUND, "--method", "pipeedge"], ("--method", "--max_request_latency_s")),
    (plan, [*BOUND, "--compare"], ("--compare", "--max_request_latency_s")),
    (plan, [*BOUND, "--input", "a", "--percentile", "9"], ("--percentile",)),
    (plan, [*BOUND, "--pareto", "-o", "p.json"], ("--output", "--pareto", "--report")),
    (
        plan,
        [*BOUND, "--lengths", "l.csv", "--output_lengths", "9", "2", "20"],
        ("--output_lengths", "--lengths"),
    ),
    (
        plan,
        [*BOUND, "--input", "a", "--prompt_lengths", "9", "2", "20"],
        ("--prompt_lengths", "--input"),
    ),
    (
        plan,
        [*BOUND, "--n", "20", "--output_lengths", "9", "2", "20"],
        ("--new_tokens", "--output_lengths"),
    ),
    (plan, [*PLAN, "--quantile", "0.9"], ("--quantile", "--max_request_latency_s")),
    (plan, [*PLAN, "--schedule", "rra"], ("--schedule", "--max_request_latency_s")),
    (plan, [*PLAN, "--policy", "exegpt"], ("--policy", "--max_request_latency_s")),
    (
        plan,
        [*PLAN, "--prompt_lengths", "9", "2", "20"],
        ("--prompt_lengths", "--max_request_latency_s"),
    ),
    (run, [*RUN, "--overwrite", "--retry_errors"], ("--overwrite", "--retry_errors")),
    (run, [*RUN, "--overwrite", "--extend"], ("--extend", "--overwrite")),
    (run, [*RUN, "--no_cache", "--cache_dir", "d"], ("--no_cache", "--cache_dir")),
    (run, [*RUN, "--no_cache", "--cache_limit_gib", "1"], ("--cache_limit_gib",)),
    (run, [*RUN, *SUBMIT, "--address", "10.0.0.1:6379"], ("--address", "--submit")),
    (run, [*RUN, "--no_wait"], ("--no_wait", "--submit")),
    (run, ["--stop_job", "x"], ("--stop_job", "--submit")),
    (run, [*SUBMIT, "--stop_job", "x", "--follow_job", "y"], ("--stop_job", "--follow_job")),
    (run, [*SUBMIT, "--follow_job", "x", "--no_wait"], ("--no_wait", "--follow_job")),
    (run, [*SUBMIT, "--stop_job", "x", *RUN], ("--plan", "--stop_job")),
    (
        evaluate_main,
        ["--plan", "p", "--text", "t", "--rounding", "nearest"],
        ("--rounding", "--bits"),
    ),
    (
        indicator_main,
        [*MEASURE, "--method", "hessian", "--scales", "group"],
        ("--scales", "hessian"),
    ),
    (indicator_main, [*MEASURE, "--max_tokens", "9"], ("--max_tokens", "--perplexity")),
    (indicator_main, [*RANDOM, "--calibration", "t"], ("--calibration", "--method random")),
    (indicator_main, [*RANDOM, "--device", "cpu"], ("--device", "--perplexity", "random")),
    (profile_main, [*TIMES, "--cluster", "c.yaml", "--threads", "2"], ("--threads", "--cluster")),
    (profile_main, [*TIMES, "--address", "auto", "--threads", "2"], ("--threads", "--address")),
]


@pytest.mark.parametrize(("main", "arguments", "named"), REFUSED)
def test_what_would_be_ignored_is_an_error(
    main: Main, arguments: list[str], named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code = exit_code(main, arguments)
    message = capsys.readouterr().err.splitlines()[-1]
    assert code == 2
    assert "error" in message
    for name in named:
        assert name in message


ACCEPTED: list[tuple[Parser, list[str]]] = [
    (plan_parser(), [*PLAN, "--shaq_efficient", "--method", "transfer"]),
    (
        plan_parser(),
        [*PLAN, "--method", "uniform", "--head", "last", "--theta", "2"],
    ),
    (plan_parser(), [*PLAN, "--method", "ilp", "--solver", "cbc", "--group", "2"]),
    (
        plan_parser(),
        [*PLAN, "--pareto", "--report", "r", "--theta", "2", "-o", "p"],
    ),
    (plan_parser(), [*PLAN, "--profiles", "p.csv", "--fit"]),
    (
        plan_parser(),
        [*PLAN, "--input", "a", "--lengths", "l", "--s", "9", "--long_rows", "error"],
    ),
    (plan_parser(), [*PLAN, "--prompts", "9", "--in_flight", "4", "--n", "8"]),
    (plan_parser(), [*BOUND, "--lengths", "l.csv", "--policy", "exegpt", "--quantile", "0.9"]),
    (plan_parser(), [*BOUND, "--lengths", "l.csv", "--n", "9", "--theta", "1", "--pareto"]),
    (plan_parser(), [*BOUND, "--input", "a", "--lengths", "l", "--schedule", "waa-m"]),
    (plan_parser(), [*BOUND, "--input", "a", "--output_lengths", "9", "2", "20"]),
    (plan_parser(), [*BOUND, "--prompts", "9", "--s", "9", "--output_lengths", "9", "2", "20"]),
    (run_parser(), [*RUN, *SUBMIT, "--address", "auto", "--no_wait"]),
    (run_parser(), [*RUN, "--resume", "--retry_errors", "--extend"]),
    (evaluate_parser(), ["--plan", "p", "--bits", "4", "--rounding", "nearest"]),
    (indicator_parser(), [*RANDOM, "--perplexity", "t", "--device", "cpu"]),
]


@pytest.mark.parametrize(("parser", "arguments"), ACCEPTED)
def test_what_has_an_effect_is_accepted(parser: Parser, arguments: list[str]) -> None:
    assert vars(parser.parse(arguments)) == vars(parser.parse_args(arguments))


@pytest.mark.parametrize(
    "parser",
    [
        evaluate_parser(),
        indicator_parser(),
        profile_parser(),
        plan_parser(),
        run_parser(),
        submit_parser("llmpq run"),
    ],
)
def test_rules_name_options_that_exist(parser: Parser) -> None:
    usage = parser.format_help()
    for rule in parser.rules:
        beside = () if rule.beside is None else (rule.beside,)
        for name in (*rule.options, *beside, *rule.without):
            assert f"--{name}" in usage


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
