"""Compiling the CUDA source, which needs NVRTC and no GPU."""

from __future__ import annotations

import pytest
import torch

from quant.backends import cuda_driver as nvrtc
from quant.backends.cuda_driver import CudaError, compile_cuda, nvrtc_library, text_of
from quant.backends.cuda_packed import SOURCE, Cuda3Bit
from quant.backends.kernel_classes import BACKENDS, usable_backend
from quant.backends.portable import Torch3Bit
from tests.cuda_emulation import needs_nvrtc

TARGETS = (
    [((6, 0), bits, 0) for bits in (3, 4, 8)]
    + [((6, 1), 3, 0), ((7, 0), 8, 0), ((7, 5), 4, 0), ((8, 0), 3, 1), ((8, 6), 8, 0)]
    + [((9, 0), 3, 0), ((9, 0), 4, 1), ((9, 0), 8, 1)]
)
"""Capability, bits, bfloat16: every capability we name, and everything at the first and the last.

Each takes about a third of a second."""


@needs_nvrtc
@pytest.mark.parametrize(("capability", "bits", "bfloat16"), TARGETS)
def test_compiles_to_machine_code(capability: tuple[int, int], bits: int, bfloat16: int) -> None:
    image = compile_cuda(text_of(SOURCE), capability, {"BITS": bits, "BFLOAT16": bfloat16})
    assert image.startswith(b"\x7fELF")
    for name in (b"one_token", b"four_tokens", b"eight_tokens", b"restore"):
        assert b".text." + name in image


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
    with pytest.raises(CudaError, match='"BITS is 3, 4 or 8"'):
        compile_cuda(text_of(SOURCE), (7, 0), {"BITS": 5, "BFLOAT16": 0})


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
