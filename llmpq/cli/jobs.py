"""`llmpq jobs`: how jobs are, while they run or later. No job is changed or disturbed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.cli.common import EXIT_DONE, console, run_command, say
from llmpq.cli.parser import Parser, finite_number, made, whole_number
from planner.option_rules import REQUIRED, argument, flag, option
from quant.common.errors import InputError
from quant.common.loopback import MOST_PORT, is_of_this_machine

if TYPE_CHECKING:
    from llmpq.jobs.overview.overview import JobOverview
    from llmpq.jobs.overview.places import JobPlace

DEPTH = 4  # folders below those that are named
COLUMNS = 80
"""Columns of what is told of a job at most; lists take what the terminal has."""

WATCH_S = 5.0

_say = partial(say, highlight=False)


PROG = "llmpq jobs"

_DESCRIPTION = "Tell how jobs are, while they run or later. No job is changed or disturbed."
_SHOW = "show results.jsonl --html job.html"
_LIST = "list /shared/outputs"
_SERVE = "serve /shared/outputs --port 8267"
_JSON = "print the figures as JSON"


def _seconds(text: str) -> float:
    value = finite_number(text)
    if not 1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not within 1 and 86400 seconds")
    return value


def _depth(text: str) -> int:
    value = whole_number(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not within 0 and 100 folders")
    return value


def _port(text: str) -> int:
    value = whole_number(text)
    if not 0 <= value <= MOST_PORT:
        raise argparse.ArgumentTypeError(f"{text} is no port; give 1 to {MOST_PORT}, or 0 for any")
    return value


@dataclass(frozen=True)
class ShowCommand:
    output: str = argument("OUTPUT", "the --output of a llmpq run, done or not", REQUIRED)
    html: str | None = option("FILE", "write it as a page that needs only a browser")
    watch: float | None = option(
        "SECONDS",
        "look again so often, until the job no longer runs; the page loads itself again too",
        parse=_seconds,
        more={"nargs": "?", "const": WATCH_S},
    )
    json: bool = flag(_JSON)


@dataclass(frozen=True)
class ListCommand:
    folders: list[str] | None = argument(
        "FOLDER", "where to look (default: here)", more={"nargs": "*"}
    )
    depth: int | None = option(
        "COUNT", f"folders below it to look into (default: {DEPTH})", parse=_depth
    )
    ray: str | None = option("URL", "list llmpq's jobs of this cluster: http://HEAD:8265")
    json: bool = flag(_JSON)


@dataclass(frozen=True)
class ServePagesCommand:
    folder: str = argument("FOLDER", "where to look (default: here)", ".", more={"nargs": "?"})
    depth: int = option("COUNT", "folders below it to look into", DEPTH, parse=_depth)
    host: str = option("ADDRESS", "to listen on, by itself for this machine alone", "127.0.0.1")
    port: int = option("PORT", "to listen on, 0 for a free one", 8267, parse=_port)


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    parser = jobs_parser(prog)
    given = parser.parse(arguments)
    if given.command == "show":
        return run_command(prog, lambda: _show(made(ShowCommand, given)))
    if given.command == "dashboard":
        return run_command(prog, _dashboard)
    if given.command == "serve":
        return run_command(prog, lambda: _serve(made(ServePagesCommand, given)))
    options = made(ListCommand, given)
    if options.ray is not None and (options.folders or options.depth is not None):
        parser.error("a Ray cluster has no folders; leave out FOLDER and --depth beside --ray")
    return run_command(prog, lambda: _list(options))


def jobs_parser(prog: str | None = PROG) -> Parser:
    parser = Parser(
        prog, _DESCRIPTION, tuple(f"%(prog)s {each}" for each in (_SHOW, _LIST, _SERVE))
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="show|list|serve|dashboard", title="commands"
    )
    show = commands.add_parser(
        "show",
        help="one job: state, speed beside the plan, errors by kind, what was replaced",
        description="Show one job: state, speed beside the plan, errors by kind, what was replaced",
        examples=("%(prog)s" + _SHOW.removeprefix("show"),),
    )
    show.declare({"job": "output", "output": "html watch json"}, ShowCommand)
    listing = commands.add_parser(
        "list",
        help="the jobs in and below folders, or those of a Ray cluster",
        description="List the jobs in and below folders, or those of a Ray cluster.",
        examples=("%(prog)s" + _LIST.removeprefix("list"),),
    )
    listing.declare({"where to look": "folders depth ray", "output": "json"}, ListCommand)
    serve = commands.add_parser(
        "serve",
        help="the jobs in and below a folder as live pages, for a browser of this machine",
        description="Show the jobs in and below a folder as live pages, which change nothing.",
        examples=("%(prog)s" + _SERVE.removeprefix("serve"),),
    )
    serve.declare({"where to look": "folder depth", "where": "host port"}, ServePagesCommand)
    commands.add_parser(
        "dashboard",
        help="a dashboard for Grafana, over the metrics that Prometheus has of runs and servers",
        description="Print a dashboard for Grafana, which imports it as JSON.",
        examples=("%(prog)s > llmpq.json",),
    )
    return parser


def _show(options: ShowCommand) -> int:
    from llmpq.jobs.overview.overview import overview_of  # slow to load, as are those below
    from llmpq.jobs.overview.places import find_job

    place = find_job(options.output)
    html = None if options.html is None else Path(options.html)
    _check_page(html, place)
    watch_s = options.watch
    while True:
        job = overview_of(place)
        runs = job.state == "running"
        if html is not None:
            from llmpq.jobs.overview.page import write_job_page

            write_job_page(html, job, watch_s if runs else None)
        _print(job, options.json)
        if html is not None and not options.json:
            _say(f"page: {html}")
        if watch_s is None or not runs:
            return EXIT_DONE
        time.sleep(watch_s)


def _check_page(html: Path | None, place: JobPlace) -> None:
    """Refuse a page that would be written over the job's own files."""
    if html is None:
        return
    target = html.absolute()
    if target == place.output.absolute() or place.folder.absolute() in target.parents:
        raise InputError(f"--html {html} lies where the job writes; name another file")


