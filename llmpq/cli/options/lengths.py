"""The options of `llmpq-lengths`."""

from __future__ import annotations

from llmpq.cli.common import Parser
from llmpq.lengths.buckets import BUCKETS
from llmpq.lengths.training import KINDS
from planner.option_rules import Rule

TRAIN_RULES = (
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


def lengths_parser(description: str | None) -> tuple[Parser, Parser, Parser]:
    """The parser of both commands, and those of `train` and `evaluate`."""
    parser = Parser(prog="llmpq-lengths", description=description)
    commands = parser.add_subparsers(dest="command", required=True, metavar="train|evaluate")
    train = commands.add_parser("train", help="train a predictor on finished rows")
    _add_rows(train)
    _add_training(train)
    evaluate = commands.add_parser("evaluate", help="judge a predictor by finished rows")
    evaluate.option(
        "--predictor", required=True, metavar="FOLDER", help="predictor of llmpq-lengths train"
    )
    _add_rows(evaluate)
    return parser, train, evaluate


def _add_rows(parser: Parser) -> None:
    """Where finished rows are, and where figures go."""
    add = parser.option
    add(
        "--input",
        required=True,
        nargs="+",
        action="extend",
        metavar="PATH",
        help="prompts: files, folders, globs as of llmpq-dist, each row with output_tokens unless "
        "--lengths is given",
    )
    add(
        "--lengths",
        nargs="+",
        metavar="PATH",
        help="results of these prompts: outputs of llmpq-dist, or answers of OpenAI's batches",
    )
    add(
        "--model",
        metavar="MODEL",
        help="served model, whose tokenizer prompts get (none: prompts are read as texts)",
    )
    add("--json", metavar="FILE", help="write the figures as JSON")


def _add_training(parser: Parser) -> None:
    """What is trained."""
    add = parser.option
    add("-o", "--output", dest="output", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the predictor there")
    add("--kind", choices=KINDS, default=KINDS[0], help="trees, or a transformer")
    add(
        "--base",
        metavar="MODEL",
        help="folder or hub id of a pretrained classifier such as DistilBERT (none: trained anew)",
    )
    add("--buckets", type=int, default=BUCKETS, help="buckets of lengths")
    add("--longest", type=int, metavar="TOKENS", help="most tokens of an answer (the longest one)")
    add("--epochs", type=int, help="times that a classifier sees each row (10, more of few rows)")
    add("--seed", type=int, default=0, help="seed of held-out rows and of the training")
