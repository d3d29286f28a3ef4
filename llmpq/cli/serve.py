"""`llmpq serve`: answer OpenAI's HTTP requests from the stages of a plan."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmpq.cli.common import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    console,
    run_command,
)
from llmpq.cli.options.serve import NO_BATCHES, PROG, serve_parser
from llmpq.cli.progress import TaskProgress
from llmpq.fleet import load_plan
from llmpq.jobs.signals import stop_signals
from llmpq.quality.on_the_fly import with_calibrated
from llmpq.run.checkpoint import check_run
from llmpq.run.fleets import plans_of
from llmpq.run.monitoring.log_times import LogTimes, duration
from llmpq.run.options import RunOptions
from planner.fleet.fleet_spec import FleetSpec
from planner.plan.divided import all_stages
from planner.scheduling import KV_TOKEN_POLICIES, PolicyName
from quant.common.errors import SpecError

if TYPE_CHECKING:
    from llmpq.run.monitoring.loading import LoadingState
    from llmpq.serve.batches.store import BatchStore
    from llmpq.serve.options import ServeOptions

_EXTRA = "serving needs FastAPI, uvicorn and python-multipart: pip install 'llmpq[serve]'"


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Entry point; returns the exit code."""
    options = serve_parser(prog).parse(arguments)
    options.prog = prog
    return run_command(prog, lambda: _serve(options))


def _serve(options: argparse.Namespace) -> int:
    try:
        import python_multipart  # noqa: F401  (with FastAPI an extra)
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SpecError(_EXTRA) from error
    from llmpq.serve.options import ServeOptions, find_api_key
    from llmpq.serve.replica_count import parse_replicas

    file = options.api_key_file if "api_key_file" in options else None
    names = options.served_model_name if "served_model_name" in options else ()
    serving = ServeOptions(
        host=options.host,
        port=options.port,
        api_key=find_api_key(None if file is None else Path(file)),
        served_model_names=tuple(names or ()),
        queue_limit=options.queue_limit,
        drain_s=options.drain_s,
    )
    wanted = parse_replicas(options.replicas)
    # A copy that still loads when the server has ended must not start another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    with stop_signals() as seen:
        try:
            _run(options, serving, wanted)
        except KeyboardInterrupt:  # before the server listens, which then takes the signals
            return EXIT_TERMINATED if signal.SIGTERM in seen else EXIT_INTERRUPTED
    return EXIT_DONE


def _run(options: argparse.Namespace, serving: ServeOptions, wanted: int | None) -> None:
    """Serve until a signal ends it."""
    spec = load_plan(options.strat_file_name).spec
    source = str(options.strat_file_name)
    plans, is_fleet = plans_of(spec), isinstance(spec, FleetSpec)
    if is_fleet and wanted != 1:
        raise SpecError(f"--replicas has no effect with a fleet ({source}): leave it out")
    given = _run_options(options, plans[0].policy.name)
    check_run(spec, given, source)

    from llmpq.remote.session import ray_session
    from llmpq.serve.batches.batches import Batches
    from llmpq.serve.pipeline_engine import PipelineEngine
    from llmpq.serve.replica_count import count_replicas
    from llmpq.serve.server import Server
    from llmpq.serve.service import Service
    from llmpq.serve.telemetry.metrics import ServeMetrics

    with TaskProgress("calibrating for the plan") as progress:
        run_options = with_calibrated(plans[0], given, progress=progress.report)
    with ExitStack() as stack:
        store = stack.enter_context(_batch_store(options))
        engine = PipelineEngine(spec, run_options, source)
        if engine.end_note:
            console(stderr=True).print(engine.end_note, soft_wrap=True)
        stack.enter_context(ray_session(options.address if "address" in options else None))
        copies = 1 if is_fleet else count_replicas(all_stages(plans[0]), wanted)
        stack.enter_context(closing(engine))
        engine.on_loading.append(_say_now_and_then())
        engine.start(copies)
        service = Service(engine, serving, metrics=ServeMetrics(engine.model_name))
        server = Server(service, None if store is None else Batches(store, service))
        server.on_listening = lambda port: console(stderr=True).print(
            f"{options.prog}: {engine.model_name} at http://{serving.host}:{port}/v1; /ready "
            "answers 200 when the model is loaded",
            soft_wrap=True,
        )
        server.run()


def _say_now_and_then() -> Callable[[LoadingState], None]:
    """A function that says how far the stages are with loading, soon and then once a minute."""
    times = LogTimes()

    def say(state: LoadingState) -> None:
        if times.is_due():
            console(stderr=True).print(f"{state}, {duration(times.passed_s)}", soft_wrap=True)

    return say


@contextmanager
def _batch_store(options: argparse.Namespace) -> Iterator[BatchStore | None]:
    """The folder of files and batches; None where there are to be none."""
    from llmpq.serve.batches.store import FOLDER_SUFFIX, BatchOptions, BatchStore

    given = options.batch_dir if "batch_dir" in options else None
    if given == NO_BATCHES:
        yield None
        return
    folder = Path(given or f"{options.strat_file_name}{FOLDER_SUFFIX}")
    store = BatchStore(BatchOptions(folder, options.file_limit_mib, options.batch_dir_limit_gib))
    with closing(store):
        yield store


def _run_options(options: argparse.Namespace, planned: PolicyName) -> RunOptions:
    """The options of the run behind the server, under a policy by which requests come and go."""
    names = {field.name for field in dataclasses.fields(RunOptions)}
    given = {name: value for name, value in vars(options).items() if name in names}
    policy = planned if planned in KV_TOKEN_POLICIES else "orca"
    return RunOptions.of({"policy": policy, **given})


if __name__ == "__main__":
    raise SystemExit(main())
