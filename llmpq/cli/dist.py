"""`llmpq-dist`: run a plan over a file of prompts on Ray."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

from actors.messages import TRANSPORTS, Sampling
from llmpq.cli.common import EXIT_DONE, EXIT_ERROR_ROWS, Parser, console, run_command
from llmpq.cluster import Cluster
from llmpq.plan import Plan
from llmpq.progress import RunProgress
from llmpq.results import ResultFile
from llmpq.rows import read_rows
from llmpq.run import Run, RunOptions
from llmpq.tables import plan_table, summary_table
from quant.cache.settings import cache_settings
from quant.errors import PlanMismatchError

_SAMPLING = ("temperature", "top_k", "top_p", "seed", "max_new_tokens", "ignore_eos")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(arguments)
    return run_command("llmpq-dist", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    plan = Plan.load(options.strat_file_name)
    if "cluster" in options:
        _check_cluster(plan, options.cluster)
    rows = read_rows(Path(options.input))
    run = Run(
        plan.data,
        rows,
        RunOptions(
            model=getattr(options, "model", None),
            sampling=_sampling(options),
            address=getattr(options, "address", None),
            cache=cache_settings(
                getattr(options, "cache_dir", None),
                getattr(options, "cache_limit_gib", None),
                options.no_cache,
            ),
            transport=options.transport,
        ),
    )
    inputs = (Path(options.input), Path(options.strat_file_name))
    with ResultFile(Path(options.output), options.overwrite, inputs) as output:
        if options.show_plan:
            console(stderr=True).print(plan_table(plan.data))
        _write_all(run, output, len(rows))
    if run.summary is not None:
        console(stderr=True).print(summary_table(plan.data, run.summary))
    if run.errors:
        first = run.errors[0]
        console(stderr=True).print(
            f"{len(run.errors)} rows have errors, the first {first.custom_id!r}: {first.error}"
        )
        return EXIT_ERROR_ROWS
    return EXIT_DONE


def _check_cluster(plan: Plan, path: str) -> None:
    cluster = Cluster.from_yaml(path)
    if cluster.spec.fingerprint() != plan.data.cluster_fingerprint:
        raise PlanMismatchError(
            f"the plan is for cluster {plan.data.cluster!r}, which differs from {path}; "
            "plan again with llmpq-algo --cluster"
        )


def _write_all(run: Run, output: ResultFile, total: int) -> None:
    with (
        _interrupts() as seen,
        RunProgress(console(stderr=True), total) as progress,
        closing(run.results()) as results,
    ):
        for result in results:
            output.write(result)
            progress.count(result)
            if seen:
                raise KeyboardInterrupt


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The interrupts that came: of one that strikes within a destructor nothing else is left."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _sampling(options: argparse.Namespace) -> Sampling:
    given = {name: getattr(options, name) for name in _SAMPLING if name in options}
    return Sampling(**given, stop=tuple(getattr(options, "stop", ())))


def _parser() -> Parser:
    parser = Parser(prog="llmpq-dist", description=__doc__)
    add = parser.option
    add("--strat_file_name", "--plan", required=True, metavar="FILE", help="plan of llmpq-algo")
    add("--input", required=True, help="prompts, one JSON object per line")
    add("--output", required=True, help="results, one JSON object per line")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    add("--model", help="folder or hub id of the weights, where not the plan's own")
    add("--cluster", help="cluster YAML that the plan must have been made for")
    add("--address", help="Ray cluster to join, auto for the one on this machine (a local one)")
    add("--cache_dir", metavar="DIR", help="packed layers for the next start (the user's cache)")
    add("--cache_limit_gib", type=float, help="of that folder (100, at most half the free space)")
    parser.add_argument(
        "--no-cache", "--no_cache", action="store_true", help="quantize anew, keep nothing"
    )
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="auto",
        help="between stages: gloo, Ray's objects, or gloo where it connects (auto)",
    )
    parser.add_argument(
        "--show-plan", "--show_plan", action="store_true", help="print the plan first"
    )
    add("--temperature", type=float, help="0 is greedy (0)")
    add("--top_k", type=int, help="keep the most probable tokens, 0 is off (0)")
    add("--top_p", type=float, help="keep the tokens that make up this probability (1)")
    add("--seed", type=int, help="of the random draws (0)")
    add("--max_new_tokens", type=int, help="at most the plan's (the plan's)")
    add("--stop", nargs="+", metavar="TEXT", help="strings that end a generation")
    add("--ignore_eos", action="store_const", const=True, help="generate on after end of sequence")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
