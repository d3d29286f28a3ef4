"""The properties of this machine's devices that decide on kernels."""

from __future__ import annotations

import torch

from quant.common.errors import DeviceError
from quant.scheme import Processor


def take_device(kind: str) -> torch.device:
    """The device of this `kind`, cpu or cuda, for a process that computes on it: its first GPU.

    Without cuDNN's attention: torch puts it first on GPUs of 9.0, and it makes a plan for every
    length anew, which is at every decode step.
    """
    if kind != "cuda":
        return torch.device(kind)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", 0)


def local_processor(device: torch.device) -> Processor:
    """The processor of `device` on this machine; DeviceError for anything but CPU and CUDA."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(f"{device} is asked for, but torch {torch.__version__} finds no GPU")
        if torch.version.hip is not None:  # whose capability is no CUDA capability
            architecture = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
            return Processor(rocm_architecture=architecture)
        return Processor(compute_capability=torch.cuda.get_device_capability(device))
    if device.type != "cpu":
        raise DeviceError(f"device {device} is neither a CPU nor a CUDA GPU; use one of them")
    found = {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "avx512_vnni": torch.cpu._is_vnni_supported(),
    }
    return Processor(instruction_sets=frozenset(name for name, present in found.items() if present))
