"""The command `llmpq`: a table of its subcommands, each loaded when it is called, and
`llmpq completion`, which tells shells of them.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

from llmpq.cli.common import EXIT_BAD_INPUT, EXIT_DONE, run_command
from llmpq.cli.parser import Parser, made
from planner.option_rules import REQUIRED, argument
from quant.common.text import printable

_ELSEWHERE = ("-h", "--help", "--address", "--submit", "--follow", "--stop")
"""Beginnings of options with which a command starts no stages on this machine."""


@dataclass(frozen=True)
class Subcommand:
    """A subcommand, by the entry points in `llmpq.cli` of its function and of its light parser."""

    entry: str
    parser_entry: str
    summary: str
    old_name: str | None = None
    runs: bool = False

    def main(self, arguments: Sequence[str], prog: str) -> int:
        """Run the command under the name `prog`, and return the exit code. What stages on this
        machine import is prepared ahead of what commands that `run` them do.
        """
        with ExitStack() as stack:
            if self.runs and not any(each.startswith(_ELSEWHERE) for each in arguments):
                from llmpq.remote.session import prepared_ahead

                stack.enter_context(prepared_ahead())
            code: int = resolve_name(f"llmpq.cli.{self.entry}")(arguments, prog=prog)
            return code

    def parser(self, prog: str) -> Parser:
        made: Parser = resolve_name(f"llmpq.cli.{self.parser_entry}")(prog)
        return made


GROUPS: dict[str, dict[str, Subcommand]] = {
    "plan and run": {
        "plan": Subcommand(
            "plan:main",
            "plan_options:plan_parser",
            "decide bits, stages and micro-batches for a cluster",
            "llmpq-algo",
        ),
        "run": Subcommand(
            "run:main",
            "run_options:run_parser",
            "generate for files of prompts; goes on after any stop",
            "llmpq-dist",
            runs=True,
        ),
        "serve": Subcommand(
            "serve:main",
            "run_options:serve_parser",
            "answer OpenAI's HTTP requests from a plan's stages",
            "llmpq-serve",
        ),
        "recipe": Subcommand(
            "recipe:main",
            "recipe:recipe_parser",
            "write what starts a plan's Ray by Slurm, KubeRay or ssh",
        ),
        "demo": Subcommand(
            "demo:main",
            "demo:demo_parser",
            "plan and run a small model on this machine",
            runs=True,
        ),
    },
    "measure and prepare": {
        "profile": Subcommand(
            "measure.forecasts:profile_main",
            "measure.forecast_options:profile_parser",
            "measure layers, loading and links of devices",
            "llmpq-profile",
        ),
        "indicator": Subcommand(
            "measure.quality:indicator_main",
            "measure.weight_options:indicator_parser",
            "measure what layers lose at each bitwidth",
            "llmpq-indicator",
        ),
        "quantize": Subcommand(
            "measure.checkpoints:quantize_main",
            "measure.weight_options:quantize_parser",
            "make a calibrated checkpoint with a plan's bits",
            "llmpq-quantize",
        ),
        "export": Subcommand(
            "measure.checkpoints:export_main",
            "measure.weight_options:export_parser",
            "write a plan for vLLM: weights and how to start it",
        ),
        "eval": Subcommand(
            "measure.quality:evaluate_main",
            "measure.weight_options:evaluate_parser",
            "measure perplexity of plans or bitwidths",
            "llmpq-eval",
        ),
        "convert": Subcommand(
            "measure.checkpoints:convert_main",
            "measure.weight_options:convert_parser",
            "make safetensors of .bin weights",
            "llmpq-convert",
        ),
        "lengths": Subcommand(
            "measure.forecasts:lengths_main",
            "measure.forecast_options:lengths_parser",
            "train and judge predictors of output lengths",
            "llmpq-lengths",
        ),
    },
    "look": {
        "doctor": Subcommand(
            "doctor:doctor_main",
            "doctor:doctor_parser",
            "say what works on this machine and how to mend it",
        ),
        "devices": Subcommand(
            "device_list:devices_main",
            "device_list:devices_parser",
            "list the accelerators that are known",
        ),
        "models": Subcommand(
            "model_list:models_main",
            "model_list:models_parser",
            "list the models that are built in",
        ),
        "jobs": Subcommand(
            "jobs:main", "jobs:jobs_parser", "list jobs, show one, or all as live pages"
        ),
        "completion": Subcommand(
            "main:completion_main",
            "main:completion_parser",
            "print a completion script for a shell",
        ),
    },
}
"""The subcommands, in the groups of the help."""

SUBCOMMANDS = {name: each for group in GROUPS.values() for name, each in group.items()}

_EXAMPLES = """\
examples:
  llmpq plan --model opt-30b --cluster cluster.yaml --prompts 3000 -o plan.json
  llmpq run --plan plan.json --input prompts.jsonl --output results.jsonl"""


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(help_text())
        return 0
    if given[0] == "help":
        return main([*given[1:2], "--help"])
    if given[0] in ("-V", "--version"):
        from llmpq.version import llmpq_version

        sys.stdout.write(f"llmpq {llmpq_version()}\n")
        return 0
    found = SUBCOMMANDS.get(given[0])
    if found is None:
        sys.stderr.write(f"llmpq: error: {unknown(given[0])}\n")
        return EXIT_BAD_INPUT
    atexit.register(gc.freeze)  # Python looks through all modules for garbage as it ends
    prog = f"llmpq {given[0]}"
    if {"-h", "--help"} & set(given):
        found.parser(prog).parse(given[1:])  # leaves, without what the command itself needs
    return found.main(given[1:], prog)


def help_text() -> str:
    import llmpq

    lines = ["usage: llmpq COMMAND [options]", "", llmpq.__doc__ or "", ""]
    for title, group in GROUPS.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<12}{each.summary}" for name, each in group.items()]
        lines.append("")
    lines += [
        "options:",
        "  --help      show this help; llmpq plan --help that of a command",
        "  --version   show the version of llmpq",
    ]
    return "\n".join([*lines, "", _EXAMPLES, ""])


def unknown(word: str) -> str:
    """What to tell about a word that is no subcommand; the old names lead to the new ones."""
    new_names = {name: name for name in SUBCOMMANDS}
    for name, each in SUBCOMMANDS.items():
        new_names |= {old.removeprefix("llmpq-"): name for old in (each.old_name,) if old}
    near = get_close_matches(word, new_names, n=1)
    what = "option" if word.startswith("-") else "command"
    remedy = f"nearest: {new_names[near[0]]}" if near else "llmpq --help lists the commands"
    return printable(f"unknown {what} {word!r}; {remedy}")


COMPLETION = "llmpq completion"
SHELLS = ("bash", "zsh", "fish", "tcsh")

_COMPLETION_DESCRIPTION = """
Print a script by which a shell completes the commands of llmpq, their options, the values of
options that have few, and names of files.
"""
_COMPLETION_EXAMPLES = (
    "%(prog)s bash > ~/.local/share/bash-completion/completions/llmpq",
    '%(prog)s zsh > "${fpath[1]}/_llmpq"',
    "%(prog)s fish > ~/.config/fish/completions/llmpq.fish",
)

_FILES, _FOLDERS = ("FILE", "PATH"), ("FOLDER", "DIR")
"""What the value of an option is called where it is a file, and where it is a folder."""


@dataclass(frozen=True)
class CompletionCommand:
    shell: str = argument(SHELLS, "which shell the script is for", REQUIRED)


def completion_main(arguments: Sequence[str] | None = None, prog: str = COMPLETION) -> int:
    options = made(CompletionCommand, completion_parser(prog).parse(arguments))
    return run_command(prog, lambda: _print_script(options.shell))


def completion_parser(prog: str | None = COMPLETION) -> Parser:
    parser = Parser(prog, _COMPLETION_DESCRIPTION, _COMPLETION_EXAMPLES)
    parser.declare({"shell": "shell"}, CompletionCommand)
    return parser


def _print_script(shell: str) -> int:
    sys.stdout.write(completion_script(shell) + "\n")
    return EXIT_DONE


def completion_script(shell: str) -> str:
    import shtab

    root = whole_parser()
    for each in _parsers(root):
        for action in each._actions:
            complete = _complete(action)
            if complete is not None:
                action.complete = complete  # type: ignore[attr-defined]  # where shtab looks
    made: str = shtab.complete(root, shell)
    return made


def whole_parser() -> Parser:
    root = Parser("llmpq")
    made = cast(type[Parser], _made)
    commands = root.add_subparsers(metavar="COMMAND", parser_class=made)
    for name, each in SUBCOMMANDS.items():
        commands.add_parser(name, help=each.summary, make=partial(each.parser, f"llmpq {name}"))
    return root


def _made(make: Callable[[], Parser], **_: object) -> Parser:
    """The parser that `make` makes, in place of an empty one."""
    return make()


def _parsers(root: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield root
    for action in root._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _parsers(below)


def _complete(action: argparse.Action) -> Any:
    """What a shell offers as values: files, folders, or None for neither."""
    import shtab

    if action.choices is not None:
        return None
    if action.metavar in _FILES:
        return shtab.FILE
    return shtab.DIRECTORY if action.metavar in _FOLDERS else None
