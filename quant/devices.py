"""The device that a process takes, and weights on their way to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quant.common.errors import DeviceError
from quant.scheme import Processor

ALIGNMENT = 16
"""Bytes at which tensors begin that come by one copy: kernels load as many at once."""


def take_device(kind: str) -> torch.device:
    """Take cpu or the first cuda GPU, without cuDNN's attention, which torch puts first on 9.0 and
    which makes a plan for every length anew: at every decode step.
    """
    if kind != "cuda":
        return torch.device(kind)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", 0)


def local_processor(device: torch.device) -> Processor:
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


def emulates(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of a 16-bit type there are far slower than those of float32: of float16 on
    CPUs, and of bfloat16 on those for which oneDNN has none (x86 without AVX-512).
    """
    if device.type != "cpu" or dtype == torch.float32:
        return False
    return dtype == torch.float16 or not _multiplies_bfloat16()


@cache
def _multiplies_bfloat16() -> bool:
    known = torch.backends.mkldnn.is_available()
    return known and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


WIDE_ROWS = 96
"""Rows of inputs from which it pays to restore weights as float32 where products of that are the
faster ones; 0.97 of the time of bfloat16 at 64 rows, 0.87 at 96, 0.67 at 512 (an Intel Xeon with
AVX-512 BF16, 1024 to 2304 columns)."""

_TRIED_ROWS, _TRIES, _LEAST_GAIN = 512, 5, 1.25


def prefers_float32(dtype: torch.dtype, device: torch.device, rows: int) -> bool:
    """Whether products of `rows` inputs of a 16-bit type there are sooner done in float32."""
    if emulates(dtype, device):
        return True
    is_many = device.type == "cpu" and dtype == torch.bfloat16 and rows >= WIDE_ROWS
    return is_many and _multiplies_float32_faster()


@cache
def _multiplies_float32_faster() -> bool:
    """Whether large products of float32 take far less time than those of bfloat16 on this CPU: on
    Intel's without tiles (AMX), whose instruction for pairs of bfloat16 does half as many
    operations a cycle. Tried once by each process.
    """
    pairs = [
        torch.ones(_TRIED_ROWS, _TRIED_ROWS, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    took: list[list[float]] = [[], []]
    for _ in range(1 + _TRIES):  # the first one prepares
        for numbers, seconds in zip(pairs, took, strict=True):
            began = perf_counter()
            torch.mm(numbers, numbers)
            seconds.append(perf_counter() - began)
    wide, narrow = (min(seconds[1:]) for seconds in took)
    return wide * _LEAST_GAIN < narrow


_BUFFERS = 2


@dataclass(frozen=True)
class Sent:
    tensor: torch.Tensor
    done: Any


class CudaCopyStream:
    """Copies on a stream of their own of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=True)

    def send(self, host: torch.Tensor) -> Sent:
        # The memory belongs to the stream that computes, where work on its last user may be queued.
        # That stream waits for the copy in `receive`, so the allocator need not know this one.
        tensor = torch.empty_like(host, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(host, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return Sent(tensor, done)

    def receive(self, sent: Sent) -> torch.Tensor:
        """Give the copied tensor, for work that is queued from now on."""
        torch.cuda.current_stream(self._device).wait_event(sent.done)
        return sent.tensor

    def wait(self, sent: Sent) -> None:
        sent.done.synchronize()


def moved_blocks(
    weight: torch.Tensor, blocks: Iterable[slice], device: torch.device
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield ranges of rows with these rows on `device`, of unchanged type; views on the host."""
    if device.type == "cuda" and weight.device.type == "cpu":
        yield from staged_blocks(weight, list(blocks), CudaCopyStream(device))
        return
    for block in blocks:
        yield block, weight[block].to(device)


def staged_blocks(
    weight: torch.Tensor, blocks: Sequence[slice], stream: CudaCopyStream
) -> Iterator[tuple[slice, torch.Tensor]]:
    """As `moved_blocks`, through two buffers of pinned memory, as copies from ordinary memory block
    the host until they are done: while the GPU quantizes one block, the next is copied, and the
    host reads the one after that from its file.
    """
    elements = max((weight[block].numel() for block in blocks), default=0)
    buffers = [stream.buffer(elements, weight.dtype) for _ in blocks[:_BUFFERS]]
    sent: deque[Sent] = deque(maxlen=_BUFFERS)
    try:
        for number, block in enumerate(blocks):
            if number >= _BUFFERS:
                stream.wait(sent[0])
            rows = weight[block]
            host = buffers[number % _BUFFERS][: rows.numel()].view(rows.shape)
            sent.append(stream.send(host.copy_(rows)))
            if number:
                yield blocks[number - 1], stream.receive(sent[0])
        if sent:
            yield blocks[-1], stream.receive(sent[-1])
    finally:  # the memory must not be reused while it is written
        for each in sent:
            stream.wait(each)


def on_device(
    device: torch.device, *arrays: npt.NDArray[Any], into: Tensor | None = None
) -> list[Tensor]:
    """`arrays` as tensors on `device`, to a GPU by one copy that the host does not wait for: to the
    beginning of `into`, bytes on the device, where that is given.
    """
    held = [np.ascontiguousarray(array) for array in arrays]
    if device.type == "cpu" and into is None:
        return [torch.from_numpy(array) for array in held]
    room = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in held]
    host = torch.empty(sum(room), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, place in zip(held, host.split(room), strict=True):
        place.numpy()[: array.nbytes] = array.reshape(-1).view(np.uint8)
    there = torch.empty_like(host, device=device) if into is None else into[: len(host)]
    there.copy_(host, non_blocking=True)
    return [
        place[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, place in zip(held, there.split(room), strict=True)
    ]


def on_host(*tensors: Tensor) -> list[npt.NDArray[Any]]:
    """`tensors` as arrays, from a GPU by one copy, the only one that the host waits for."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    parts = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    copies = parts.cpu().split([tensor.nbytes for tensor in tensors])
    return [
        copy.clone().view(tensor.dtype).view(tensor.shape).numpy()
        for copy, tensor in zip(copies, tensors, strict=True)
    ]


_BLOCK_WEIGHTS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Weights worked on at once: 2 MB of float32 stays in a CPU core's cache (16 MB took 1.6 times as
long on an AVX-512 core, decoding 512 KB at once 1.3 times), 64 MB keeps a GPU busy."""


def row_blocks(rows: int, columns: int, device: torch.device, multiple: int = 1) -> Iterator[slice]:
    yield from ranges(rows, max(1, rows_at_once(columns, device) // multiple) * multiple)


def rows_at_once(columns: int, device: torch.device) -> int:
    return max(1, _BLOCK_WEIGHTS.get(device.type, _BLOCK_WEIGHTS["cuda"]) // max(1, columns))


def ranges(size: int, step: int) -> Iterator[slice]:
    for first in range(0, size, step):
        yield slice(first, min(first + step, size))
