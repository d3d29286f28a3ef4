"""Looks at this machine for `llmpq.doctor.facts`; what may crash runs in processes of its own."""

from __future__ import annotations

import json
import os
import platform
import pwd
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from actors.processes.device import ReportedGpu, visible_gpus
from llmpq.doctor.facts import Driver, Facts, Folder, Gpu, Host, Library, Torch
from planner.cluster.accelerators import reported_accelerator
from quant.common.errors import SpecError
from quant.common.files import user_cache_folder
from quant.common.host_memory import memory_limit_bytes
from quant.common.text import printable

CHILD_S = 120.0
"""Seconds for a process that tries a library: torch from a slow disk takes half a minute."""

_VERSIONS = re.compile(
    r"Driver Version:\s*([\d.]+).*?CUDA[\w ]* Version:\s*(\d+)\.(\d+)", re.DOTALL
)
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"

T = TypeVar("T", bound=Library)


def facts_here(address: str | None = None) -> Facts:
    """Look at all, two libraries at a time, and Ray alone: its start waits for nobody for long."""
    driver = driver_here()
    has_gpus = bool(driver.gpus)
    with ThreadPoolExecutor(2) as pool:
        torch = pool.submit(asked, Torch, "torch")
        numba = pool.submit(asked, Library, "numba")
        bitsandbytes = pool.submit(asked, Library, "bitsandbytes") if has_gpus else None
        kernels = pool.submit(asked, Library, "kernels") if has_gpus else None
    computes = torch.result().available
    return Facts(
        host=host_here(),
        driver=driver,
        torch=torch.result(),
        numba=numba.result(),
        ray=asked(Library, "ray"),
        bitsandbytes=None if bitsandbytes is None else bitsandbytes.result(),
        kernels=None if kernels is None or not computes else kernels.result(),
        cluster=asked(Library, "cluster", address) if address else None,
        address=address,
    )


def asked(
    kind: type[T],
    *words: str,
    command: Iterable[str] = (sys.executable, "-P", "-m", "llmpq.doctor.child"),
) -> T:
    """What the child process says of a library; an error where it dies, or says nothing in time."""
    # It imports from where this process does, and not from the folder that it is called in.
    seen = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    whole = [*command, *words]
    try:
        done = subprocess.run(
            whole, env=seen, capture_output=True, text=True, check=False, timeout=CHILD_S
        )
    except subprocess.TimeoutExpired:
        return kind(error=f"no answer within {CHILD_S:.0f} s")
    except OSError as error:
        return kind(error=str(error))
    try:
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return kind(error=_end(done))
    said["complaints"] = tuple(said.get("complaints", ()))
    if "targets" in said:
        said["targets"] = tuple(said["targets"])
    if said.get("cuda"):
        said["cuda"] = tuple(said["cuda"])
    return kind(**said)


def _end(done: subprocess.CompletedProcess[str]) -> str:
    """How a process ended that said nothing, and the last that it wrote."""
    code = done.returncode
    how = f"its process ended with code {code}"
    if code < 0:
        with suppress(ValueError):
            how = f"its process was ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return printable(f"{how}{f': {lines[-1]}' if lines else ''}", 300)


def driver_here() -> Driver:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpus = visible_gpus()
    version, cuda = _versions(_nvidia_smi())
    return Driver(
        version=version,
        cuda=cuda,
        gpus=tuple(map(_gpu, gpus)),
        on_bus=_on_bus(),
        said=tuple(printable(str(each.message), 300) for each in caught),
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _gpu(reported: ReportedGpu) -> Gpu:
    try:
        found = reported_accelerator(reported.name, reported.memory_bytes)
    except SpecError as error:
        return Gpu(reported.name, None, str(error))
    return Gpu(reported.name, found.compute_capability)


def _nvidia_smi() -> str:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, check=False, timeout=30
        ).stdout
    return ""


def _versions(head: str) -> tuple[str | None, tuple[int, int] | None]:
    """The driver's version and its newest CUDA, of what nvidia-smi prints."""
    found = _VERSIONS.search(head)
    return (found[1], (int(found[2]), int(found[3]))) if found else (None, None)


def _on_bus() -> int:
    """GPUs of NVIDIA that the kernel sees, whoever drives them."""
    found = 0
    with suppress(OSError):
        for each in _PCI.iterdir():
            with suppress(OSError):
                kinds = ((each / name).read_text().strip() for name in ("vendor", "class"))
                vendor, kind = kinds
                found += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return found


def host_here() -> Host:
    shared = _disk("/dev/shm")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    temporary = _path(tempfile.gettempdir)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cache = _path(lambda: str(user_cache_folder()))
    return Host(
        python=f"{platform.python_version()} at {sys.executable}",
        user_id=os.geteuid(),
        has_entry=_has_entry(),
        cache=_folder(cache),
        cache_is_temporary=bool(told),
        ray=_folder(os.environ.get("RAY_TMPDIR") or "/tmp"),
        temporary=_folder(temporary),
        shared_bytes=shared[0],
        shared_free_bytes=shared[1],
        memory_bytes=physical,
        limit_bytes=memory_limit_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    )


def _has_entry() -> bool:
    with suppress(KeyError):
        return bool(pwd.getpwuid(os.geteuid()))
    return False


def _path(find: Callable[[], str]) -> str | None:
    with suppress(OSError, RuntimeError):  # none that can be written, or no home
        return find()
    return None


def _folder(path: str | None) -> Folder:
    """Whether files can be made in `path`, or it can be made itself, and its file system's room."""
    if path is None:
        return Folder(None, False)
    there = Path(path)
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError:
        return Folder(path, False)
    return Folder(path, True, _disk(str(there))[1])


def _disk(path: str) -> tuple[int, int]:
    with suppress(OSError):
        found = shutil.disk_usage(path)
        return found.total, found.free
    return 0, 0
