"""The device that a stage's process really has, checked against the planned one."""

from __future__ import annotations

import torch

from actors.processes.gpus import see_own
from actors.stage.spec import StageSpec
from quant.common.errors import DeviceError
from quant.devices import take_device

TOLERATED_SHORTFALL = 0.03  # share by which a GPU may offer less: drivers reserve differently


def device_here(kind: str) -> torch.device:
    """The device of this `kind`, cpu or cuda, that Ray has given this process."""
    if kind == "cuda":
        see_own()
    return take_device(kind)


def local_device(spec: StageSpec) -> torch.device:
    """Return the device of this process; raises `DeviceError` unless it is the planned GPU."""
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
