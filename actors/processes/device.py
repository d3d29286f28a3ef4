"""The devices of this machine, that of a process, and the environment it computes in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from quant.common.errors import DeviceError
from quant.common.units import GIB, MIB

if TYPE_CHECKING:  # commands look for GPUs before they import anything that takes long
    import torch

    from actors.stage.spec import StageSpec

OPENMP_SPINS = "10000"
"""Some microseconds in which torch's idle threads wait awake: if it were longer, they would take
the core from other processes, and from compiled loops where numba has threads of its own (62 ms a
step of a 170M model on two cores, 49 with this)."""

MALLOC_KEEPS = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {"mmap_threshold": 2**25, "trim_threshold": 2**29, "hugetlb": 1}.items()
)
"""glibc keeps large temporaries for the process, on huge pages: fresh pages for each took a third
of a prefill's time at 8 bit and an eighth at 16 (170M model, 4096 tokens, two cores)."""


def stage_environment(threads: int) -> dict[str, str]:
    """Return the variables that a process of `threads` threads starts with (Ray's `env_vars`)."""
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "NUMBA_NUM_THREADS": count,
        "GOMP_SPINCOUNT": OPENMP_SPINS,
        "TOKENIZERS_PARALLELISM": "false",
        "GLIBC_TUNABLES": MALLOC_KEEPS,
        **PCI_ORDER,
    }


def use_threads(threads: int) -> None:
    """Compute with so many threads; a process of a Ray that has the variables of stages of one
    thread for all its workers takes its own.
    """
    import torch

    torch.set_num_threads(threads)
    wanted = stage_environment(threads)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        read_variables_again()


def read_variables_again() -> None:
    """Have libraries go by this process's variables: those of a fork have read others."""
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdecimal() else os.cpu_count() or 1)
    if "numba" in sys.modules:
        settings: Any = sys.modules["numba"].config
        layer = settings.THREADING_LAYER
        settings.reload_config()
        settings.THREADING_LAYER = layer  # OpenMP's would set torch's threads too
        pool: Any = sys.modules.get("numba.np.ufunc.parallel")
        if pool is not None:  # it has noted them by its own names
            pool.NUM_THREADS, pool.snt_check = pool.get_thread_count(), pool.gen_snt_check()


PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Has CUDA number GPUs as the driver does, not the fastest first."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OWN = "LLMPQ_GPUS"
_UNITS = "RAY_custom_unit_instance_resources"
_QUERY = ("--query-gpu=uuid,memory.total,name", "--format=csv,noheader,nounits")
_MIG = re.compile(r"MIG\s+(\S*\.(\d+)gb\S*)\s+Device\s+\d+:\s+\(UUID:\s*(MIG-[^)]+)\)")


class ReportedGpu(NamedTuple):
    """A GPU as the driver calls it, or a part of one (MIG)."""

    name: str
    memory_bytes: int
    uuid: str