def _print(job: JobOverview, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(job_figures(job), indent=1) + "\n")
        return
    from llmpq.jobs.overview.words import job_text

    printed = console()
    printed.print(job_text(job), width=min(COLUMNS, printed.width), crop=False)


def _list(options: ListCommand) -> int:
    if options.ray is not None:
        return _list_ray(options.ray, options.json)
    from llmpq.jobs.overview.folder import JobFolder, by_activity
    from llmpq.jobs.overview.words import list_text

    folders = options.folders or ["."]
    depth = DEPTH if options.depth is None else options.depth
    found = {
        seen.place.folder.absolute(): seen
        for folder in folders
        for seen in JobFolder(folder, depth).look()
    }
    for seen in found.values():
        if seen.job is None:
            _say(f"{seen.place.output}: {seen.wrong}")
    jobs = [seen.job for seen in by_activity(found.values()) if seen.job is not None]
    if options.json:
        sys.stdout.write(json.dumps([job_figures(job) for job in jobs], indent=1) + "\n")
        return EXIT_DONE
    if not jobs:
        _say(f"no jobs in {', '.join(folders)}, and in {depth} folders below")
        return EXIT_DONE
    console().print(list_text(jobs))
    if any(job.state == "stopped" for job in jobs):
        _say("stopped jobs go on by the same command; `llmpq jobs show OUTPUT` has it")
    return EXIT_DONE


def _serve(options: ServePagesCommand) -> int:
    from llmpq.jobs.overview.folder import JobFolder
    from llmpq.jobs.overview.live import JobServer

    folder = JobFolder(options.folder, options.depth, confined=True)
    server = JobServer(folder, options.host, options.port)
    with server:
        if not is_of_this_machine(options.host):
            _say(
                f"--host {options.host} is open to other machines: whoever reaches it sees "
                "commands, ids and errors of the jobs"
            )
        _say(f"jobs in {options.folder} at {server.address}; Ctrl-C ends it")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return EXIT_DONE


def _dashboard() -> int:
    found = resources.files("llmpq.report") / "templates" / "dashboard.json"
    sys.stdout.write(found.read_text(encoding="utf-8"))
    return EXIT_DONE


def _list_ray(address: str, as_json: bool) -> int:
    from llmpq.jobs.overview.words import ray_text
    from llmpq.remote.ray_jobs import RayJobs

    jobs = RayJobs(address, "--ray").known()
    if as_json:
        sys.stdout.write(json.dumps([asdict(job) for job in jobs], indent=1) + "\n")
    elif not jobs:
        _say(f"the Ray cluster at {address} knows no jobs of llmpq")
    else:
        console().print(ray_text(jobs))
        _say(f"llmpq run --submit {address} --follow_job ID shows the log of one")
    return EXIT_DONE


def job_figures(job: JobOverview) -> dict[str, Any]:
    """All that is known of a job, as JSON has it; times are seconds of the Unix clock."""
    figures = asdict(replace(job, sessions=(), series=()))
    del figures["series"]
    sessions = [session.figures() for session in job.sessions]
    more = {"output": str(job.output), "sessions": sessions, "left": job.left}
    more |= {"command": job.command}
    return figures | more | {"seconds": job.seconds, "generated_s": job.generated_s}


if __name__ == "__main__":
    raise SystemExit(main())
