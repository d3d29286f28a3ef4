"""`llmpq recipe`: write what starts the Ray of a cluster file, and a command on it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmpq.cli.common import EXIT_DONE, run_command, target_file, tell_written
from llmpq.cli.parser import Parser, made
from llmpq.cli.run import check_cluster
from llmpq.cli.run_options import StoredPlan, output_options, run_options, run_parser, serve_parser
from llmpq.plan import load_plan
from llmpq.recipe.command import RecipeCommand
from llmpq.recipe.kuberay import kuberay_file
from llmpq.recipe.machines import machines_of
from llmpq.recipe.options import KubeRayOptions, RecipeOptions, SlurmOptions, SshOptions
from llmpq.recipe.texts import Recipe, job_name, ray_up_file, slurm_script, ssh_script
from planner.cluster.spec import ClusterSpec
from quant.common.errors import InputError, SpecError
from quant.common.files import write_whole

PROG = "llmpq recipe"

_DESCRIPTION = """
Write what starts Ray on the machines of a cluster file, with the devices that a plan uses, and
runs a command there. The command stands behind --, as it would be entered on one of the machines.
"""


@dataclass(frozen=True)
class Kind:
    """A kind of recipe: its options in the order of the help, what writes it, and an example."""

    options: type[RecipeOptions]
    names: str
    help: str
    write: Callable[[Recipe, Any], str]
    example: str


def _write_ssh(recipe: Recipe, options: SshOptions) -> str:
    return (ray_up_file if options.ray_up else ssh_script)(recipe, options)


_COMMON = "cluster output name"
KINDS = {
    "slurm": Kind(
        SlurmOptions,
        f"{_COMMON} time partition by_name gpu_label bin tls",
        "a script for sbatch, which is queued again until its job is done",
        slurm_script,
        "cluster.yaml -o job.sh -- \\\n"
        "      run --plan plan.json --input prompts.jsonl --output results.jsonl",
    ),
    "kuberay": Kind(
        KubeRayOptions,
        f"{_COMMON} image claim mount gpu_label tls",
        "manifests for Kubernetes with KubeRay",
        kuberay_file,
        "cluster.yaml --image IMAGE -o job.yaml -- run \\\n"
        "      --plan plan.json --input /data/prompts.jsonl --output /data/out.jsonl",
    ),
    "ssh": Kind(
        SshOptions,
        f"{_COMMON} ray_up user port bin tls",
        "a script for machines that ssh reaches by the names of the cluster file",
        _write_ssh,
        "cluster.yaml -o lab.sh -- serve --plan plan.json",
    ),
}


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    given = recipe_parser(prog).parse(arguments)
    return run_command(prog, lambda: _write(given))


def recipe_parser(prog: str | None = PROG) -> Parser:
    examples = [f"%(prog)s {name} {kind.example}" for name, kind in KINDS.items()]
    parser = Parser(prog, _DESCRIPTION, examples, command="words")
    commands = parser.add_subparsers(
        dest="kind", required=True, metavar="|".join(KINDS), title="kinds"
    )
    for name, kind in KINDS.items():
        each = commands.add_parser(
            name,
            help=kind.help,
            description=_DESCRIPTION,
            examples=[f"%(prog)s {kind.example}"],
        )
        each.declare({"what is written": kind.names}, kind.options)
    return parser


def _write(given: argparse.Namespace) -> int:
    kind = KINDS[given.kind]
    options = made(kind.options, given)
    target = None if options.output is None else target_file(options.output)
    command = _command(given.words, options.cluster)
    cluster = ClusterSpec.from_yaml(options.cluster)
    machines = machines_of(cluster, command.devices)
    recipe = Recipe(job_name(options.name, cluster.name), options.cluster, machines, command)
    text = kind.write(recipe, options)
    if target is None:
        sys.stdout.write(text)
        return EXIT_DONE
    try:
        write_whole(target, text)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error
    tell_written(target, stderr=True)
    return EXIT_DONE


def _command(words: Sequence[str], cluster: str) -> RecipeCommand:
    """The command behind `--`, checked by its own parser; SpecError where a recipe has no use for
    it, or its plan is for another cluster.
    """
    name, *rest = words or [""]
    if name not in ("run", "serve"):
        raise SpecError(
            "give the command behind --, such as: -- run --plan plan.json --input prompts.jsonl "
            "--output results.jsonl (or serve)"
        )
    parser = (run_parser if name == "run" else serve_parser)(f"llmpq {name}")
    given = parser.parse(rest)
    for option in ("address", "submit", "follow_job", "stop_job", "host"):
        if option in given:
            raise SpecError(f"--{option} is the recipe's to say; leave it out behind --")
    if name == "run":
        run_options(given)
        output_options(given)
    plan = load_plan(given.plan)
    check_cluster(plan, cluster)
    kept = Parser(add_help=False)
    kept.declare({"plan": "plan"}, StoredPlan)
    _, others = kept.parse_known_args(rest)
    return RecipeCommand(
        name,
        given.plan,
        tuple(others),
        plan.spec,
        output=getattr(given, "output", None),
        port=getattr(given, "port", None),
        has_batch_dir="batch_dir" in given,
    )


if __name__ == "__main__":
    raise SystemExit(main())
