"""What the facts of a machine mean: what works, what works badly, what is missing, and remedies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from llmpq.doctor.facts import Driver, Facts, Folder, Gpu, Host, Library, Torch
from llmpq.doctor.remedies import Installer, wanted_build
from llmpq.remote.starting import LEAST_FREE_BYTES
from quant.common.units import GIB, MIB

State = Literal["works", "note", "fails"]

RAY_SHARE, RAY_MOST_BYTES = 0.3, 10**10
"""Share of the memory that Ray takes for objects, up to a bound beyond which it goes by /dev/shm;
with less there it keeps them on disk (`ray/_private/utils.py`, 2.60)."""

FEW_FILES = 1024
"""Open files that a local Ray with a dozen stages may come to; it raises the soft limit itself."""

ROOMY_BYTES = 10 * GIB
"""Free space below which a checkpoint's packed layers may not all be kept."""

DRIVER_FOR = {12: "525.60", 13: "580"}
"""Driver from which on each CUDA runs (NVIDIA's notes on minor-version compatibility)."""


@dataclass(frozen=True)
class Finding:
    """One line on a `subject`; `remedy` is a command, or words where there is none."""

    subject: str
    state: State
    text: str
    remedy: str | None = None


def findings(facts: Facts, installer: Installer) -> list[Finding]:
    found = [*_driver(facts.driver), _torch(facts, installer)]
    if facts.bitsandbytes is not None:
        found.append(_bitsandbytes(facts.bitsandbytes, installer))
    if facts.kernels is not None:
        found += _kernels(facts.kernels)
    found += [_numba(facts.numba, installer), _ray(facts.ray, installer)]
    if facts.cluster is not None:
        found.append(_cluster(facts.cluster, facts.address))
    return [*found, *_host(facts.host)]


def all_works(found: Iterable[Finding]) -> bool:
    return all(each.state != "fails" for each in found)


def _driver(driver: Driver) -> Iterator[Finding]:
    for said in driver.said:
        mismatch = "version mismatch" in said
        remedy = "restart the machine, so that module and library are of one version again"
        if not mismatch:
            remedy = "mend the driver until `nvidia-smi` lists the GPUs"
        yield Finding("driver", "fails", f"nvidia-smi says: {said}", remedy)
    if not driver.gpus:
        if not driver.said:
            yield _no_gpu(driver)
        return
    kinds = ", ".join(dict.fromkeys(each.name for each in driver.gpus))
    serves = f", serves CUDA up to {_dotted(driver.cuda)}" if driver.cuda else ""
    text = f"{driver.version or 'unknown version'}{serves}; {len(driver.gpus)} GPUs: {kinds}"
    if driver.cuda is not None and driver.cuda[0] < 12:
        least = DRIVER_FOR[12]
        remedy = (
            f"install NVIDIA's driver {least} or newer, for P100 and V100 at most its branch 580"
        )
        yield Finding("driver", "fails", f"{text}; torch is built for CUDA 12.6 at least", remedy)
    else:
        yield Finding("driver", "works", text)
    for each in driver.gpus:
        if each.problem is not None:
            yield Finding(each.name, "fails", each.problem)


def _no_gpu(driver: Driver) -> Finding:
    if driver.on_bus and driver.hidden is None:
        return Finding(
            "driver",
            "fails",
            f"{driver.on_bus} NVIDIA GPUs are on the bus, but no driver answers (no nvidia-smi)",
            "install NVIDIA's driver, in a container start it with `--gpus all`, or set "
            "CUDA_VISIBLE_DEVICES= where stages are to compute on the CPU",
        )
    hidden = "" if driver.hidden is None else f" (CUDA_VISIBLE_DEVICES={driver.hidden})"
    return Finding("driver", "works", f"no NVIDIA GPU is seen{hidden}: stages compute on the CPU")


