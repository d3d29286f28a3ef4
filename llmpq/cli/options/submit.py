"""The options of `llmpq run` that make it a job of a Ray cluster."""

from __future__ import annotations

from llmpq.cli.parser import OptionGroup, Parser
from planner.option_rules import Rule

SUBMIT_RULES = (
    Rule(
        ("no_wait", "follow_job", "stop_job"),
        "it is only for jobs of a Ray cluster; give the cluster's address",
        without=("submit",),
    ),
    Rule(
        ("follow_job",),
        "only one job is followed or stopped at a time; give one of them",
        beside="stop_job",
    ),
    *(
        Rule(
            ("no_wait",), "no job is started that could be waited for; leave it out", beside=beside
        )
        for beside in ("follow_job", "stop_job")
    ),
)


def submit_parser(prog: str) -> Parser:
    """The parser of these options alone, which leaves the others to `llmpq run`."""
    parser = Parser(prog, rules=SUBMIT_RULES, add_help=False)
    add_submitting(parser.group("as a job of a Ray cluster"))
    return parser


def add_submitting(group: OptionGroup) -> None:
    """Add the options that say where to run."""
    add = group.option
    add(
        "--submit",
        metavar="URL",
        help="run as a job of this cluster: http://HEAD:8265; --address is not needed",
    )
    add("--no_wait", action="store_true", help="print the job's id and do not wait for its end")
    add("--follow_job", metavar="ID", help="show a job's log")
    add(
        "--stop_job",
        metavar="ID",
        help="stop a job after it has committed what is finished",
    )
