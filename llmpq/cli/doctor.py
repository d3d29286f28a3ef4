"""`llmpq doctor`: what works on this machine, what does not, and the command that mends it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from llmpq.cli.common import EXIT_DONE, EXIT_FAILED, console, print_json, run_command
from llmpq.cli.parser import Parser, made
from planner.option_rules import flag, option

if TYPE_CHECKING:
    from llmpq.doctor.findings import Finding

DOCTOR = "llmpq doctor"

_DESCRIPTION = """
Look at what runs need: NVIDIA's driver and GPUs, torch and the GPUs it has code for, bitsandbytes,
kernels, numba, Ray, memory, folders. Says what works, what works badly and what is missing, each
with the command that mends it. Exit code 0: runs will start; 1: something is missing.
"""
_EXAMPLES = ("%(prog)s", "%(prog)s --address auto", "%(prog)s --json")


@dataclass(frozen=True)
class DoctorCommand:
    address: str | None = option("HOST:PORT", "also join the Ray cluster there (auto: one on here)")
    json: bool = flag("as JSON, with all that was found")


def doctor_main(arguments: Sequence[str] | None = None, prog: str = DOCTOR) -> int:
    options = made(DoctorCommand, doctor_parser(prog).parse(arguments))
    return run_command(prog, partial(_examine, options))


def doctor_parser(prog: str | None = DOCTOR) -> Parser:
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES)
    parser.declare({"what is looked at": "address", "output": "json"}, DoctorCommand)
    return parser


def _examine(options: DoctorCommand) -> int:
    from llmpq.doctor.findings import all_works, findings
    from llmpq.doctor.probes import facts_here
    from llmpq.doctor.remedies import Installer
    from llmpq.version import llmpq_version

    facts = facts_here(options.address)
    found = findings(facts, Installer(sys.executable, find_spec("pip") is not None))
    works = all_works(found)
    if options.json:
        shown = {"llmpq": llmpq_version(), "works": works}
        print_json(shown | {"findings": list(map(asdict, found)), "facts": asdict(facts)})
    else:
        _print(found, works)
    return EXIT_DONE if works else EXIT_FAILED


def _print(found: Sequence[Finding], works: bool) -> None:
    """A line for each finding, its remedy below; commands are not broken into lines."""
    screen = console()
    wide = max(len(each.subject) for each in found)
    for each in found:
        screen.print(f"{each.state:<6} {each.subject:<{wide}}  {each.text}", soft_wrap=True)
        if each.remedy is not None:
            screen.print(f"{'':<{wide + 7}}  -> {each.remedy}", soft_wrap=True, highlight=False)
    missing = sum(each.state == "fails" for each in found)
    end = "runs can start here" if works else f"{missing} of {len(found)} fail; -> says what mends"
    screen.print(end, soft_wrap=True)
