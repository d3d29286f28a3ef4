"""How much of this process's CPUs other programs take meanwhile, by what the kernel counts."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_KINDS, _IDLE = 8, (3, 4)
"""Kinds of a CPU's ticks that do not overlap, and those in which it waits (proc(5))."""

_LOOK_S = 0.3
"""At ticks of 10 ms a CPU's share is known to 3 %."""


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since the machine started, summed over the CPUs that this process may use: those in
    which they worked or another machine had them, and all. `own_s` are those of this process and of
    its children that have ended.
    """

    worked_s: float = 0.0
    passed_s: float = 0.0
    own_s: float = 0.0

    @classmethod
    def now(cls, stat: Path = _STAT) -> CpuTimes:
        """What `stat` says; all 0 on a system without it."""
        try:
            lines = stat.read_text(encoding="ascii").splitlines()
            names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        except (OSError, AttributeError):
            return cls()
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        worked = passed = 0
        for name, *counts in map(str.split, lines):
            if name in names:
                ticks = [int(each) for each in counts[:_KINDS]]
                passed += sum(ticks)
                worked += sum(ticks) - sum(ticks[kind] for kind in _IDLE)
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        own_s = sum(each.ru_utime + each.ru_stime for each in used)
        return cls(worked * tick_s, passed * tick_s, own_s)

    def others_since(self, before: CpuTimes) -> float:
        """The share of the CPUs, from 0 to 1, that others had since `before`."""
        passed_s = self.passed_s - before.passed_s
        others_s = self.worked_s - before.worked_s - (self.own_s - before.own_s)
        return min(1.0, max(0.0, others_s / passed_s)) if passed_s > 0 else 0.0


def others_now() -> float:
    """The share of the CPUs that others have at this moment, in which this process waits."""
    before = CpuTimes.now()
    time.sleep(_LOOK_S)
    return CpuTimes.now().others_since(before)
