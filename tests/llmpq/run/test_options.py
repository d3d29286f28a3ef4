"""Options of a run: one set of names for Python and the command line, checked alike."""

from __future__ import annotations

import dataclasses

import pytest

from actors.messages import Sampling
from llmpq import Fleet, Plan
from llmpq.cli.run_options import run_options, run_parser
from llmpq.errors import SpecError
from llmpq.run.checkpoint import check_fleet
from llmpq.run.options import RunOptions

COMMAND = ["--plan", "plan.json", "--input", "in.jsonl", "--output", "out.jsonl"]
NAMES = [field.name for field in dataclasses.fields(RunOptions) if field.name != "sampling"]


def of_command(*arguments: str) -> RunOptions:
    return run_options(run_parser().parse_args([*COMMAND, *arguments]))


def test_every_option_has_its_name_on_the_command_line() -> None:
    shown = run_parser().format_help()
    for name in (*NAMES, *(field.name for field in dataclasses.fields(Sampling))):
        assert f"--{name}" in shown, name


def test_python_and_the_command_line_have_the_same_defaults() -> None:
    assert of_command() == RunOptions()


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["--hang_s", "5", "--retries", "0"], {"hang_s": 5.0, "retries": 0}),
        (["--on-device-loss", "wait"], {"on_device_loss": "wait"}),
        (["--cache-dir", "/c"], {"cache_dir": "/c"}),
        (["--cache_limit_gib", "2"], {"cache_limit_gib": 2}),
        (["--no-cache", "--transport", "ray"], {"no_cache": True, "transport": "ray"}),
        (["--model", "m", "--address", "auto"], {"model": "m", "address": "auto"}),
        (["--trace", "t.json", "--row_s", "3"], {"trace": "t.json", "row_s": 3.0}),
        (["--replace_s", "4", "--generation_config", "none"],
         {"replace_s": 4.0, "generation_config": "none"}),
        (["--deterministic"], {"deterministic": True}),
        (["--no-cuda-graphs"], {"no_cuda_graphs": True}),
        (["--temperature", "0.5", "--stop", "a", "b"], {"temperature": 0.5, "stop": ["a", "b"]}),
        (["--logit_bias", "7=-1"], {"sampling": {"logit_bias": {"7": -1.0}}}),
    ],
)  # fmt: skip
def test_both_ways_give_the_same_options(arguments: list[str], given: dict[str, object]) -> None:
    assert of_command(*arguments) == RunOptions.of(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adress": "auto"}, "unknown option of a run 'adress'; nearest: address"),
        ({"temprature": 1}, "'temprature'; nearest: temperature"),
        ({"zzzz": 1}, "'zzzz'; known: model, sampling"),
        ({"hang_s": 0}, "hang_s is 0; it must be above 0"),
        ({"on_device_loss": "hope"}, r"'hope'; it must be replan\|wait\|fail"),
        ({"transport": "post"}, "transport is 'post'; it must be one of auto, ray, gloo"),
        ({"generation_config": "mine"}, "generation_config is 'mine'"),
        ({"cache_limit_gib": -1}, "the cache limit is -1 GiB"),
        ({"row_s": 0}, "row_s is 0"),
        ({"temperature": -1}, "temperature"),
        ({"no_cache": True, "cache_dir": "here"}, "cache_dir has no effect beside no_cache"),
        ({"sampling": Sampling(), "top_k": 2}, "top_k has no effect beside sampling"),
    ],
)
def test_what_cannot_be_used_is_refused(plan: Plan, given: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        plan.run([[5]], **given)


def test_options_are_checked_before_rows_are_read(plan: Plan) -> None:
    rows = [{"custom_id": "twice", "prompt": [5]}] * 2
    with pytest.raises(SpecError, match="temprature"):
        plan.run(rows, temprature=1)


def test_a_model_without_its_name_is_not_taken_for_a_listener(plan: Plan) -> None:
    with pytest.raises(TypeError, match="positional"):
        plan.run([[5]], None, "models/other")  # type: ignore[misc]


def test_what_cannot_be_deterministic_is_refused(plan: Plan, fleet: Fleet) -> None:
    asked = RunOptions(deterministic=True)
    check_fleet(plan.spec, asked, "p.json")
    check_fleet(fleet.spec, asked, "f.json")
    one, *others = plan.spec.stages
    real = dataclasses.replace(
        plan.spec, stages=(dataclasses.replace(one, emulated=False), *others)
    )
    with pytest.raises(
        SpecError, match=rf"p.json: stage 0 \({one.label}\) cannot be deterministic"
    ):
        check_fleet(real, asked, "p.json")
    check_fleet(real, RunOptions(), "p.json")
    first, second = fleet.spec.replicas
    for changed in ({"kv_bits": 8}, {"head_bits": 8}):
        unlike = dataclasses.replace(first, **changed), second
        with pytest.raises(SpecError, match=r"f.json: its pipelines hold layers in different bits"):
            check_fleet(dataclasses.replace(fleet.spec, replicas=unlike), asked, "f.json")
