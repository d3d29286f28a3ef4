"""`llmpq jobs`: how jobs are, while they run or later. No job is changed or disturbed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmpq.cli.common import EXIT_DONE, Parser, console, run_command
from llmpq.cli.parser import OptionGroup, finite_number, whole_number
from llmpq.jobs.overview.overview import JobOverview, overview_of
from llmpq.jobs.overview.places import DEPTH, JobPlace, find_job, jobs_in
from llmpq.jobs.overview.text import job_text, list_text, ray_text
from quant.common.errors import InputError

COLUMNS = 80
"""Columns of what is told of a job at most; lists take what the terminal has."""

WATCH_S = 5.0


PROG = "llmpq jobs"

_DESCRIPTION = "Tell how jobs are, while they run or later. No job is changed or disturbed."
_SHOW = "show results.jsonl --html job.html"
_LIST = "list /shared/outputs"
_JSON = "print the figures as JSON"


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Entry point; returns the exit code."""
    parser = jobs_parser(prog)
    options = parser.parse(arguments)
    if options.command == "show":
        return run_command(prog, lambda: _show(options))
    if "ray" in options and ("folders" in options or "depth" in options):
        parser.error("a Ray cluster has no folders; leave out FOLDER and --depth beside --ray")
    return run_command(prog, lambda: _list(options))


def jobs_parser(prog: str | None = PROG) -> Parser:
    """The parser of both commands."""
    parser = Parser(prog, _DESCRIPTION, (f"%(prog)s {_SHOW}", f"%(prog)s {_LIST}"))
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="show|list", title="commands"
    )
    show = commands.add_parser(
        "show",
        help="one job: state, speed beside the plan, errors by kind, what was replaced",
        description="Show one job: state, speed beside the plan, errors by kind, what was replaced",
        examples=("%(prog)s" + _SHOW.removeprefix("show"),),
    )
    _add_job(show.group("job"))
    _add_output(show.group("output"))
    listing = commands.add_parser(
        "list",
        help="the jobs in and below folders, or those of a Ray cluster",
        description="List the jobs in and below folders, or those of a Ray cluster.",
        examples=("%(prog)s" + _LIST.removeprefix("list"),),
    )
    _add_places(listing.group("where to look"))
    listing.group("output").option("--json", action="store_true", help=_JSON)
    return parser


def _add_job(group: OptionGroup) -> None:
    group.option("output", metavar="OUTPUT", help="the --output of a llmpq run, done or not")


def _add_output(group: OptionGroup) -> None:
    add = group.option
    add("--html", metavar="FILE", help="write it as a page that needs only a browser")
    add(
        "--watch",
        nargs="?",
        type=_seconds,
        const=WATCH_S,
        metavar="SECONDS",
        help="look again so often, until the job no longer runs; the page loads itself again too",
    )
    add("--json", action="store_true", help=_JSON)


def _add_places(group: OptionGroup) -> None:
    add = group.option
    add("folders", metavar="FOLDER", nargs="*", help="where to look (default: here)")
    add(
        "--depth",
        type=_depth,
        metavar="COUNT",
        help=f"folders below it to look into (default: {DEPTH})",
    )
    add("--ray", metavar="URL", help="list llmpq's jobs of this cluster: http://HEAD:8265")


def _show(options: argparse.Namespace) -> int:
    place = find_job(options.output)
    html = Path(options.html) if "html" in options else None
    _check_page(html, place)
    watch_s: float | None = getattr(options, "watch", None)
    while True:
        job = overview_of(place)
        runs = job.state == "running"
        if html is not None:
            from llmpq.jobs.page.page import write_page

            write_page(html, job, watch_s if runs else None)
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
    printed = console()
    printed.print(job_text(job), width=min(COLUMNS, printed.width), crop=False)


def _list(options: argparse.Namespace) -> int:
    if "ray" in options:
        return _list_ray(options)
    found: dict[Path, JobOverview] = {}
    folders, depth = getattr(options, "folders", ["."]), getattr(options, "depth", DEPTH)
    for folder in folders:
        for place in jobs_in(folder, depth):
            key = place.folder.absolute()
            if key in found:
                continue
            try:
                found[key] = overview_of(place, look=False)
            except InputError as error:
                _say(f"{place.output}: {error}")
    jobs = sorted(found.values(), key=lambda job: (job.state != "running", -(job.last_at or 0)))
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


def _list_ray(options: argparse.Namespace) -> int:
    from llmpq.remote.ray_jobs import RayJobs

    jobs = RayJobs(options.ray, "--ray").known()
    if options.json:
        sys.stdout.write(json.dumps([asdict(job) for job in jobs], indent=1) + "\n")
    elif not jobs:
        _say(f"the Ray cluster at {options.ray} knows no jobs of llmpq")
    else:
        console().print(ray_text(jobs))
        _say(f"llmpq run --submit {options.ray} --follow_job ID shows the log of one")
    return EXIT_DONE


def job_figures(job: JobOverview) -> dict[str, Any]:
    """All that is known of a job, as JSON has it; times are seconds of the Unix clock."""
    figures = asdict(replace(job, sessions=(), series=()))
    del figures["series"]
    sessions = [session.figures() for session in job.sessions]
    more = {"output": str(job.output), "sessions": sessions, "left": job.left}
    more |= {"command": job.command}
    return figures | more | {"seconds": job.seconds, "generated_s": job.generated_s}


def _say(line: str) -> None:
    console(stderr=True).print(line, soft_wrap=True, highlight=False)


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


if __name__ == "__main__":
    raise SystemExit(main())
