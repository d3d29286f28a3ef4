"""The command `llmpq`: a table of its subcommands, each loaded when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from quant.common.text import printable

if TYPE_CHECKING:
    from llmpq.cli.parser import Parser

_BAD_INPUT = 2


@dataclass(frozen=True)
class Subcommand:
    """A subcommand's `module` in `llmpq.cli`, which has the function `main`, what it does, and its
    old name. The module `options` has the function of its parser; None: the same one.
    """

    module: str
    summary: str
    old_name: str | None = None
    options: str | None = None

    def main(self, arguments: Sequence[str], prog: str) -> int:
        """Run the command under the name `prog`, and return the exit code."""
        code: int = import_module(f"llmpq.cli.{self.module}").main(arguments, prog=prog)
        return code

    def parser(self, prog: str) -> Parser:
        """The parser of the command under the name `prog`, without what the command needs."""
        module = import_module(f"llmpq.cli.{self.options or self.module}")
        made: Parser = getattr(module, f"{self.module}_parser")(prog)
        return made


_MEASURE = "measure_options"

GROUPS: dict[str, dict[str, Subcommand]] = {
    "plan and run": {
        "plan": Subcommand(
            "plan",
            "decide bits, stages and micro-batches for a cluster",
            "llmpq-algo",
            "plan_options",
        ),
        "run": Subcommand(
            "run",
            "generate for files of prompts; goes on after any stop",
            "llmpq-dist",
            "run_options",
        ),
        "serve": Subcommand(
            "serve",
            "answer OpenAI's HTTP requests from a plan's stages",
            "llmpq-serve",
            "run_options",
        ),
        "demo": Subcommand("demo", "plan and run a small model on this machine"),
    },
    "measure and prepare": {
        "profile": Subcommand(
            "profile", "measure layers, loading and links of devices", "llmpq-profile", _MEASURE
        ),
        "indicator": Subcommand(
            "indicator", "measure what layers lose at each bitwidth", "llmpq-indicator", _MEASURE
        ),
        "quantize": Subcommand(
            "quantize", "make a GPTQ checkpoint with a plan's bits", "llmpq-quantize", _MEASURE
        ),
        "eval": Subcommand(
            "evaluate", "measure perplexity of plans or bitwidths", "llmpq-eval", _MEASURE
        ),
        "convert": Subcommand("convert", "make safetensors of .bin weights", "llmpq-convert"),
        "lengths": Subcommand(
            "lengths", "train and judge predictors of output lengths", "llmpq-lengths", _MEASURE
        ),
    },
    "look": {
        "devices": Subcommand("devices", "list the accelerators that are known"),
        "models": Subcommand("models", "list the models that are built in"),
        "jobs": Subcommand("jobs", "list jobs, and show one while it runs or after"),
        "completion": Subcommand("completion", "print a completion script for a shell"),
    },
}
"""The subcommands, in the groups of the help."""

SUBCOMMANDS = {name: each for group in GROUPS.values() for name, each in group.items()}

_EXAMPLES = """\
examples:
  llmpq plan --model opt-30b --cluster cluster.yaml --prompts 3000 -o plan.json
  llmpq run --plan plan.json --input prompts.jsonl --output results.jsonl"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
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
        return _BAD_INPUT
    prog = f"llmpq {given[0]}"
    if {"-h", "--help"} & set(given):
        found.parser(prog).parse(given[1:])  # leaves, without what the command itself needs
    return found.main(given[1:], prog)


def help_text() -> str:
    """The help of `llmpq` itself, within 80 columns."""
    lines = ["usage: llmpq COMMAND [options]", "", _description(), ""]
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


def _description() -> str:
    import llmpq

    return llmpq.__doc__ or ""


def unknown(word: str) -> str:
    """What to tell about a word that is no subcommand; the old names lead to the new ones."""
    new_names = {name: name for name in SUBCOMMANDS}
    for name, each in SUBCOMMANDS.items():
        new_names |= {old.removeprefix("llmpq-"): name for old in (each.old_name,) if old}
    near = get_close_matches(word, new_names, n=1)
    what = "option" if word.startswith("-") else "command"
    remedy = f"nearest: {new_names[near[0]]}" if near else "llmpq --help lists the commands"
    return printable(f"unknown {what} {word!r}; {remedy}")


if __name__ == "__main__":
    raise SystemExit(main())
