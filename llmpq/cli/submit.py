"""`llmpq run --submit`: the same command as a job of a Ray cluster."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from llmpq.cli.common import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_ERROR_ROWS,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    say,
    show_all,
)
from llmpq.cli.parser import made
from llmpq.cli.run_options import SubmitOptions, path_parser, submit_parser
from llmpq.jobs.file_format import output_format
from llmpq.jobs.inputs import JobInput
from llmpq.remote.ray_jobs import JobEnd, RayJobs
from planner.plan.spec import PlanSpec
from quant.checkpoint.model_reference import is_local_model, local_path
from quant.common.errors import InputError
from quant.common.url_files import identity_of, is_url

MAX_UPLOAD_BYTES = 100 * 2**20
"""Most bytes of prompts that are uploaded with a job. Ray takes 512 MiB, but keeps them in the
memory of the head node."""

MAX_COMMAND_BYTES = 120_000
"""Linux starts no shell with a longer line (MAX_ARG_STRLEN, 128 KiB)."""

_NOT_FOUND = (126, 127)
"""A shell's exit codes for a command that it cannot start."""

_PLAN, _INPUT, _TEMPLATE = "plan.json", "input", "chat_template.jinja"
_IMPORTANCE = "plan.importance.safetensors"


def split_options(arguments: Sequence[str], prog: str) -> tuple[SubmitOptions, list[str]]:
    """Split the arguments of the command `prog` into where to run, and the command itself."""
    parser = submit_parser(prog)
    known, command = parser.parse_known_args(arguments)
    parser.refuse_ignored(known)
    options = made(SubmitOptions, known)
    has_job = options.follow_job or options.stop_job
    if "--verbose" in command and has_job:
        command.remove("--verbose")
        show_all()
    if command and has_job:
        parser.error(
            f"{command[0]} has no effect beside --follow_job or --stop_job: they start no job; "
            "leave it out"
        )
    return options, command


def known_job(options: SubmitOptions, prog: str) -> int:
    jobs = RayJobs(options.submit or "")
    if options.follow_job:
        return _follow(jobs, options.follow_job, prog)
    job_id = options.stop_job or ""
    end = jobs.stop(job_id)
    if end.status == "STOPPED":
        told = f"job {job_id} is stopped; what was finished is kept, the same command goes on"
    else:
        told = f"job {job_id} had ended already: {end.status}"
    _say(prog, told)
    return EXIT_DONE


def submit(options: SubmitOptions, command: Sequence[str], plan: PlanSpec, prog: str) -> int:
    """Run `command`, the arguments of a valid `llmpq run`, as a job, and return the exit code.

    `plan` is that of the command, of a fleet one with the stages of all pipelines. Raises
    `InputError` for paths that the cluster could not use.
    """
    with tempfile.TemporaryDirectory(prefix="llmpq-") as name:
        folder = Path(name)
        line = entrypoint(command, plan, folder)
        jobs = RayJobs(options.submit or "")
        job_id = jobs.submit(line, folder)
    again = f"{prog} --submit {jobs.address}"
    _say(
        prog,
        f"submitted as job {job_id}\n"
        f"  follow it:  {again} --follow_job {job_id}\n"
        f"  stop it:    {again} --stop_job {job_id}\n"
        "  resume it:  the same command again",
    )
    if not options.no_wait:
        return _follow(jobs, job_id, prog)
    sys.stdout.write(job_id + "\n")
    return EXIT_DONE


def entrypoint(command: Sequence[str], plan: PlanSpec, folder: Path) -> str:
    """The job's shell command; the files that it needs from here are copied into `folder`.

    Relative inputs travel with the job; absolute paths are those of the cluster. The plan always
    travels, and its model's relative folder becomes an absolute one.
    """
    paths, rest = path_parser("llmpq run").parse_known_args(command)
    if not paths.output.endswith("/"):  # a folder that exists can be given so too
        output_format(Path(paths.output))
    for option in ("output", "trace", "cache_dir"):
        _check_absolute(option, getattr(paths, option, None))
    _copy(Path(paths.plan), folder / _PLAN)
    arguments = ["--plan", _PLAN, "--input", *_inputs(paths.input, folder)]
    arguments += ["--output", paths.output, "--address", "auto"]
    model = _model(getattr(paths, "model", None), plan)
    importance = _importance(getattr(paths, "importance", None), plan, folder)
    if "chat_template" in paths:
        _copy(Path(paths.chat_template).expanduser(), folder / _TEMPLATE)
        arguments += ["--chat_template", _TEMPLATE]
    given = ((name, getattr(paths, name, None)) for name in ("trace", "cache_dir"))
    for option, value in (("model", model), ("importance", importance), *given):
        if value is not None:
            arguments += [f"--{option}", value]
    # exec: signals and the exit code are those of the command, not of a shell around it. Its old
    # name is one that a cluster with an older llmpq has too.
    line = shlex.join(["exec", "llmpq-dist", *arguments, *rest])
    if len(line.encode()) > MAX_COMMAND_BYTES:
        raise InputError(
            f"the command has {len(line.encode())} bytes with all its inputs, a shell takes "
            f"{MAX_COMMAND_BYTES}; name a folder or a glob by its absolute path on the cluster"
        )
    return line


