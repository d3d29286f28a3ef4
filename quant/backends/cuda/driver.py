"""Loading machine code onto a GPU and launching its kernels, through the CUDA driver's API."""

from __future__ import annotations

import ctypes
import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from quant.backends.cuda.nvrtc import CudaError, compile_cuda

SOURCE = Path(__file__).with_name("kernels.cu")
KERNELS = ("one_token", "four_tokens", "eight_tokens", "restore")
THREADS = 128
"""Threads of a block, for which the source is written."""

_NO_CONTEXT = 201
"""Code of CUDA_ERROR_INVALID_CONTEXT: this thread has not used the GPU before."""


class Width(ctypes.Structure):
    """The struct `Width` of the source: octets and groups of a row, and log2 of a group's
    octets.
    """

    _fields_ = (
        ("octets", ctypes.c_uint),
        ("groups", ctypes.c_uint),
        ("group_shift", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Kernels:
    """The kernels of one bitwidth and activation type, loaded on `device`."""

    driver: ctypes.CDLL
    functions: dict[str, ctypes.c_void_p]
    device: torch.device

    @classmethod
    def load(cls, driver: ctypes.CDLL, image: bytes, device: torch.device) -> Kernels:
        """Load `image` into the context that is current."""
        module = ctypes.c_void_p()
        _check(driver, driver.cuModuleLoadData(ctypes.byref(module), image))
        functions = {}
        for name in KERNELS:
            function = ctypes.c_void_p()
            found = driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
            _check(driver, found)
            functions[name] = function
        return cls(driver, functions, device)

    def launch(self, name: str, blocks: int, *arguments: torch.Tensor | int | Width) -> None:
        """Queue a kernel on torch's current stream; tensors are passed by address.

        The tensors live on `device`; torch's allocator does not give their memory to another
        stream before the kernel has run.
        """
        values = [_as_parameter(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        with _current(self.device):
            code = self._launch(name, blocks, addresses)
            if code == _NO_CONTEXT:
                torch.cuda.synchronize(self.device)  # makes torch's context this thread's
                code = self._launch(name, blocks, addresses)
        _check(self.driver, code)

    def _launch(self, name: str, blocks: int, addresses: ctypes.Array[ctypes.c_void_p]) -> int:
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device).cuda_stream if on_gpu else None
        code: int = self.driver.cuLaunchKernel(
            self.functions[name], blocks, 1, 1, THREADS, 1, 1, 0, ctypes.c_void_p(stream),
            addresses, None,
        )  # fmt: skip
        return code


@functools.cache
def kernels_for(bits: int, dtype: torch.dtype, device: torch.device) -> Kernels:
    """The kernels for a GPU, compiled and loaded once per process; CudaError if that fails."""
    definitions = {"BITS": bits, "BFLOAT16": int(dtype == torch.bfloat16)}
    capability = torch.cuda.get_device_capability(device)
    image = compile_cuda(SOURCE.read_text(), capability, definitions)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"the CUDA driver cannot be loaded: {error}") from error
    with _current(device):
        torch.cuda.synchronize(device)  # makes torch's context this thread's
        return Kernels.load(driver, image, device)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """A context in which a GPU is torch's current one; tests may run the kernels on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _as_parameter(argument: torch.Tensor | int | Width) -> ctypes._CData:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return argument if isinstance(argument, Width) else ctypes.c_uint(argument)


def _check(driver: ctypes.CDLL, code: int) -> None:
    if code != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        meaning = text.value.decode() if text.value else "unknown"
        raise CudaError(f"CUDA driver error {code}: {meaning}")