def _torch(facts: Facts, installer: Installer) -> Finding:
    torch, driver = facts.torch, facts.driver
    build = wanted_build(driver)
    install = installer.extra(build)
    if torch.version is None and torch.error is None:
        return Finding("torch", "fails", "not installed; only plans can be made", install)
    if torch.error is not None:
        text = f"{_named(torch)} cannot be used: {torch.error}"
        return Finding("torch", "fails", text, installer.extra(build, again=True))
    if not driver.gpus:
        if torch.cuda is None:
            return Finding("torch", "works", f"{torch.version} for CPUs")
        return Finding(
            "torch", "works", f"{torch.version} of CUDA {_dotted(torch.cuda)}, on the CPU here"
        )
    wrong = _why_no_cuda(torch, driver)
    if wrong is None:
        text = f"{torch.version} of CUDA {_dotted(torch.cuda)} computes on {len(driver.gpus)} GPUs"
        return Finding("torch", "works", text)
    old_driver = torch.cuda is not None and driver.cuda is not None and driver.cuda < torch.cuda
    if old_driver and build == "cuda13":
        install = f"install NVIDIA's driver {DRIVER_FOR[13]} or newer"
    return Finding("torch", "fails", wrong, install)


def _why_no_cuda(torch: Torch, driver: Driver) -> str | None:
    """Why torch computes on none or not on all of the driver's GPUs; None where it does."""
    if torch.cuda is None:
        return f"{torch.version} is a build for CPUs, which sees none of the GPUs"
    of = f"{torch.version} of CUDA {_dotted(torch.cuda)}"
    if driver.cuda is not None and driver.cuda[0] < torch.cuda[0]:
        needed = DRIVER_FOR.get(torch.cuda[0], "a newer one")
        return f"{of} needs driver {needed}, here is {driver.version or 'an older one'}"
    without = [each for each in driver.gpus if each.capability and not _has_code(torch, each)]
    if without:
        names = ", ".join(dict.fromkeys(_described(each) for each in without))
        return f'{of} has no code for {names}: "no kernel image is available" is what it would say'
    if not torch.available:
        return f"{of} sees no GPU{''.join(f': {each}' for each in torch.complaints[:1])}"
    return f"{of}: {torch.complaints[0]}" if torch.complaints else None


def _has_code(torch: Torch, gpu: Gpu) -> bool:
    """Whether one of torch's targets runs there: code of the same major version, or PTX."""
    assert gpu.capability is not None
    major, minor = gpu.capability
    for target in torch.targets:
        kind, _, number = target.partition("_")
        digits = number.rstrip("af")  # sm_90a runs on 9.0 alone
        if not digits.isdecimal():
            continue
        of = divmod(int(digits), 10)
        if kind == "compute" and of <= (major, minor):
            return True
        if kind == "sm" and of[0] == major and of[1] <= minor:
            return True
    return not torch.targets


def _bitsandbytes(found: Library, installer: Installer) -> Finding:
    install = installer.extra("bitsandbytes")
    if found.error is None and found.version is not None:
        return Finding("bitsandbytes", "works", found.version)
    why = (
        "not installed" if found.error is None else f"{_named(found)} cannot be used: {found.error}"
    )
    text = f"{why}; 4-bit weights on GPUs need it"
    return Finding("bitsandbytes", "fails", text, install)


def _kernels(found: Library) -> Iterator[Finding]:
    if found.error is not None:
        yield Finding("kernels", "note", f"could not be tried: {found.error}")
    elif not found.complaints:
        yield Finding("kernels", "works", "those of 3, 4 and 8 bit passed their tests on each GPU")
    for complaint in found.complaints:
        text = f"{complaint}; slower ones take their place"
        nvrtc = "nvrtc" in complaint.lower() and "not found" in complaint
        remedy = "pip install 'nvidia-cuda-nvrtc-cu12>=12.6,<12.7'" if nvrtc else None
        yield Finding("kernels", "note", text, remedy)


def _numba(found: Library, installer: Installer) -> Finding:
    if found.error is None and found.version is not None:
        return Finding("numba", "works", found.version)
    why = (
        "not installed" if found.error is None else f"{_named(found)} cannot be used: {found.error}"
    )
    text = f"{why}; computing on CPUs is several times slower without it"
    return Finding("numba", "note", text, installer.package("numba"))


