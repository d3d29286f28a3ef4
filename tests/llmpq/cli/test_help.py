"""The help of every command: it fits 80 columns, its examples run, its options are told apart."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from actors.messages import Sampling
from llmpq.cli.device_list import DevicesCommand
from llmpq.cli.jobs import ListCommand, ShowCommand
from llmpq.cli.main import SUBCOMMANDS, help_text
from llmpq.cli.measure.forecast_options import JudgeCommand, ProfileCommand, TrainCommand
from llmpq.cli.measure.weight_options import (
    ConvertCommand,
    EvaluateCommand,
    IndicatorCommand,
    QuantizeCommand,
)
from llmpq.cli.model_list import ModelsCommand
from llmpq.cli.parser import Parser
from llmpq.cli.plan_options import PlanCommand
from llmpq.cli.run_options import RunCommand, ServeCommand, SubmitOptions
from llmpq.lengths.training import TrainingOptions
from llmpq.quality.options import EvaluationOptions, IndicatorOptions
from llmpq.recipe.options import KubeRayOptions, SlurmOptions, SshOptions
from llmpq.run.options import RunOptions
from llmpq.serve.options import BatchOptions
from planner.option_rules import options_of as declared_of
from planner.options import PlanOptions
from planner.profiles.design import DesignSpace, ProfileOptions
from tests.llmpq.commands import exit_code

_UNGROUPED = {"help", "version", "verbose"}
_FEW = 8
"""Most values that are named in curly brackets."""


def with_parsers_below(parser: Parser) -> Iterator[Parser]:
    """A command's parser, and those of its own commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from with_parsers_below(below)


PARSERS = {
    each.prog: each
    for name, command in SUBCOMMANDS.items()
    for each in with_parsers_below(command.parser(f"llmpq {name}"))
}
DECLARED = [
    ("llmpq plan", PlanCommand),
    ("llmpq plan", PlanOptions),
    ("llmpq run", RunCommand),
    ("llmpq run", SubmitOptions),
    ("llmpq run", RunOptions),
    ("llmpq run", Sampling),
    ("llmpq serve", ServeCommand),
    ("llmpq serve", BatchOptions),
    ("llmpq profile", ProfileCommand),
    ("llmpq profile", ProfileOptions),
    ("llmpq profile", DesignSpace),
    ("llmpq indicator", IndicatorCommand),
    ("llmpq indicator", IndicatorOptions),
    ("llmpq quantize", QuantizeCommand),
    ("llmpq eval", EvaluateCommand),
    ("llmpq eval", EvaluationOptions),
    ("llmpq lengths train", TrainCommand),
    ("llmpq lengths train", TrainingOptions),
    ("llmpq lengths evaluate", JudgeCommand),
    ("llmpq convert", ConvertCommand),
    ("llmpq devices", DevicesCommand),
    ("llmpq models", ModelsCommand),
    ("llmpq jobs show", ShowCommand),
    ("llmpq recipe slurm", SlurmOptions),
    ("llmpq recipe kuberay", KubeRayOptions),
    ("llmpq recipe ssh", SshOptions),
    ("llmpq jobs list", ListCommand),
]
every_parser = pytest.mark.parametrize("prog", PARSERS)


def options_of(parser: Parser) -> Iterator[argparse.Action]:
    """The options and arguments of a command, without the commands below it."""
    return (each for each in parser._actions if not isinstance(each, argparse._SubParsersAction))


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@every_parser
def test_help_fits_80_columns(prog: str) -> None:
    lines = PARSERS[prog].format_help().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"usage: {prog}")
    usage = PARSERS[prog].format_usage()
    assert usage.count("\n") <= 3
    for option in re.findall(r"--?[a-z_]+", usage.removeprefix(f"usage: {prog}")):
        assert option in PARSERS[prog]._option_string_actions


@every_parser
def test_every_help_has_examples_that_parse(prog: str) -> None:
    _, _, shown = PARSERS[prog].format_help().rpartition("\nexample")
    examples = shown.partition(":\n")[2].replace("\\\n", " ").splitlines()
    assert examples
    root = PARSERS[" ".join(prog.split()[:2])]
    for example in examples:
        words = shlex.split(example.partition(" > ")[0])
        assert words[: len(prog.split())] == prog.split()
        root.parse(words[2:])


