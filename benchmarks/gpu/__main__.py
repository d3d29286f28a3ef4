"""Measures on an NVIDIA GPU all that can be measured only there, and writes a report.

    make gpu                                  # finds or makes an environment first
    python -m benchmarks.gpu [--parts kernels plan …] [--dry_run] [--output gpu_output]

Each part is a process with a time limit of its own, so that no crash, hang or CUDA fault hides the
rest. `gpu_report.json` and `gpu_report.md` in the output folder are written again after each part;
a later call with `--parts` adds to them, or replaces those parts. `--dry_run`: every part runs its
code on the CPU at a small size. Exit code 1 where a part failed, 2 without a GPU. `docs/gpu.md`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import Place
from benchmarks.gpu.parts import PARTS, TIME_LIMIT_S, Part, choose
from benchmarks.gpu.report import Report
from benchmarks.gpu.runner import Runner, child_environment, run_part

_DESCRIBING_LIMIT_S = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen parts, or as a part's process that part."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.part:
        place = Place(options.folder, options.kept, options.dry_run)
        return run_part(options.part, options.result, place, options.part_limit_s)
    try:
        parts = choose(options.parts)
    except ValueError as error:
        parser.error(str(error))
    deadline_s = time.monotonic() + options.time_limit_s
    output = options.output.absolute()
    with tempfile.TemporaryDirectory(prefix="llmpq-gpu-") as folder:
        place = Place(Path(folder), output / "logs", options.dry_run)
        return _measure(parts, place, output, deadline_s)


def _measure(parts: Sequence[Part], place: Place, output: Path, deadline_s: float) -> int:
    machine = _machine(place)
    if machine is None:
        return 2
    place.kept.mkdir(parents=True, exist_ok=True)
    runner = Runner(place, deadline_s)
    report = Report.begun(output, machine, place.dry_run)
    for part in parts:
        print(f"{part.name} …", flush=True)
        result = runner.run(part)
        report = report.with_result(result, [each.name for each in PARTS])
        report.save(output)
        print(f"  {result.status}, {result.seconds:.0f} s {result.error}", flush=True)
    print(f"{output / 'gpu_report.md'} and {output / 'gpu_report.json'}")
    return report.exit_code


def _machine(place: Place) -> dict[str, Any] | None:
    """Describe this machine; None, with a message, where nothing can be measured on it."""
    command = [sys.executable, "-m", "benchmarks.gpu.machine"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True,
            timeout=_DESCRIBING_LIMIT_S, env=child_environment(place),
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        _refuse(f"torch does not come up with {sys.executable}:\n{error.stderr[-2000:]}")
        return None
    except subprocess.TimeoutExpired:
        _refuse(f"torch does not come up within {_DESCRIBING_LIMIT_S} s")
        return None
    machine: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if machine["gpu"] is None and not place.dry_run:
        torch = machine["packages"].get("torch")
        _refuse(
            f"torch {torch} of {sys.executable} sees no CUDA GPU; look at nvidia-smi, name another "
            "interpreter in GPU_PYTHON, or try the parts on the CPU with --dry_run"
        )
        return None
    return machine


def _refuse(why: str) -> None:
    print(why, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", nargs="+", default=[], metavar="PART", help="default: all")
    parser.add_argument("--dry_run", action="store_true", help="small, on the CPU")
    parser.add_argument("--output", type=Path, default=Path("gpu_output"))
    parser.add_argument(
        "--time_limit_s", type=float, default=TIME_LIMIT_S, help=f"default: {TIME_LIMIT_S}"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)  # as a part's process, with these:
    parser.add_argument("--part_limit_s", type=float, help=argparse.SUPPRESS)
    for name in ("result", "folder", "kept"):
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