def _ray(found: Library, installer: Installer) -> Finding:
    if found.version is None:
        text = found.error or "not installed"
        return Finding("Ray", "fails", text, installer.package("ray[default]"))
    if found.error is not None:
        # The message has the remedy in it.
        return Finding("Ray", "fails", f"{found.version}: {found.error}")
    took = found.more.get("seconds")
    started = "" if took is None else f", a local one started in {took:.1f} s"
    return Finding("Ray", "works", f"{found.version}{started}")


def _cluster(found: Library, address: str | None) -> Finding:
    if found.error is not None:
        return Finding("cluster", "fails", found.error)
    nodes, devices = found.more.get("nodes"), found.more.get("devices")
    return Finding("cluster", "works", f"{address}: {nodes} nodes with {devices}")


def _host(host: Host) -> Iterator[Finding]:
    yield Finding("Python", "works", host.python)
    yield from _memory(host)
    yield from _folders(host)
    yield _shared_memory(host)
    if host.open_files < FEW_FILES:
        text = f"{host.open_files} at most; Ray opens more with a dozen stages"
        yield Finding("open files", "note", text, f"ulimit -Hn {64 * FEW_FILES} (as root)")
    else:
        yield Finding("open files", "works", f"up to {host.open_files}")


def _memory(host: Host) -> Iterator[Finding]:
    text = f"{host.memory_bytes / GIB:.1f} GiB"
    if host.limit_bytes is not None and host.limit_bytes < host.memory_bytes:
        text = f"{host.limit_bytes / GIB:.1f} GiB for this container, of the machine's {text}"
    yield Finding("memory", "works", text)


def _folders(host: Host) -> Iterator[Finding]:
    """One line where all can be written and have room, else one for each that cannot or has not."""
    found = [
        _folder("Ray's files", host.ray, "fails", "export RAY_TMPDIR=/a/short/path"),
        _folder("temporary files", host.temporary, "fails", "export TMPDIR=/another/folder"),
        _folder("cache", host.cache, "note", "export XDG_CACHE_HOME=/another/folder", ROOMY_BYTES),
    ]
    if host.cache_is_temporary:
        remedy = "export XDG_CACHE_HOME=/a/folder, for one that lasts"
        text = f"no home can be written; the cache is in {host.cache.path}"
        found.append(Finding("home", "note", text, remedy))
    wrong = [each for each in found if each is not None]
    yield from wrong
    entry = "" if host.has_entry else f"; user {host.user_id} has no passwd entry, and needs none"
    if not wrong:
        free = host.cache.free_bytes / GIB
        yield Finding("folders", "works", f"can be written, {free:,.0f} GiB free{entry}")


def _folder(
    subject: str, folder: Folder, severity: State, remedy: str, roomy_bytes: int = GIB
) -> Finding | None:
    where = folder.path or "no folder (no home is known)"
    if not folder.writable:
        return Finding(subject, severity, f"{where} cannot be written", remedy)
    if folder.free_bytes >= roomy_bytes:
        return None
    full = severity == "fails" and folder.free_bytes < LEAST_FREE_BYTES
    text = f"{where} has {folder.free_bytes / MIB:,.0f} MiB free"
    return Finding(subject, "fails" if full else "note", text, f"free some, or {remedy}")


def _shared_memory(host: Host) -> Finding:
    memory = min(host.memory_bytes, host.limit_bytes or host.memory_bytes)
    wanted = min(RAY_SHARE * memory, RAY_MOST_BYTES)
    text = f"{host.shared_free_bytes / MIB:,.0f} MiB free"
    if host.shared_free_bytes >= wanted:
        return Finding("/dev/shm", "works", text)
    size = -(-int(wanted) // GIB)
    return Finding(
        "/dev/shm",
        "note",
        f"{text}; Ray wants {wanted / MIB:,.0f} and takes a folder on disk, which is slower",
        f"start the container with --shm-size={size}g, or remount: mount -o remount,size={size}G "
        "/dev/shm",
    )


def _named(found: Library) -> str:
    return found.version or "it"


def _described(gpu: Gpu) -> str:
    return f"{gpu.name} (compute capability {_dotted(gpu.capability)})"


def _dotted(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else f"{version[0]}.{version[1]}"
