"""`llmpq serve`: answer OpenAI's HTTP requests from the stages of a plan."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmpq.cli.common import EXIT_DONE, run_command, say
from llmpq.cli.parser import made, taken
from llmpq.cli.run_options import NO_BATCHES, SERVE, ServeCommand, serve_parser
from llmpq.cli.terminal import TaskProgress
from llmpq.jobs.job import stop_code, stop_signals
from llmpq.plan import load_plan
from llmpq.quality.calibration import with_calibrated
from llmpq.run.checkpoint import model_of_run
from llmpq.run.display import LogTimes, duration
from llmpq.run.options import RunOptions
from llmpq.serve.options import FOLDER_SUFFIX, BatchOptions, ServeOptions, find_api_key
from planner.fleet.fleet_spec import FleetSpec, plans_of
from planner.plan.spec import all_stages
from planner.scheduling import KV_TOKEN_POLICIES, PolicyName
from quant.common.errors import SpecError

if TYPE_CHECKING:
    from llmpq.run.monitor import LoadingState
    from llmpq.serve.batches.store import BatchStore

_EXTRA = "serving needs FastAPI, uvicorn and python-multipart: pip install 'llmpq[serve]'"


def main(arguments: Sequence[str] | None = None, prog: str = SERVE) -> int:
    given = serve_parser(prog).parse(arguments)
    options = replace(made(ServeCommand, given), prog=prog)
    return run_command(prog, lambda: _serve(options, given))


def _serve(options: ServeCommand, given: argparse.Namespace) -> int:
    try:
        import python_multipart  # noqa: F401  (with FastAPI an extra)
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SpecError(_EXTRA) from error
    from llmpq.serve.options import parse_replicas

    file = options.api_key_file
    serving = ServeOptions(
        **taken(ServeOptions, given),
        api_key=find_api_key(None if file is None else Path(file)),
        served_model_names=tuple(options.served_model_name or ()),
    )
    wanted = parse_replicas(options.replicas)
    # A copy that still loads when the server has ended must not start another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    with stop_signals() as seen:
        try:
            _run(options, given, serving, wanted)
        except KeyboardInterrupt:  # before the server listens, which then takes the signals
            return stop_code(seen)
    return EXIT_DONE


def _run(
    options: ServeCommand, given: argparse.Namespace, serving: ServeOptions, wanted: int | None
) -> None:
    """Serve until a signal ends it."""
    source = options.plan
    spec = load_plan(source).spec
    plans, is_fleet = plans_of(spec), isinstance(spec, FleetSpec)
    if is_fleet and wanted != 1:
        raise SpecError(f"--replicas has no effect with a fleet ({source}): leave it out")
    chosen = _run_options(given, plans[0].policy.name)
    model_of_run(spec, chosen, source)  # raises before what follows is loaded, which is slow

    from llmpq.remote.session import prepared_forks, ray_session
    from llmpq.serve.batches.batches import Batches
    from llmpq.serve.metrics import ServeMetrics
    from llmpq.serve.options import count_replicas
    from llmpq.serve.pipeline_engine import PipelineEngine
    from llmpq.serve.server import Server
    from llmpq.serve.service import Service

    with TaskProgress("calibrating for the plan") as progress:
        run_options = with_calibrated(plans[0], chosen, progress=progress.report)
    with ExitStack() as stack:
        forks = prepared_forks(chosen.address)
        if forks is not None:
            stack.callback(forks.close)
        store = stack.enter_context(_batch_store(options, given))
        engine = PipelineEngine(spec, run_options, source, forks)
        for note in engine.notes:
            say(note)
        stack.enter_context(ray_session(chosen.address, forks=forks))
        copies = 1 if is_fleet else count_replicas(all_stages(plans[0]), wanted)
        stack.enter_context(closing(engine))
        metrics = ServeMetrics(engine.model_name, time.perf_counter)
        engine.on_event.append(metrics.count_event)
        engine.on_loading.append(_say_now_and_then())
        engine.start(copies)
        service = Service(engine, serving, metrics=metrics, tracer=engine.tracer)
        server = Server(service, None if store is None else Batches(store, service))
        server.on_listening = lambda port: say(
            f"{options.prog}: {engine.model_name} at http://{serving.host}:{port}/v1; /ready "
            "answers 200 when the model is loaded"
        )
        server.run()


def _say_now_and_then() -> Callable[[LoadingState], None]:
    """A function that says how far the stages are with loading, soon and then once a minute."""
    times = LogTimes()

    def tell(state: LoadingState) -> None:
        if times.is_due():
            say(f"{state}, {duration(times.passed_s)}")

    return tell


@contextmanager
def _batch_store(options: ServeCommand, given: argparse.Namespace) -> Iterator[BatchStore | None]:
    """The folder of files and batches; None where there are to be none."""
    from llmpq.serve.batches.store import BatchStore

    if options.batch_dir == NO_BATCHES:
        yield None
        return
    folder = Path(options.batch_dir or f"{options.plan}{FOLDER_SUFFIX}")
    store = BatchStore(BatchOptions(**{**taken(BatchOptions, given), "batch_dir": folder}))
    with closing(store):
        yield store


def _run_options(given: argparse.Namespace, planned: PolicyName) -> RunOptions:
    """The options of the run behind the server, under a policy by which requests come and go."""
    policy = planned if planned in KV_TOKEN_POLICIES else "orca"
    return RunOptions.of({"policy": policy, **taken(RunOptions, given)})


if __name__ == "__main__":
    raise SystemExit(main())
