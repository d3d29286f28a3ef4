"""One part in a process of its own."""

from __future__ import annotations

import faulthandler
import importlib
import sys
import traceback
from pathlib import Path

from benchmarks.gpu.findings import Findings, NotRunError
from benchmarks.gpu.parts import part_named
from benchmarks.gpu.place import Place

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
