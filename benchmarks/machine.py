"""The machine that a benchmark names beside its figures: what it is, its pace, its processes."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

BFLOAT16_CAPABILITY = (8, 0)
"""Compute capability: older GPUs only emulate bf16, whatever torch's `is_bf16_supported` says."""

PROBE_SIZE = 2048
PROBE_BYTES = 1 << 28
PROBE_TURNS = 5


@dataclass(frozen=True)
class Pace:
    """How fast the machine is at this moment: a product of fixed size in the compute type that it
    has units for, and a copy.
    """

    matmul_gflop_per_s: float
    copy_gbyte_per_s: float
    """Bytes read and written."""

    def mean(self, other: Pace) -> Pace:
        """Between two moments."""
        return Pace(
            (self.matmul_gflop_per_s + other.matmul_gflop_per_s) / 2,
            (self.copy_gbyte_per_s + other.copy_gbyte_per_s) / 2,
        )


def processor_name() -> str:
    """The processor by the kernel's name for it, with its cores; the architecture where unknown."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.machine()


def native_dtype() -> str:
    """The compute type that this CPU has units for: bfloat16 is emulated where it has none."""
    import torch

    from quant.processor import local_processor

    has_bf16 = "avx512_bf16" in local_processor(torch.device("cpu")).instruction_sets
    return "bfloat16" if has_bf16 else "float32"


def pace_probe() -> Callable[[], Pace]:
    """A function that takes the machine's pace (medians, a third of a second in all)."""
    import torch

    square = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=getattr(torch, native_dtype()))
    source = torch.ones(PROBE_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)

    def probe() -> Pace:
        flop = 2 * PROBE_SIZE**3
        matmul_s = _median_seconds(lambda: square @ square)
        copy_s = _median_seconds(lambda: target.copy_(source))
        return Pace(flop / matmul_s / 1e9, 2 * PROBE_BYTES / copy_s / 1e9)

    return probe


def _median_seconds(work: Callable[[], object]) -> float:
    """The first call brings memory and threads back, and does not count."""
    found = []
    for _ in range(PROBE_TURNS + 1):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return median(found[1:])


def process_tree(root: int) -> list[int]:
    """`root` and the processes below it, parents first (Linux)."""
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


def stands_still(pid: int) -> bool:
    """Whether a process is stopped in all of its threads, or has ended (Linux)."""
    try:
        stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return True  # it has ended
    return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)
