from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.devices import Sent, moved_blocks, on_device, on_host, row_blocks, staged_blocks

CPU = torch.device("cpu")


class LateLane:
    """Copies at the last moment that a stream may: when somebody waits for the copy."""

    def __init__(self) -> None:
        self.buffers = 0
        self.unfinished: list[Sent] = []

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        self.buffers += 1
        return torch.empty(elements, dtype=dtype)

    def send(self, host: torch.Tensor) -> Sent:
        sent = Sent(torch.full_like(host, 77), host)
        self.unfinished.append(sent)
        return sent

    def receive(self, sent: Sent) -> torch.Tensor:
        self.wait(sent)
        return sent.tensor

    def wait(self, sent: Sent) -> None:
        remaining = [each for each in self.unfinished if each is not sent]
        if len(remaining) < len(self.unfinished):
            sent.tensor.copy_(sent.done)
        self.unfinished = remaining


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 12])
@pytest.mark.parametrize("shape", [(5,), ()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_block_arrives_as_it_is_stored(
    rows: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = torch.randn(rows, *shape).to(dtype)
    blocks = [slice(i, min(i + 3, rows)) for i in range(0, rows, 3)]
    stream = LateLane()
    seen = []
    for block, part in staged_blocks(weight, blocks, stream):
        assert torch.equal(part, weight[block])
        assert part.dtype == dtype
        seen.append(block)
    assert seen == blocks
    assert stream.unfinished == []
    assert stream.buffers == min(2, len(blocks))


def test_the_next_copy_begins_before_a_block_is_used() -> None:
    weight = torch.randn(9, 4)
    stream = LateLane()
    waiting = [
        len(stream.unfinished)
        for _ in staged_blocks(weight, [slice(i, i + 3) for i in (0, 3, 6)], stream)
    ]
    assert waiting == [1, 1, 0]


def test_stopping_early_waits_for_what_is_on_its_way() -> None:
    stream = LateLane()
    moving = staged_blocks(torch.randn(9, 4), [slice(i, i + 3) for i in (0, 3, 6)], stream)
    next(moving)
    moving.close()
    assert stream.unfinished == []


def test_on_the_host_blocks_are_views() -> None:
    weight = torch.randn(700, 1024)
    for block, part in moved_blocks(weight, row_blocks(700, 1024, CPU), CPU):
        assert part.data_ptr() == weight[block].data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_blocks_on_a_gpu() -> None:
    device = torch.device("cuda")
    weight = torch.randn(4096, 300)
    blocks = [slice(i, i + 256) for i in range(0, 4096, 256)]
    arrived = [part * 1 for _, part in moved_blocks(weight, blocks, device)]
    assert torch.equal(torch.cat(arrived).cpu(), weight)


class OnGpu(Tensor):
    """A tensor of the host that is said to be on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


ARRAYS = (
    np.arange(7, dtype=np.int32),
    np.arange(6.0).reshape(2, 3).T,
    np.zeros((0, 2), dtype=np.int64),
    np.array([True, False, True]),
    np.arange(5, dtype=np.float32),
)


def test_arrays_go_to_a_device_by_one_copy_and_come_back_by_one() -> None:
    into = torch.full((400,), 255, dtype=torch.uint8)
    found = on_device(torch.device("cpu"), *ARRAYS, into=into)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in found)
    memory = into.untyped_storage().data_ptr()
    assert all(tensor.untyped_storage().data_ptr() == memory for tensor in found)
    for array, wanted in zip(
        on_host(*(tensor.as_subclass(OnGpu) for tensor in found)), ARRAYS, strict=True
    ):
        np.testing.assert_array_equal(array, wanted, strict=True)
