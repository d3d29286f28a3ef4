"""The machine that a benchmark names beside its figures."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """The processor by the kernel's name for it, with its cores; the architecture where unknown."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.machine()
