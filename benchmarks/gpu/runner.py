"""Runs each part in a process group of its own, and ends it at its limit."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import Findings, NotRunError, Place
from benchmarks.gpu.parts import Part, part_named
from benchmarks.gpu.report import PartResult

DONE, FAILED, NOT_RUN = 0, 1, 4
"""Exit codes of a part's process."""

_OURS = ("llmpq", "actors", "planner", "quant", "benchmarks", "tests")
_SHARE_BEFORE_A_LOOK = 0.95


def run_part(name: str, result: Path, place: Place, limit_s: float) -> int:
    """Run the part `name`; what it finds goes to `result`, and its exit code is returned.

    Shortly before `limit_s`, at which the parent ends this process, the log gets a trace of where
    it is.
    """
    faulthandler.enable()
    faulthandler.dump_traceback_later(_SHARE_BEFORE_A_LOOK * limit_s)
    part, findings = part_named(name), Findings(result)
    try:
        importlib.import_module(part.module).run(findings, place, part.argument)
    except NotRunError as reason:
        findings.not_run(str(reason))
        return NOT_RUN
    except ModuleNotFoundError as error:
        traceback.print_exc()
        package = (error.name or "").partition(".")[0]
        if not package or package in _OURS:
            return FAILED
        findings.not_run(f"{package} is missing")
        return NOT_RUN
    for complaint in findings.complaints:
        sys.stderr.write(f"{complaint}\n")
    return FAILED if findings.complaints else DONE


TAIL_CHARACTERS = 4000
_LEAST_S = 15.0
"""With less time left a part is not begun: torch alone takes some seconds to come up."""
_GRACE_S = 5.0
_ROOT = Path(__file__).resolve().parents[2]

Command = Callable[[Part, Path, float], Sequence[str]]


@dataclass(frozen=True)
class Runner:
    """Runs parts one after the other at `place`, whose `kept` gets findings and logs.

    All end by `deadline_s` of `clock`; `command` makes the command line of a part, given where its
    findings go and its limit.
    """

    place: Place
    deadline_s: float
    clock: Callable[[], float] = time.monotonic
    command: Command | None = None

    def run(self, part: Part) -> PartResult:
        """Run one part; never raises for what goes wrong in it."""
        limit_s = min(part.limit_s, self.deadline_s - self.clock())
        if limit_s < min(_LEAST_S, part.limit_s):
            return PartResult(part.name, part.title, "not run", error="no time was left")
        kept = self.place.kept
        findings, log = kept / f"{part.name}.json", kept / f"{part.name}.log"
        findings.unlink(missing_ok=True)
        command = (self.command or self._part_command)(part, findings, limit_s)
        began = self.clock()
        code = _exit_code(command, log, limit_s, child_environment(self.place, part.gpus))
        seconds = self.clock() - began
        tail = log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARACTERS:]
        found = _read(findings)
        status, error = _verdict(code, limit_s, found, tail)
        kept_tail = "" if status in ("done", "not run") else tail
        return PartResult(part.name, part.title, status, seconds, error, kept_tail, found)

    def _part_command(self, part: Part, findings: Path, limit_s: float) -> Sequence[str]:
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", part.name]
        command += ["--result", str(findings), "--part_limit_s", str(limit_s)]
        command += ["--folder", str(self.place.folder), "--kept", str(self.place.kept)]
        return [*command, "--dry_run"] if self.place.dry_run else command


def child_environment(place: Place, gpus: int = 1) -> dict[str, str]:
    """Variables of a part's process: `gpus` or none, nothing fetched, caches of its own."""
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "XDG_CACHE_HOME": str(place.folder / "cache"),
    }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:gpus]
    own["CUDA_VISIBLE_DEVICES"] = "" if place.dry_run else ",".join(visible)
    return os.environ | own


def _exit_code(
    command: Sequence[str], log: Path, limit_s: float, environment: dict[str, str]
) -> int | None:
    """Run `command`, end its whole process group; return the exit code, None after `limit_s`."""
    with (
        log.open("wb") as stream,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=_ROOT,
            env=environment,
            start_new_session=True,
        ) as child,
    ):
        try:
            return child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_group(child)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End what is left of the group that `child` leads: ask first, then kill."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_GRACE_S)
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of it is gone
        return
    child.wait()


def _read(findings: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(findings.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return content


def _verdict(code: int | None, limit_s: float, found: dict[str, Any], tail: str) -> tuple[str, str]:
    """A status, and the error or the reason."""
    if code == DONE:
        return "done", ""
    if code == NOT_RUN:
        return "not run", found.get("not_run", "")
    if code is None:
        return "timed out", f"it ran past its limit of {limit_s:.0f} s"
    if code < 0:
        return "failed", f"its process was ended by {signal.Signals(-code).name}"
    complaints = "; ".join(found.get("complaints", []))
    return "failed", complaints or _last_error(tail) or f"exit code {code}"


def _last_error(log: str) -> str:
    """The last line that names an exception, else the last that says anything."""
    lines = [line for line in reversed(log.splitlines()) if line.strip()]
    named = (line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line))
    return next(named, lines[0] if lines else "")
