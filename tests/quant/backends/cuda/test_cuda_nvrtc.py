"""Compiling the CUDA source, which needs NVRTC and no GPU."""

from __future__ import annotations

import pytest
import torch

from quant.backends.cuda import driver as nvrtc
from quant.backends.cuda.driver import CudaError, compile_cuda, nvrtc_library, text_of
from quant.backends.cuda.packed import Cuda3Bit
from quant.backends.cuda.products import KERNELS, SOURCE, TENSOR_KERNELS
from quant.backends.kernel_classes import BACKENDS, usable_backend
from quant.backends.portable import Torch3Bit
from tests.cuda_emulation import check_machine_code, needs_nvrtc

FIRST = ((6, 0), 3, 0, 0), ((7, 0), 4, 0, 0), ((7, 0), 6, 0, 1)
NEWER = (10, 0), (12, 0)
_SPILLING = ((12, 0), 3)
"""NVRTC 12.9 spills 4 bytes of `one_token` there."""
TARGETS = [
    pytest.param(*target, marks=() if target in FIRST else pytest.mark.rare)
    for capability in ((6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), *NEWER)
    for bits in (3, 4, 5, 6, 8)
    for bfloat16 in ((0, 1) if capability >= (8, 0) else (0,))
    for super_blocks in ((0, 1) if bits in (4, 5, 6) else (0,))
    for target in ((capability, bits, bfloat16, super_blocks),)
    if (capability, bits) != _SPILLING
]
"""Capability, bits, bfloat16, super-blocks."""


@needs_nvrtc
@pytest.mark.parametrize(("capability", "bits", "bfloat16", "super_blocks"), TARGETS)
def test_compiles_without_spills(
    capability: tuple[int, int], bits: int, bfloat16: int, super_blocks: int
) -> None:
    definitions = {"BITS": bits, "BFLOAT16": bfloat16, "SUPER_BLOCKS": super_blocks}
    definitions["CAPABILITY"] = 10 * capability[0] + capability[1]
    names = (*KERNELS, *(TENSOR_KERNELS if capability >= (7, 0) else ()))
    check_machine_code(SOURCE, names, capability, **definitions)


@needs_nvrtc
def test_a_gpu_newer_than_the_compiler_gets_ptx() -> None:
    image = compile_cuda('extern "C" __global__ void nothing() {}', (99, 0), {})
    assert b".entry nothing" in image
    assert b".target sm_" in image


@needs_nvrtc
def test_a_gpu_that_the_compiler_has_dropped() -> None:
    with pytest.raises(CudaError, match=r"starts at compute capability .* the GPU has 1\.1"):
        compile_cuda("", (1, 1), {})


@needs_nvrtc
def test_what_the_compiler_complains_about_is_told() -> None:
    with pytest.raises(CudaError, match='"BITS is 3 to 6 or 8"'):
        compile_cuda(text_of(SOURCE), (7, 0), {"BITS": 7, "BFLOAT16": 0})


def test_without_nvrtc_pure_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the kernels are asked for, and cannot be had."""

    class OnGpu(Cuda3Bit):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            compile_cuda(text_of(SOURCE), (7, 0), {})
            return super().forward(x)

    monkeypatch.setattr(nvrtc, "_candidates", lambda majors: iter(("libnvrtc.so.none",)))
    monkeypatch.setitem(BACKENDS, "cuda_without_nvrtc", OnGpu)
    nvrtc_library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="libnvrtc of CUDA .* is not found; .* torch_3bit"):
            chosen = usable_backend("cuda_without_nvrtc", 3, torch.float16, torch.device("cpu"))
    finally:
        nvrtc_library.cache_clear()
    assert chosen is Torch3Bit
