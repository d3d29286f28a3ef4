"""Describes the machine of a report, in a process of its own: `python -m benchmarks.gpu.machine`.

Prints one line of JSON; `gpu` is null where torch sees none.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from typing import Any

from benchmarks.lab import processor_name

PACKAGES = ("torch", "transformers", "bitsandbytes", "ray", "triton", "numpy")


def describe() -> dict[str, Any]:
    """Names, sizes and versions; needs torch."""
    import torch

    found: dict[str, Any] = {
        "gpu": None,
        "processor": processor_name(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "code": _output("git", "rev-parse", "--short=12", "HEAD") or "unknown",
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "memory_bytes": gpu.total_memory,
            "multiprocessors": gpu.multi_processor_count,
            "l2_bytes": getattr(gpu, "L2_cache_size", 0),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
            or "unknown",
        }
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """The first line that `command` prints; nothing where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.splitlines()), "").strip()


if __name__ == "__main__":
    print(json.dumps(describe()))
