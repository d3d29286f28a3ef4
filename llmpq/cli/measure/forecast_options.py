"""The options of `llmpq profile` and `llmpq lengths`."""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.cli.parser import Parser
from llmpq.tokenizing.prompting import PROMPTING_OPTIONS, PromptingOptions, prompting_rule
from planner.option_rules import REQUIRED, Rule, flag, option
from planner.profiles.design import DesignSpace, ProfileOptions

PROFILE, LENGTHS = "llmpq-profile", "llmpq-lengths"

_PROMPTING = " ".join(PROMPTING_OPTIONS)

_PROFILE_DESCRIPTION = """
Measure the times of a model's layers, of loading and of links, here or on a cluster, for llmpq plan
--profiles. The same command goes on with what is not measured yet.
"""
_PROFILE_EXAMPLES = (
    "%(prog)s --model /models/opt-30b -o times.csv",
    "%(prog)s --model opt-30b --cluster us.yaml --address auto -o times.csv",
)
_PROFILE_GROUPS = {
    "model and devices": "model cluster address threads",
    "output": "output",
    "what is measured": "bits dtype batch_sizes max_length prefill_tokens decode_tokens "
    "layers_only",
    "effort": "points rounds budget_s seed",
}
_PROFILE_RULES = (
    Rule(("threads",), "the file says how many threads a CPU has; leave it out", beside="cluster"),
    Rule(
        ("threads",),
        "the cluster's devices are measured as they are; leave it out, or state threads in a "
        "--cluster file",
        beside="address",
    ),
)


@dataclass(frozen=True)
class ProfileCommand:
    model: str = option(
        "MODEL", "folder, GGUF file, config.json, built-in name (opt-30b) or hub id", REQUIRED
    )
    output: str = option(
        "FILE",
        "CSV of layer times to write, with one of loading and one of links beside it; what the "
        "files have already is not measured again",
        REQUIRED,
        names=("-o", "--output"),
    )
    cluster: str | None = option("FILE", "cluster YAML: one Ray task for each kind of device")
    address: str | None = option(
        "ADDRESS", "Ray cluster to measure on (default: this machine is measured)"
    )
    threads: int | None = option(
        "COUNT", "threads of a CPU (default: all that this process may use)"
    )
    layers_only: bool = flag("measure neither loading nor hops between stages, nor sums of groups")


def profile_parser(prog: str | None = PROFILE) -> Parser:
    parser = Parser(prog, _PROFILE_DESCRIPTION, _PROFILE_EXAMPLES, _PROFILE_RULES)
    parser.declare(_PROFILE_GROUPS, ProfileCommand, ProfileOptions, DesignSpace)
    return parser


_LENGTHS_DESCRIPTION = """
Train and judge predictors of output lengths, by which requests reserve memory under policy s3.
"""
_TRAIN = "train --input prompts.jsonl --lengths results.jsonl -o predictor"
_JUDGE = """evaluate --predictor predictor --input new.jsonl \\
      --lengths new_results.jsonl"""
_ROWS = {"finished rows": f"input lengths model {_PROMPTING}"}
_FIGURES = {"output": "json"}
_TRAIN_GROUPS = {
    **_ROWS,
    "predictor": "output overwrite kind base buckets longest epochs seed",
    **_FIGURES,
}
_JUDGE_GROUPS = {"predictor": "predictor", **_ROWS, **_FIGURES}
_ROW_RULES = (prompting_rule("model"),)
_TRAIN_RULES = (
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


@dataclass(frozen=True, kw_only=True)
class LengthsCommand(PromptingOptions):
    input: tuple[str, ...] = option(
        "PATH",
        "prompts: files, folders, globs as of llmpq run, each row with output_tokens unless "
        "--lengths is given",
        REQUIRED,
        more={"action": "extend"},
    )
    lengths: tuple[str, ...] = option(
        "PATH", "results of these prompts: outputs of llmpq run, or answers of OpenAI's batches", ()
    )
    model: str | None = option(
        "MODEL",
        "served model, whose tokenizer prompts get (default: none, prompts are read as texts)",
    )
    json: str | None = option("FILE", "write the figures as JSON")


@dataclass(frozen=True, kw_only=True)
class TrainCommand(LengthsCommand):
    output: str = option("FOLDER", "folder to write", REQUIRED, names=("-o", "--output"))
    overwrite: bool = flag("replace the predictor there")


@dataclass(frozen=True, kw_only=True)
class JudgeCommand(LengthsCommand):
    predictor: str = option("FOLDER", "predictor of llmpq lengths train", REQUIRED)


def lengths_parser(prog: str | None = LENGTHS) -> Parser:
    from llmpq.lengths.training import TrainingOptions  # slow to load, for these alone

    parser = Parser(prog, _LENGTHS_DESCRIPTION, (f"%(prog)s {_TRAIN}", f"%(prog)s {_JUDGE}"))
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="train|evaluate", title="commands"
    )
    train = commands.add_parser(
        "train",
        help="train a predictor on finished rows",
        description="Train a predictor of output lengths on finished rows.",
        examples=("%(prog)s" + _TRAIN.removeprefix("train"),),
        rules=_TRAIN_RULES,
    )
    train.declare(_TRAIN_GROUPS, TrainCommand, TrainingOptions)
    evaluate = commands.add_parser(
        "evaluate",
        help="judge a predictor by finished rows",
        description="Judge a predictor of output lengths by finished rows.",
        examples=("%(prog)s" + _JUDGE.removeprefix("evaluate"),),
        rules=_ROW_RULES,
    )
    evaluate.declare(_JUDGE_GROUPS, JudgeCommand)
    return parser