def exit_code(end: JobEnd) -> int:
    if end.status == "SUCCEEDED":
        return EXIT_DONE
    if end.status == "STOPPED":
        return EXIT_TERMINATED
    ours = (EXIT_BAD_INPUT, EXIT_ERROR_ROWS, EXIT_INTERRUPTED, EXIT_TERMINATED)
    return end.exit_code if end.exit_code in ours else EXIT_FAILED


def _importance(named: str | None, plan: PlanSpec, folder: Path) -> str | None:
    """The importance file's path in the job: one of this machine is copied, the plan's too."""
    if named is None and plan.importance is not None and Path(plan.importance.file).is_file():
        named = plan.importance.file
    elif named is None or _is_of_cluster(named):
        return named
    _copy(Path(named), folder / _IMPORTANCE)
    return _IMPORTANCE


def _check_absolute(option: str, path: str | None) -> None:
    in_home = option == "cache_dir" and path is not None and path.startswith("~")  # expanded there
    if path is not None and not path.startswith("/") and not in_home and not is_url(path):
        raise InputError(
            f"--{option} is {path!r}, which would lie in the job's temporary "
            "folder; give an absolute path that the cluster's head can write"
        )


def _is_of_cluster(path: str) -> bool:
    return path.startswith(("/", "~")) or is_url(path)


def _inputs(named: Sequence[str], folder: Path) -> list[str]:
    """Inputs by their paths in the job, copied from here. Raises `InputError`."""
    arguments = [name for name in named if _is_of_cluster(name)]
    local = [name for name in named if not _is_of_cluster(name)]
    if not local:
        return arguments
    source = JobInput.find(local)
    size = sum(identity_of(path).file_bytes for path in source.files)
    if size > MAX_UPLOAD_BYTES:
        raise InputError(
            f"the inputs that would travel with the job have {size / 2**20:.0f} MiB, at most "
            f"{MAX_UPLOAD_BYTES // 2**20} do; put them where the cluster's head reads them and "
            "give absolute paths"
        )
    for path, name in zip(source.files, source.names, strict=True):
        target = Path(_INPUT) / name
        assert isinstance(path, Path), "URLs are not copied"
        _copy(path, folder / target)
        arguments.append(str(target))
    return arguments


def _copy(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as error:
        raise InputError(f"cannot copy {source} for the job: {error.strerror}") from error


def _model(named: str | None, plan: PlanSpec) -> str | None:
    """The job's `--model`: as given, but absolute if it is a path here; None for the plan's own."""
    reference = named or plan.stand_in or plan.model.source
    path = local_path(reference, "give a folder or a hub id")
    if path is not None and not path.is_absolute() and is_local_model(path):
        return str(path.absolute())
    return named


def _follow(jobs: RayJobs, job_id: str, prog: str) -> int:
    try:
        end = jobs.follow(job_id, partial(print, end="", flush=True))
    except KeyboardInterrupt:
        again = f"{prog} --submit {jobs.address}"
        _say(
            prog,
            f"job {job_id} goes on; {again} --follow_job {job_id} shows it again, "
            f"{again} --stop_job {job_id} stops it",
        )
        return EXIT_INTERRUPTED
    code = exit_code(end)
    told = _ending(end, job_id, code)
    if told is not None:
        _say(prog, told)
    return code


def _ending(end: JobEnd, job_id: str, code: int) -> str | None:
    """What to tell of a job's end, where its log does not say it; `code` is our exit code."""
    if end.status == "STOPPED":
        return f"job {job_id} was stopped; what was finished is kept, the same command goes on"
    if end.exit_code in _NOT_FOUND:
        return (
            f"the cluster's head could not start llmpq-dist (exit code {end.exit_code}); install "
            "llmpq on every node, and start Ray with that environment's bin folder in PATH"
        )
    if end.exit_code is not None and end.exit_code < 0:
        return f"job {job_id} was killed by signal {-end.exit_code}; the same command goes on"
    if end.exit_code is None and code:
        return f"job {job_id} failed: {end.message}; the same command goes on"
    return None


def _say(prog: str, text: str) -> None:
    say(f"{prog}: {text}", highlight=False)