def visible_gpus() -> tuple[ReportedGpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES names, by number or UUID, in its order; all where it is not
    set, none without a driver. As for CUDA, what follows an unknown or an empty entry does not
    count, and where one is named twice there are none. Warns of GPUs with an error, which are left
    out.
    """
    return tuple(filter(_works, _shown(tuple(_gpus(_answer(*_QUERY))))))


def _works(gpu: ReportedGpu) -> bool:
    """Whether the driver can tell its name, in whose place an error stands in brackets."""
    if not gpu.name.startswith("["):
        return True
    warnings.warn(f"nvidia-smi says of {gpu.uuid}: {gpu.name}; it is left out", stacklevel=1)
    return False


def _shown(gpus: tuple[ReportedGpu, ...]) -> tuple[ReportedGpu, ...]:
    """Those of all `gpus` that CUDA_VISIBLE_DEVICES names."""
    entries = os.environ.get(_VISIBLE)
    if entries is None:
        return gpus
    parts = tuple(_parts(_answer("-L"), gpus)) if "MIG-" in entries else ()
    found: list[ReportedGpu] = []
    for entry in map(str.strip, entries.split(",")):
        named = [each for each in (*gpus, *parts) if entry and each.uuid.startswith(entry)]
        if entry.isdecimal():
            named = list(gpus[int(entry) :][:1])
        if len(named) != 1:
            break
        found += named
    return tuple(found) if len(set(found)) == len(found) else ()


def _answer(*arguments: str) -> list[str]:
    """The lines that nvidia-smi prints, none where it is not there; warns of why it fails."""
    try:
        answer = subprocess.run(
            ("nvidia-smi", *arguments), capture_output=True, text=True, check=False, timeout=30
        )
    except FileNotFoundError:
        return []
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(f"GPUs cannot be asked for: {error}", stacklevel=1)
        return []
    return [line for line in answer.stdout.splitlines() if line.strip()]


def _gpus(lines: Iterable[str]) -> Iterator[ReportedGpu]:
    """In the order of their PCI buses, as the driver lists them; warns of what it says beside."""
    for line in lines:
        uuid, *rest = (each.strip() for each in line.split(",", 2))
        if len(rest) != 2:
            warnings.warn(f"nvidia-smi says: {line.strip()}", stacklevel=1)
            continue
        size, name = rest
        known = size.isdecimal()  # some drivers do not say it
        yield ReportedGpu(name, int(size) * MIB if known else 0, uuid)


def _parts(lines: Iterable[str], gpus: Iterable[ReportedGpu]) -> Iterator[ReportedGpu]:
    """The parts of GPUs of which `nvidia-smi -L` tells, called as CUDA does."""
    names, whole = {gpu.uuid: gpu.name for gpu in gpus}, ""
    for line in lines:
        whole = next((name for uuid, name in names.items() if uuid in line), whole)
        found = _MIG.search(line)
        if found:
            yield ReportedGpu(f"{whole} MIG {found[1]}", int(found[2]) * GIB, found[3])


def local_ray_environment(gpus: Mapping[str, list[str]]) -> dict[str, str]:
    """Variables with which a local Ray is started whose resources are `gpus`, UUIDs by the name of
    their type: its processes then know by `see_own` which of these they have.

    Ray numbers the GPUs of a node without regard to their types.
    """
    units = filter(None, os.environ.get(_UNITS, "").split(","))
    return {
        _UNITS: ",".join(dict.fromkeys([*units, *gpus])),
        _OWN: ";".join(f"{name}={','.join(uuids)}" for name, uuids in gpus.items()),
    }


def own_gpus() -> dict[str, list[str]]:
    """The UUIDs of the GPUs by type that the local Ray of this process was started with."""
    entries = filter(None, os.environ.get(_OWN, "").split(";"))
    return {name: uuids.split(",") for name, _, uuids in (e.partition("=") for e in entries)}


def see_own() -> None:
    """Before CUDA is used, have it see only the GPU that the local Ray gives this process."""
    for name, uuids in own_gpus().items():
        from ray._private.worker import global_worker

        reserved = f"^{re.escape(name)}_group_[0-9A-Za-z]+$"
        numbers = global_worker.get_accelerator_ids_for_accelerator_resource(name, reserved)
        if numbers:
            os.environ[_VISIBLE] = uuids[int(numbers[0])]


TOLERATED_SHORTFALL = 0.03  # share by which a GPU may offer less: drivers reserve differently


def device_here(kind: str) -> torch.device:
    """The device of this `kind`, cpu or cuda, that Ray has given this process."""
    from quant.devices import take_device

    if kind == "cuda":
        see_own()
    return take_device(kind)


def local_device(spec: StageSpec) -> torch.device:
    """Return the device of this process; raises `DeviceError` unless it is the planned GPU."""
    import torch

    if spec.accelerator is None:
        return torch.device("cpu")
    device = device_here("cuda")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"stage {spec.index} was planned for {spec.device_name}, but its process sees no CUDA "
            f"device that torch {torch.__version__} can use; install a torch wheel that serves it"
        )
    found = torch.cuda.get_device_properties(0)
    if not spec.accelerator.is_reported_as(found.name):
        name, is_described = spec.accelerator.name, not spec.accelerator.is_registered
        same = f"; if it is one, its description needs reported_as: [{found.name}]"
        raise DeviceError(
            f"stage {spec.index} was planned for {name}, but its process got "
            f"{found.name}; start one Ray node for each GPU type, with CUDA_VISIBLE_DEVICES and "
            f"--resources='{{\"{name}\": COUNT}}'{same if is_described else ''}"
        )
    wanted = spec.memory_limit_bytes * (1 - TOLERATED_SHORTFALL)
    if found.total_memory < wanted:
        raise DeviceError(
            f"stage {spec.index} was planned with {spec.memory_limit_bytes} bytes on "
            f"{spec.device_name}, but the GPU has {found.total_memory}; state usable_memory_gib in "
            "the cluster file"
        )
    return device
