"""The device that a stage's process really has, checked against the planned one."""

from __future__ import annotations

import torch

from actors.stage.spec import StageSpec
from planner.cluster.accelerators import find_accelerator
from quant.common.errors import DeviceError, SpecError

TOLERATED_SHORTFALL = 0.03  # share by which a GPU may offer less: drivers reserve differently


def local_device(spec: StageSpec) -> torch.device:
    """Return the device of this process; raises `DeviceError` unless it is the planned GPU."""
    if spec.accelerator is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"stage {spec.index} was planned for {spec.device_name}, but its process sees no CUDA "
            f"device that torch {torch.__version__} can use; install a torch wheel that serves it"
        )
    found = torch.cuda.get_device_properties(0)
    try:
        kind = find_accelerator(found.name).name
    except SpecError:
        kind = found.name
    if kind != spec.accelerator:
        raise DeviceError(
            f"stage {spec.index} was planned for {spec.accelerator}, but its process got "
            f"{found.name}; start one Ray node for each GPU type, with CUDA_VISIBLE_DEVICES and "
            f"--resources='{{\"{spec.accelerator}\": COUNT}}'"
        )
    wanted = spec.memory_limit_bytes * (1 - TOLERATED_SHORTFALL)
    if found.total_memory < wanted:
        raise DeviceError(
            f"stage {spec.index} was planned with {spec.memory_limit_bytes} bytes on "
            f"{spec.device_name}, but the GPU has {found.total_memory}; state usable_memory_gib in "
            "the cluster file"
        )
    return torch.device("cuda", 0)
