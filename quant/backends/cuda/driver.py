"""CUDA's driver and runtime compiler, by ctypes: compiling and launching kernels; recording them by
torch."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUMBERS = Path(__file__).with_name("numbers.cuh")
"""Stands before every source."""

THREADS = 128
"""Threads of a block, for which the sources are written."""

Source = Path | tuple[Path, ...]
"""A file of kernels, or several that are compiled as one."""

Argument = torch.Tensor | int | ctypes.Structure | None
"""A kernel's: a tensor's memory, a 32-bit number, a struct of the source, or a null pointer."""

_NO_CONTEXT = 201
"""Code of CUDA_ERROR_INVALID_CONTEXT: this thread has not used the GPU before."""


@dataclass(frozen=True)
class Kernels:
    driver: ctypes.CDLL
    functions: dict[str, ctypes.c_void_p]
    device: torch.device

    @classmethod
    def load(
        cls, driver: ctypes.CDLL, image: bytes, names: Iterable[str], device: torch.device
    ) -> Kernels:
        module = ctypes.c_void_p()
        _check(driver, driver.cuModuleLoadData(ctypes.byref(module), image))
        functions = {}
        for name in names:
            function = ctypes.c_void_p()
            found = driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
            _check(driver, found)
            functions[name] = function
        return cls(driver, functions, device)

    def launch(self, name: str, blocks: int, *arguments: Argument) -> None:
        """Queue a kernel on torch's current stream. The tensors live on `device`; the allocator
        gives their memory to no other stream before the kernel has run.
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
        code: int = self.driver.cuLaunchKernel(
            self.functions[name], blocks, 1, 1, THREADS, 1, 1, 0, ctypes.c_void_p(self.stream),
            addresses, None,
        )  # fmt: skip
        return code

    @property
    def stream(self) -> int:
        """Handle of torch's current stream."""
        if self.device.type != "cuda":
            return 0
        handle: int = torch.cuda.current_stream(self.device).cuda_stream
        return handle


@functools.cache
def kernels_for(
    source: Source,
    names: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device,
    **definitions: int,
) -> Kernels:
    """Compile `source` for activations of `dtype` and the GPU, once a process; CudaError says why
    that cannot be done here.
    """
    capability = torch.cuda.get_device_capability(device)
    definitions["BFLOAT16"] = int(dtype == torch.bfloat16)
    definitions["CAPABILITY"] = 10 * capability[0] + capability[1]
    image = compile_cuda(text_of(source), capability, definitions)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"the CUDA driver cannot be loaded: {error}") from error
    with _current(device):
        torch.cuda.synchronize(device)  # makes torch's context this thread's
        return Kernels.load(driver, image, names, device)


def text_of(source: Source) -> str:
    files = source if isinstance(source, tuple) else (source,)
    return "".join(file.read_text() for file in (NUMBERS, *files))


def _current(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _as_parameter(argument: Argument) -> ctypes._CData:
    if isinstance(argument, int):
        return ctypes.c_uint(argument)
    if isinstance(argument, ctypes.Structure):
        return argument
    return ctypes.c_void_p(None if argument is None else argument.data_ptr())


def _check(driver: ctypes.CDLL, code: int) -> None:
    if code != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        meaning = text.value.decode() if text.value else "unknown"
        raise CudaError(f"CUDA driver error {code}: {meaning}")


_ANY_MAJOR = (12, 13)
"""CUDA versions that are tried where torch has none: compiling needs no GPU."""


class CudaError(RuntimeError):
    """An error of NVRTC or the CUDA driver, or one of them is missing; self-tests fail with it."""


def compile_cuda(source: str, capability: tuple[int, int], definitions: dict[str, int]) -> bytes:
    """Compile with preprocessor `definitions`; GPUs newer than NVRTC get PTX. CudaError has the
    compiler's own messages, also for GPUs that it no longer supports.

    Every CUDA build of torch brings the NVRTC of its CUDA version, and with it the GPUs that this
    build serves. A package for it (CuPy, cuda-python) would be one more to keep at that version on
    every worker; `torch.cuda._compile_kernel` is private, absent before torch 2.8, and looks for
    headers and flags that the source does not need.
    """
    target, kind = _target(nvrtc_library(), capability)
    return _compiled(source, target, definitions, kind)


def assembler_log(source: str, capability: tuple[int, int], definitions: dict[str, int]) -> str:
    """What the assembler says of each kernel: registers, spills, shared memory; errors as above."""
    target, _ = _target(nvrtc_library(), capability)
    log = _compiled(source, target, definitions, "ProgramLog", "--ptxas-options=-v")
    return log.rstrip(b"\0").decode(errors="replace")


def _compiled(
    source: str, target: str, definitions: dict[str, int], kind: str, *more_options: str
) -> bytes:
    nvrtc = nvrtc_library()
    options = [f"--gpu-architecture={target}", "--std=c++17", *more_options]
    options += [f"-D{name}={value}" for name, value in definitions.items()]
    encoded = [option.encode() for option in options]
    program = ctypes.c_void_p()
    text = source.encode()
    _check_nvrtc(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, None, 0, None, None))
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
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for major in majors:
        for folder in folders:
            yield from map(str, sorted(Path(folder).glob(f"*/lib/libnvrtc.so.{major}")))
    for major in majors:
        yield f"libnvrtc.so.{major}"


def _target(nvrtc: ctypes.CDLL, capability: tuple[int, int]) -> tuple[str, str]:
    count = ctypes.c_int()
    _check_nvrtc(nvrtc, nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    known = (ctypes.c_int * count.value)()
    _check_nvrtc(nvrtc, nvrtc.nvrtcGetSupportedArchs(known))
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
    _check_nvrtc(nvrtc, nvrtc[f"nvrtcGet{kind}Size"](program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check_nvrtc(nvrtc, nvrtc[f"nvrtcGet{kind}"](program, buffer))
    return buffer.raw


def _check_nvrtc(nvrtc: ctypes.CDLL, code: int) -> None:
    if code != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CudaError(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")


Compute = Callable[[], Tensor]
Record = Callable[[Compute], Compute]
"""Gives a function that does again what the function it is given does, without its Python code: on
the same memory, with the numbers that it had when it was recorded."""

_WARM_UPS = 2
"""Passes before a recording, in which libraries take what they keep and kernels are chosen."""


@functools.cache
def cuda_recorder(device: torch.device) -> Record:
    """Records the CUDA graphs of a process, which share one pool of memory: none runs beside
    another, or reads what another has left.

    Without `torch.cuda.graph`, which first waits for the whole device, and so for what other stages
    have not taken yet.
    """
    pool: Any = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def record(compute: Compute) -> Compute:
        for _ in range(_WARM_UPS):
            compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # threads that send and receive may use the GPU meanwhile
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                result = compute()
                graph.capture_end()
            except BaseException:
                _end_broken(graph, device, pool)
                raise

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return record


def _end_broken(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """End a recording that has failed, also for torch's allocator, which otherwise may not notice,
    and then gives no cached memory back.
    """
    with suppress(RuntimeError):
        graph.capture_end()
    with suppress(AttributeError, RuntimeError):  # of another torch, or it has noticed
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
