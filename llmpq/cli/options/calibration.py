"""Options of what is calibrated on, which both `llmpq indicator` and `llmpq quantize` have."""

from __future__ import annotations

from llmpq.cli.options.prompting import add_prompting, prompting_rule
from llmpq.cli.parser import OptionGroup

CALIBRATION_RULES = (prompting_rule(without="input"),)


def add_calibration(group: OptionGroup) -> None:
    """Add the texts and the prompts."""
    add = group.option
    add(
        "--calibration",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="plain text, or .jsonl with prompt or text (a string or token ids); folders, globs; "
        "- for stdin",
    )
    add(
        "--input",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help="prompts of the job, as for llmpq run: calibrated on as the model will see them",
    )
    add_prompting(group)
