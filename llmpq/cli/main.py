"""The command `llmpq`: a table of its subcommands, each loaded when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from quant.common.text import printable

if TYPE_CHECKING:
    from llmpq.cli.parser import Parser

_BAD_INPUT = 2


@dataclass(frozen=True)
class Subcommand:
    """A subcommand's `module`, what it does, and its old name.

    The module `llmpq.cli.room.x` has the function `main`, and it or `llmpq.cli.options.x`, which is
    imported sooner, the function `x_parser`.
    """

    module: str
    summary: str
    old_name: str | None = None

    def main(self, arguments: Sequence[str], prog: str) -> int:
        """Run the command under the name `prog`, and return the exit code."""
        code: int = import_module(self.module).main(arguments, prog=prog)
        return code

    def parser(self, prog: str) -> Parser:
        """The parser of the command under the name `prog`."""
        name = self.module.rpartition(".")[2]
        options = f"llmpq.cli.options.{name}"
        module = import_module(options if find_spec(options) else self.module)
        made: Parser = getattr(module, f"{name}_parser")(prog)
        return made


GROUPS: dict[str, dict[str, Subcommand]] = {
    "plan and run": {
        "plan": Subcommand(
            "llmpq.cli.plan",
            "decide bits, stages and micro-batches for a cluster",
            "llmpq-algo",
        ),
        "run": Subcommand(
            "llmpq.cli.run",
            "generate for files of prompts; goes on after any stop",
            "llmpq-dist",
        ),
        "serve": Subcommand(
            "llmpq.cli.serve",
            "answer OpenAI's HTTP requests from a plan's stages",
            "llmpq-serve",
        ),
        "demo": Subcommand("llmpq.cli.demo", "plan and run a small model on this machine"),
    },
    "measure and prepare": {
        "profile": Subcommand(
            "llmpq.cli.profile",
            "measure layers, loading and links of devices",
            "llmpq-profile",
        ),
        "indicator": Subcommand(
            "llmpq.cli.indicator",
            "measure what layers lose at each bitwidth",
            "llmpq-indicator",
        ),
        "quantize": Subcommand(
            "llmpq.cli.quantize",
            "make a GPTQ checkpoint with a plan's bits",
            "llmpq-quantize",
        ),
        "eval": Subcommand(
            "llmpq.cli.evaluate", "measure perplexity of plans or bitwidths", "llmpq-eval"
        ),
        "convert": Subcommand(
            "llmpq.cli.convert", "make safetensors of .bin weights", "llmpq-convert"
        ),
        "lengths": Subcommand(
            "llmpq.cli.lengths",
            "train and judge predictors of output lengths",
            "llmpq-lengths",
        ),
    },
    "look": {
        "devices": Subcommand("llmpq.cli.devices", "list the accelerators that are known"),
        "models": Subcommand("llmpq.cli.models", "list the models that are built in"),
        "jobs": Subcommand("llmpq.cli.jobs", "list jobs, and show one while it runs or after"),
        "completion": Subcommand("llmpq.cli.completion", "print a completion script for a shell"),
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
