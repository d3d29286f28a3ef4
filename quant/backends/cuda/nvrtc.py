"""Compiling CUDA source to machine code with NVRTC, NVIDIA's compiler as a library.

Called through its C interface, which is public and stable, because the library is there already:
every CUDA build of torch brings the NVRTC of its own CUDA version, and with it the GPUs that this
build serves. A package for it (CuPy, cuda-python) would be one more to keep at that version on
every worker, and `torch.cuda._compile_kernel` is private, absent before torch 2.8, and looks for
headers and flags that these sources do not need.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch

_ANY_MAJOR = (12, 13)
"""CUDA versions that are tried where torch has none: compiling needs no GPU."""


class CudaError(RuntimeError):
    """An error of NVRTC or the CUDA driver, or one of them is missing; self-tests fail with it."""


def compile_cuda(source: str, capability: tuple[int, int], definitions: dict[str, int]) -> bytes:
    """Compile `source` to machine code for a compute capability, with preprocessor `definitions`.

    GPUs newer than NVRTC get PTX, which their driver translates. CudaError with the compiler's own
    messages where the source cannot be compiled, and for GPUs that it no longer supports.
    """
    nvrtc = nvrtc_library()
    target, kind = _target(nvrtc, capability)
    options = [f"--gpu-architecture={target}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in definitions.items()]
    encoded = [option.encode() for option in options]
    program = ctypes.c_void_p()
    text = source.encode()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, None, 0, None, None))
    try:
        array = (ctypes.c_char_p * len(encoded))(*encoded)
        if nvrtc.nvrtcCompileProgram(program, len(encoded), array) != 0:
            log = _output(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            raise CudaError(f"NVRTC cannot compile for {target}: {log}")
        return _output(nvrtc, kind, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def nvrtc_library() -> ctypes.CDLL:
    """Load the NVRTC of torch's CUDA version: from its package, else where the system finds it."""
    version = torch.version.cuda
    majors = (int(version.split(".")[0]),) if version else _ANY_MAJOR
    for path in _candidates(majors):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CudaError(
        f"libnvrtc of CUDA {' or '.join(map(str, majors))} is not found; torch's CUDA wheels bring "
        "it in package nvidia-cuda-nvrtc (for CUDA 12: nvidia-cuda-nvrtc-cu12)"
    )


def _candidates(majors: tuple[int, ...]) -> Iterator[str]:
    """Paths in NVIDIA's packages (`nvidia/cuda_nvrtc/lib`, `nvidia/cu13/lib`), then bare names."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for major in majors:
        for folder in folders:
            yield from map(str, sorted(Path(folder).glob(f"*/lib/libnvrtc.so.{major}")))
    for major in majors:
        yield f"libnvrtc.so.{major}"


def _target(nvrtc: ctypes.CDLL, capability: tuple[int, int]) -> tuple[str, str]:
    """The architecture to compile for, and what NVRTC calls its output."""
    count = ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    known = (ctypes.c_int * count.value)()
    _check(nvrtc, nvrtc.nvrtcGetSupportedArchs(known))
    wanted = 10 * capability[0] + capability[1]
    if wanted in known:
        return f"sm_{wanted}", "CUBIN"
    older = [architecture for architecture in known if architecture < wanted]
    if not older:
        raise CudaError(
            f"this NVRTC starts at compute capability {min(known) / 10}, the GPU has "
            f"{wanted / 10}; install torch's CUDA 12.6 wheels (constraints-cuda126.txt)"
        )
    return f"compute_{max(older)}", "PTX"


def _output(nvrtc: ctypes.CDLL, kind: str, program: ctypes.c_void_p) -> bytes:
    """Get one of NVRTC's outputs; `kind` is CUBIN, PTX or ProgramLog."""
    size = ctypes.c_size_t()
    _check(nvrtc, nvrtc[f"nvrtcGet{kind}Size"](program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, nvrtc[f"nvrtcGet{kind}"](program, buffer))
    return buffer.raw


def _check(nvrtc: ctypes.CDLL, code: int) -> None:
    if code != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CudaError(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")
