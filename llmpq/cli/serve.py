"""`llmpq-serve`: answer OpenAI's HTTP requests from the stages of a plan."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from actors.messages import TRANSPORTS
from llmpq.cli.common import EXIT_DONE, Parser, console, run_command
from llmpq.plan import Plan
from llmpq.run.options import CACHE_RULE, RunOptions
from quant.common.errors import SpecError

_EXTRA = "serving needs FastAPI and uvicorn: pip install 'llmpq[serve]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = serve_parser(__doc__).parse(arguments, (CACHE_RULE,))
    return run_command("llmpq-serve", lambda: _serve(options))


def serve_parser(description: str | None) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog="llmpq-serve", description=description)
    add = parser.option
    add("--strat_file_name", "--plan", required=True, metavar="FILE", help="plan of llmpq-algo")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1, this machine alone)")
    add("--port", type=int, default=8000, help="port to listen on, 0 for a free one (8000)")
    add(
        "--api_key_file",
        metavar="FILE",
        help="file with the key that clients must send (else LLMPQ_API_KEY of the environment)",
    )
    add(
        "--served_model_name",
        nargs="+",
        metavar="NAME",
        help="names by which clients call the model (the plan's)",
    )
    add("--queue_limit", type=int, default=256, help="answers that may wait for a slot (256)")
    add(
        "--drain_s",
        type=float,
        default=60.0,
        help="seconds that running answers get to finish after SIGTERM (60)",
    )
    add("--model", help="folder or hub id of the weights (the plan's own)")
    add("--address", help="Ray cluster to join, auto for the one on this machine (a local one)")
    add("--cache_dir", metavar="DIR", help="folder of packed layers for the next start")
    add("--cache_limit_gib", type=float, help="most GiB in that folder")
    parser.add_argument(
        "--no-cache", "--no_cache", action="store_true", help="quantize anew, keep nothing"
    )
    add("--transport", choices=TRANSPORTS, default="auto", help="links between stages (auto)")
    add("--max_batch_size", type=int, help="most requests in a micro-batch (the plan's decode's)")
    add(
        "--prefill_chunk_tokens",
        type=int,
        default=0,
        help="tokens of a prompt that a micro-batch takes at most, 0 is all (0)",
    )
    return parser


def _serve(options: argparse.Namespace) -> int:
    try:
        import uvicorn  # noqa: F401  (with FastAPI an extra)
    except ImportError as error:
        raise SpecError(_EXTRA) from error
    from llmpq.remote.session import ray_session
    from llmpq.serve.options import ServeOptions, find_api_key
    from llmpq.serve.pipeline_engine import PipelineEngine
    from llmpq.serve.server import Server
    from llmpq.serve.service import Service

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
    plan = Plan.load(options.strat_file_name)
    engine = PipelineEngine(plan.spec, _run_options(options), str(options.strat_file_name))
    with ray_session(options.address if "address" in options else None), closing(engine):
        engine.start()
        server = Server(Service(engine, serving))
        server.on_listening = lambda port: console(stderr=True).print(
            f"llmpq-serve: {engine.model_name} at http://{serving.host}:{port}/v1; /ready answers "
            "200 when the model is loaded",
            soft_wrap=True,
        )
        server.run()
    return EXIT_DONE


def _run_options(options: argparse.Namespace) -> RunOptions:
    """The options of the run behind the server, which is always under the policy `orca`."""
    names = {field.name for field in dataclasses.fields(RunOptions)}
    given = {name: value for name, value in vars(options).items() if name in names}
    return RunOptions.of({**given, "policy": "orca"})


if __name__ == "__main__":
    raise SystemExit(main())
