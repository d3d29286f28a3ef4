"""`llmpq demo`: plan and run a dozen questions on SmolLM2-135M, over three GPUs that CPUs play."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.text import Text

from llmpq.cli.common import console, run_command
from llmpq.cli.parser import Parser, made
from planner.option_rules import argument
from quant.checkpoint.model_reference import DEMO, demo_gguf
from quant.common.errors import InputError

FOLDER = "demo_output"
_CLUSTER, _QUESTIONS, _PLAN, _ANSWERS = (
    "cluster.yaml",
    "questions.jsonl",
    "plan.json",
    "answers.jsonl",
)
_PAGE, _SERVED = "plan.html", "serve.json"
_LIMITS = ("--n", "64", "--bits", "8", "16")
_SERVED_LIMITS = ("--s", "128", "--n", "96", "--global_bz", "4", "--bits", "4", "8", "16")
"""Prompts of 128 tokens and answers of 96, four at a time: the demo's cluster has room for them."""


PROG = "llmpq demo"

_DESCRIPTION = """
Plan and run a dozen questions on SmolLM2-135M-Instruct, over three GPUs that CPUs play.
"""
_EXAMPLES = ("%(prog)s", "%(prog)s my_demo")


@dataclass(frozen=True)
class DemoCommand:
    folder: str = argument("FOLDER", "folder for what it writes", FOLDER, more={"nargs": "?"})


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    options = made(DemoCommand, demo_parser(prog).parse(arguments))
    return run_command(prog, lambda: _demo(options))


def demo_parser(prog: str | None = PROG) -> Parser:
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES)
    parser.declare({"output": "folder"}, DemoCommand)
    return parser


def _demo(options: DemoCommand) -> int:
    from llmpq.cli import plan as plan_cli  # slow to load
    from llmpq.cli import run as run_cli

    demo_gguf()  # before a folder is made
    folder = Path(options.folder)
    _copy_files(folder)
    cluster, questions = str(folder / _CLUSTER), str(folder / _QUESTIONS)
    plan, answers = str(folder / _PLAN), str(folder / _ANSWERS)
    planning = ["--model", DEMO, "--cluster", cluster, "--input", questions]
    planning += [*_LIMITS, "-o", plan]
    running = ["--plan", plan, "--input", questions, "--output", answers, "--overwrite"]
    _show_command("plan", planning)
    code = plan_cli.main(planning, prog="llmpq plan")
    if code:
        return code
    _show_command("run", running)
    code = run_cli.main(running, prog="llmpq run")
    if Path(answers).is_file():
        _show_answers(Path(questions), Path(answers))
        _show_what_next(folder)
    return code


def _copy_files(folder: Path) -> None:
    source = files("llmpq").joinpath("demo")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (_CLUSTER, _QUESTIONS):
            (folder / name).write_bytes(source.joinpath(name).read_bytes())
    except OSError as error:
        raise InputError(
            f"cannot write into {folder}: {error.strerror}; name another folder: llmpq demo FOLDER"
        ) from error


def _show_command(name: str, arguments: Sequence[str]) -> None:
    shown = Text(f"\n$ llmpq {name} {shlex.join(arguments)}\n", style="bold")
    console().print(shown, soft_wrap=True)
    sys.stdout.flush()


def _show_answers(questions: Path, answers: Path) -> None:
    found = {str(row["custom_id"]): row for row in _rows(answers)}
    for row in _rows(questions):
        result = found.get(str(row["custom_id"]), {})
        answer = result.get("text") or f"(no answer: {result.get('error')})"
        console().print(Text(f"\n{row['messages'][-1]['content']}", style="bold"), soft_wrap=True)
        console().print(Text(answer.strip()), soft_wrap=True)


def _rows(path: Path) -> list[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _show_what_next(folder: Path) -> None:
    named = {
        name: shlex.quote(str(folder / name)) for name in (_CLUSTER, _QUESTIONS, _PAGE, _SERVED)
    }
    written = ", ".join(str(folder / name) for name in (_CLUSTER, _QUESTIONS, _PLAN, _ANSWERS))
    planning = f"llmpq plan --model {DEMO} --cluster {named[_CLUSTER]}"
    lines = (
        f"\nWritten: {written}",
        "Why each layer has its bits, as a page:",
        f"  {planning} --input {named[_QUESTIONS]} {shlex.join(_LIMITS)} --report {named[_PAGE]}",
        "Chat by OpenAI's HTTP interface:",
        f"  {planning} {shlex.join(_SERVED_LIMITS)} -o {named[_SERVED]}",
        f"  llmpq serve --plan {named[_SERVED]}",
        "Your own model and prompts:",
        "  llmpq plan --model MODEL.gguf --cluster YOURS.yaml --input YOURS.jsonl -o plan.json",
    )
    console().print(Text("\n".join(lines)), soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
