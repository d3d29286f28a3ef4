"""`llmpq convert`: make a safetensors checkpoint of a `.bin` one, since stages read no `.bin`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmpq.cli.common import EXIT_DONE, command_line, console, run_command
from llmpq.cli.parser import Parser, made
from llmpq.cli.terminal import TaskProgress
from planner.option_rules import REQUIRED, argument

PROG = "llmpq-convert"

_DESCRIPTION = "Make a safetensors checkpoint of a .bin one, since stages read no .bin."
_EXAMPLES = ("%(prog)s /models/opt-30b-bin /models/opt-30b",)


@dataclass(frozen=True)
class ConvertCommand:
    """What is converted, and the folder that is made."""

    source: Path = argument("SOURCE", "folder with pytorch_model.bin or its index", REQUIRED)
    target: Path = argument("TARGET", "folder to make", REQUIRED)


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Entry point; returns the exit code."""
    options = made(ConvertCommand, convert_parser(prog).parse(arguments))
    return run_command(prog, lambda: _convert(options.source, options.target))


def convert_parser(prog: str | None = PROG) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES)
    parser.declare({"folders": "source target"}, ConvertCommand)
    return parser


def _convert(source: Path, target: Path) -> int:
    from quant.checkpoint.convert import convert

    with TaskProgress("converting", "files") as progress:
        made = convert(source, target, progress.report)
    sentence = (
        f"wrote {made.tensors} tensors ({made.tensor_bytes / 2**30:.2f} GiB) in {made.shards} "
        f"safetensors {'file' if made.shards == 1 else 'files'} to {made.target}; plan it: "
        + command_line("llmpq", "plan", "--model", made.target)
        + " --cluster cluster.yaml"
    )
    console().print(sentence, markup=False, highlight=False, soft_wrap=True)
    return EXIT_DONE


if __name__ == "__main__":
    raise SystemExit(main())
