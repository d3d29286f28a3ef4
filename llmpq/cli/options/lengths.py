"""The options of `llmpq lengths`."""

from __future__ import annotations

from llmpq.cli.options.prompting import add_prompting, prompting_rule
from llmpq.cli.parser import OptionGroup, Parser
from llmpq.lengths.buckets import BUCKETS
from llmpq.lengths.training import KINDS
from planner.option_rules import Rule

_ROW_RULES = (prompting_rule(without="model"),)
TRAIN_RULES = (
    *_ROW_RULES,
    Rule(
        ("base", "epochs"),
        "trees have none; choose --kind classifier, or leave it out",
        beside="kind",
        values=("boosting",),
    ),
    Rule(
        ("base", "epochs"),
        "trees, which are the default, have none; choose --kind classifier, or leave it out",
        without=("kind",),
    ),
)


PROG = "llmpq-lengths"

_DESCRIPTION = """
Train and judge predictors of output lengths, by which requests reserve memory under policy s3.
"""
_TRAIN = "train --input prompts.jsonl --lengths results.jsonl -o predictor"
_EVALUATE = """evaluate --predictor predictor --input new.jsonl \\
      --lengths new_results.jsonl"""


def lengths_parser(prog: str | None = PROG) -> Parser:
    """The parser of both commands."""
    parser = Parser(prog, _DESCRIPTION, (f"%(prog)s {_TRAIN}", f"%(prog)s {_EVALUATE}"))
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="train|evaluate", title="commands"
    )
    train = commands.add_parser(
        "train",
        help="train a predictor on finished rows",
        description="Train a predictor of output lengths on finished rows.",
        examples=("%(prog)s" + _TRAIN.removeprefix("train"),),
        rules=TRAIN_RULES,
    )
    _add_rows(train.group("finished rows"))
    _add_training(train.group("predictor"))
    _add_figures(train.group("output"))
    evaluate = commands.add_parser(
        "evaluate",
        help="judge a predictor by finished rows",
        description="Judge a predictor of output lengths by finished rows.",
        examples=("%(prog)s" + _EVALUATE.removeprefix("evaluate"),),
        rules=_ROW_RULES,
    )
    evaluate.group("predictor").option(
        "--predictor", required=True, metavar="FOLDER", help="predictor of llmpq lengths train"
    )
    _add_rows(evaluate.group("finished rows"))
    _add_figures(evaluate.group("output"))
    return parser


def _add_rows(group: OptionGroup) -> None:
    """Add where finished rows are."""
    add = group.option
    add(
        "--input",
        required=True,
        nargs="+",
        action="extend",
        metavar="PATH",
        help="prompts: files, folders, globs as of llmpq run, each row with output_tokens unless "
        "--lengths is given",
    )
    add(
        "--lengths",
        nargs="+",
        metavar="PATH",
        help="results of these prompts: outputs of llmpq run, or answers of OpenAI's batches",
    )
    add(
        "--model",
        metavar="MODEL",
        help="served model, whose tokenizer prompts get (default: none, prompts are read as texts)",
    )
    add_prompting(group)


def _add_figures(group: OptionGroup) -> None:
    group.option("--json", metavar="FILE", help="write the figures as JSON")


def _add_training(group: OptionGroup) -> None:
    """Add what is trained."""
    add = group.option
    add("-o", "--output", dest="output", required=True, metavar="FOLDER", help="folder to write")
    add("--overwrite", action="store_true", help="replace the predictor there")
    add("--kind", choices=KINDS, default=KINDS[0], help="trees, or a transformer")
    add(
        "--base",
        metavar="MODEL",
        help="folder or hub id of a pretrained classifier such as DistilBERT (default: none, it "
        "is trained anew)",
    )
    add("--buckets", type=int, metavar="COUNT", default=BUCKETS, help="buckets of lengths")
    add(
        "--longest",
        type=int,
        metavar="TOKENS",
        help="most tokens of an answer (default: the longest one)",
    )
    add(
        "--epochs",
        type=int,
        metavar="COUNT",
        help="times that a classifier sees each row (default: 10, more of few rows)",
    )
    add("--seed", type=int, metavar="SEED", default=0, help="of held-out rows and of the training")
