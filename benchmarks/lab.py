"""What all benchmarks share: tables and pages, the machine and its pace, and contestants in turns.

A contestant is a long-lived process whose program makes itself ready and calls `serve`; a race
starts it as a `Contestant` and sends it one pass of prompts at a time. Between its passes all of
its processes are stopped (SIGSTOP), so that no spinning thread, poll or timer takes anything from
the one that is timed. Imports only Python's own library, for programs that run in other
environments. Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
"""Where the reference data is looked for; it is no part of the repository."""

PAPER_BITS = (3, 4, 8, 16)
"""The bitwidths of LLM-PQ's paper."""

BFLOAT16_CAPABILITY = (8, 0)
"""Compute capability: older GPUs only emulate bf16, whatever torch's `is_bf16_supported` says."""

_PROBE_SIZE, _PROBE_BYTES, _PROBE_TURNS = 2048, 1 << 28, 5
EVICTING_BYTES = 1 << 28
"""Five times the 50 MB of an H100, which keeps more than any other GPU so far."""

_WARM_UPS = 3  # before a capture: libraries make their handles and workspaces at first calls

Prompts = list[list[int]]

READY = "contestant is ready"
MARK = "contestant answers "
SETTLE_S = 0.5  # given to timers that are due when a contestant goes on, before its pass begins
END_S = 60.0
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def header(names: str | Iterable[str]) -> str:
    """The first two lines of a Markdown table; `names` may be one text with bars between them."""
    text = names if isinstance(names, str) else " | ".join(names)
    return f"| {text} |\n" + "|---" * (text.count("|") + 1) + "|"


def table_row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def update_page(page: Path, section: str, lines: Sequence[str]) -> None:
    begin, end = f"<!-- {section} -->", f"<!-- end of {section} -->"
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise SystemExit(f"{page} has no markers {begin} and {end}; add both on lines of their own")
    head, rest = text.split(begin, 1)
    tail = rest.split(end, 1)[1]
    page.write_text(f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{tail}", encoding="utf-8")


def show(lines: Iterable[str], page: Path | None = None, section: str = "") -> None:
    """Print each line as soon as it is there, and put all into a page's section if one is given."""
    shown = []
    for line in lines:
        shown.append(line)
        print(line, flush=True)
    if page is not None:
        update_page(page, section, shown)


Part = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]]
"""Adds the options of a part of a benchmark, and runs it."""


def table_part(section: str, lines: Callable[[], Iterable[str]]) -> Part:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--update", type=Path, help="page whose section is replaced")

    return add_arguments, lambda options: show(lines(), options.update, section)


def run_part(
    name: str, about: str, parts: Mapping[str, Part], arguments: Sequence[str] | None = None
) -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parsers = parser.add_subparsers(dest="part", required=True)
    for part, (add_arguments, _) in parts.items():
        add_arguments(parsers.add_parser(part))
    options = parser.parse_args(arguments)
    parts[options.part][1](options)


@dataclass(frozen=True)
class Pace:
    """How fast the machine is at this moment: a product of fixed size in the compute type that it
    has units for, and a copy.
    """

    matmul_gflop_per_s: float
    copy_gbyte_per_s: float
    """Bytes read and written."""

    def mean(self, other: Pace) -> Pace:
        return Pace(
            (self.matmul_gflop_per_s + other.matmul_gflop_per_s) / 2,
            (self.copy_gbyte_per_s + other.copy_gbyte_per_s) / 2,
        )


_INSTRUCTION_SETS = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")
"""Of which the first that a processor has says how fast it multiplies, as Linux names them."""


def processor_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    names, words = re.findall(r"^model name\s*: (.*\S)", text, re.MULTILINE), text.split()
    instructions = next((f", {each}" for each in _INSTRUCTION_SETS if each in words), "")
    return f"{names[0]} ({len(names)} cores{instructions})" if names else platform.machine()


def native_dtype() -> str:
    """bfloat16, where this CPU has units for it and does not emulate it."""
    import torch

    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def pace_probe() -> Callable[[], Pace]:
    """Make a function that takes the machine's pace: medians, a third of a second in all."""
    import torch

    square = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=getattr(torch, native_dtype()))
    source = torch.ones(_PROBE_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)

    def probe() -> Pace:
        flop = 2 * _PROBE_SIZE**3
        matmul_s = _median_seconds(lambda: square @ square)
        copy_s = _median_seconds(lambda: target.copy_(source))
        return Pace(flop / matmul_s / 1e9, 2 * _PROBE_BYTES / copy_s / 1e9)

    return probe