@every_parser
def test_options_are_in_named_groups_and_explained(prog: str) -> None:
    parser = PARSERS[prog]
    help_of = {line.split()[0] for line in parser.format_help().splitlines() if line.strip()}
    ungrouped = {each.dest for each in parser._optionals._group_actions}
    assert ungrouped <= _UNGROUPED
    for option in options_of(parser):
        assert option.help, option.dest
        assert option.help[0].islower() or not option.help[0].isalpha() or " " in option.help
        assert option.help.count("(default:") <= 1
        name = option.option_strings[0] if option.option_strings else str(option.metavar)
        assert {name, f"{name},"} & help_of or option.choices


@every_parser
def test_few_values_are_in_curly_brackets(prog: str) -> None:
    text = " ".join(PARSERS[prog].format_help().split())
    for option in options_of(PARSERS[prog]):
        if option.choices is not None:
            assert len(list(option.choices)) <= _FEW
            assert f"{{{','.join(map(str, option.choices))}}}" in text
            assert option.metavar is None


@every_parser
def test_one_spelling_is_shown_and_both_are_taken(prog: str) -> None:
    parser, shown = PARSERS[prog], PARSERS[prog].format_help()
    for option in options_of(parser):
        for name in option.option_strings:
            body = name.lstrip("-")
            assert "-" not in body
            if "_" in body:
                dashes = f"--{body.replace('_', '-')}"
                assert dashes not in shown
                assert parser._option_string_actions[dashes] is option


@every_parser
def test_no_default_is_a_word_of_python(prog: str) -> None:
    shown = PARSERS[prog].format_help()
    for word in ("SUPPRESS", "MISSING", "(default: None)", "(default: False)", "(default: ())"):
        assert word not in shown


@pytest.mark.parametrize(("prog", "kind"), DECLARED)
def test_every_declared_option_is_shown_with_its_help_and_default(prog: str, kind: Any) -> None:
    shown = " ".join(PARSERS[prog].format_help().split())
    defaults = {field.name: field.default for field in fields(kind)}
    for name, each in declared_of(kind).items():
        assert f"--{name}" in shown or each.by_place
        assert each.help in shown
        default = defaults[name]
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert f"(default: {default:g}" in shown


def test_the_first_screen_of_run_has_what_a_newcomer_needs() -> None:
    screen = PARSERS["llmpq run"].format_help().splitlines()[:24]
    for word in ("--plan", "--input", "--output", "--resume", "--overwrite", "--retry_errors"):
        assert any(line.startswith(f"  {word}") for line in screen), word


def test_what_is_wrong_is_told_with_what_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    plan, lengths = PARSERS["llmpq plan"], PARSERS["llmpq lengths"]
    for parser, arguments, told in (
        (plan, ["--modle", "opt-30b"], "unknown option --modle; nearest: --model"),
        (plan, ["--max-omgea=3"], "unknown option --max-omgea; nearest: --max_omega"),
        (plan, ["--zzz"], "unknown option --zzz; llmpq plan --help lists them"),
        (plan, ["opt-30b"], "'opt-30b' belongs to no option"),
        (plan, ["--head", "midle"], "--head: unknown value 'midle'; choose from auto, first, last"),
        (plan, ["--kv_bits", "4"], "--kv_bits: unknown value 4; choose from 8, 16, auto"),
        (lengths, ["trian"], "unknown value 'trian'; choose from train, evaluate"),
        (
            lengths,
            ["train", "--input", "a", "-o", "p", "--lenghts", "b"],
            "unknown option --lenghts; nearest: --lengths",
        ),
        (
            lengths,
            ["train", "--input", "a", "-o", "p", "--epochs", "2"],
            "llmpq lengths train: error: --epochs has no effect without --kind",
        ),
    ):
        assert exit_code(lambda words, parser=parser: parser.parse(words), arguments) == 2
        *usage, error = capsys.readouterr().err.splitlines()
        assert told in error
        assert usage[0].startswith("usage: llmpq ")


def test_the_help_of_llmpq_fits_too() -> None:
    assert max(map(len, help_text().splitlines())) <= 80
