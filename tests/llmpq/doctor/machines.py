"""Machines as `llmpq doctor` may meet them: one in order, of which tests change a part."""

from __future__ import annotations

from llmpq.doctor.facts import Driver, Facts, Folder, Gpu, Host, Library, Torch
from quant.common.units import GIB

FREE = 400 * GIB
T4, P100, A100 = (
    Gpu("Tesla T4", (7, 5)),
    Gpu("Tesla P100-PCIE-16GB", (6, 0)),
    Gpu("NVIDIA A100-SXM4-40GB", (8, 0)),
)

# What `torch.cuda.get_arch_list()` says of PyTorch's published wheels.
CUDA_126 = Torch(
    "2.13.0+cu126",
    cuda=(12, 6),
    targets=("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"),
    available=True,
)
CUDA_13 = Torch(
    "2.13.0+cu130",
    cuda=(13, 0),
    targets=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    available=True,
)
CPU = Torch("2.13.0+cpu")

HOST = Host(
    python="3.12.4 at /env/bin/python",
    user_id=1000,
    has_entry=True,
    cache=Folder("/home/u/.cache/llmpq", True, FREE),
    cache_is_temporary=False,
    ray=Folder("/tmp", True, FREE),
    temporary=Folder("/tmp", True, FREE),
    shared_bytes=32 * GIB,
    shared_free_bytes=32 * GIB,
    memory_bytes=64 * GIB,
    limit_bytes=None,
    open_files=1048576,
)

NUMBA, RAY = Library("0.68.1"), Library("2.60.0", more={"seconds": 3.2})
WITHOUT_GPU = Facts(HOST, Driver(), CPU, NUMBA, RAY)


def driver(cuda: tuple[int, int], *gpus: Gpu, version: str = "580.65.06") -> Driver:
    return Driver(version, cuda, gpus, len(gpus))


def with_gpus(driver: Driver, torch: Torch) -> Facts:
    """A machine in order but for what `torch` makes of the GPUs."""
    found = Library("0.50.2")
    kernels = Library("2.13.0") if torch.available else None
    return Facts(HOST, driver, torch, NUMBA, RAY, bitsandbytes=found, kernels=kernels)