def _median_seconds(work: Callable[[], object]) -> float:
    """The first call brings memory and threads back, and does not count."""
    found = []
    for _ in range(_PROBE_TURNS + 1):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return median(found[1:])


def process_tree(root: int) -> list[int]:
    """Find `root` and the processes below it, parents first."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = [root]
    for known in found:
        found.extend(pid for pid, parent in parents.items() if parent == known)
    return found


def signal_tree(root: int, number: signal.Signals) -> None:
    """Send it to the whole tree, parents first: one that stands still starts nothing more."""
    sent: set[int] = set()
    while new := [pid for pid in process_tree(root) if pid not in sent]:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        sent.update(new)


def stands_still(pid: int) -> bool:
    """Whether a process is stopped in all of its threads, or has ended."""
    try:
        stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return True  # it has ended
    return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)


@dataclass(frozen=True)
class Captured:
    """Recorded work: `replay` does it again on the same memory; `output` is what it returned."""

    replay: Callable[[], object]
    output: Any


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of `work` from an idle device on: launches count as far as the device waits for them.
    On a GPU the time between two events on the current stream.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def captured(device: torch.device, work: Callable[[], Any]) -> Captured:
    """Warm `work` up and record it as a CUDA graph on a side stream; on a CPU it is `work` itself,
    which reads and writes the same tensors each time. RuntimeError where it waits for the device or
    copies from pageable host memory, which a graph cannot hold.
    """
    if device.type != "cuda":
        return Captured(work, work())
    import torch

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):  # whose handles and workspaces are there now
        output = work()
    return Captured(graph.replay, output)


def evictor(device: torch.device) -> Callable[[], object]:
    """Work that leaves nothing else in a GPU's cache; none on a CPU."""
    if device.type != "cuda":
        return lambda: None
    import torch

    return torch.empty(EVICTING_BYTES, dtype=torch.uint8, device=device).zero_


class ContestantError(Exception):
    """A contestant ended, or did not do what was asked of it."""


@dataclass(frozen=True)
class Pass:
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def serve(run: Callable[[Prompts], int], what: str = "") -> None:
    """Answer each line of prompts from stdin with the tokens that `run` made of it and its seconds.
    `what` says how the work is done. Called by the contestant's program when it is ready.
    """
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    print(f"\n{READY} {what}", flush=True)
    for line in sys.stdin:
        prompts = json.loads(line)
        began = time.perf_counter()
        tokens = run(prompts)
        seconds = time.perf_counter() - began
        print(f"\n{MARK}{json.dumps([tokens, seconds])}", flush=True)


def spread(values: Sequence[float], digits: int) -> str:
    """The median, with least and most."""
    least, most = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{median(values):.{digits}f} ({least} to {most})"


class Contestant:
    """Context manager over a contestant's processes, which move only during its passes."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.what = ""
        self._command, self._environment, self._log = command, environment, log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | self._environment,
                start_new_session=True,
            )
        try:
            self.what = self._line_after(READY).strip()
        except BaseException:
            self._end()
            raise
        self._stop()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let it end by itself; after an error, or where it takes too long, kill it."""
        assert self._process is not None
        signal_tree(self.pid, signal.SIGCONT)
        if error is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        self._end()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def run(self, prompts: Prompts, new_tokens: int) -> Pass:
        """One pass, between going on and being stopped; each prompt must get `new_tokens`."""
        assert self._process is not None
        assert self._process.stdin is not None
        signal_tree(self.pid, signal.SIGCONT)
        time.sleep(SETTLE_S)
        try:
            self._process.stdin.write(json.dumps(prompts) + "\n")
            self._process.stdin.flush()
            found = Pass(*json.loads(self._line_after(MARK)))
        except BrokenPipeError:
            raise ContestantError(self._ended()) from None
        finally:
            self._stop()
        if found.tokens != len(prompts) * new_tokens:
            raise ContestantError(
                f"{self.name} made {found.tokens} tokens of {len(prompts)} prompts, not "
                f"{len(prompts) * new_tokens}"
            )
        return found

    def _line_after(self, mark: str) -> str:
        # libraries print lines of their own among those with marks
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise ContestantError(self._ended())

    def _ended(self) -> str:
        return f"{self.name} ended; the last it said:\n{self._log.read_text()[-3000:]}"

    def _stop(self) -> None:
        """Stop the whole tree; each thread runs on until the kernel has told it."""
        signal_tree(self.pid, signal.SIGSTOP)
        while not all(stands_still(pid) for pid in process_tree(self.pid)):
            time.sleep(0.001)

    def _end(self) -> None:
        assert self._process is not None
        signal_tree(self.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it has started and left behind
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
