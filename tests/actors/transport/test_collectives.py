"""Groups of ranks: over gloo as processes have them, and as threads of tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.transport.collectives import ALONE, DistributedGroup, Meeting, RankGroup, Seat
from quant.common.errors import DeviceError, StageLostError
from tests.actors.pretend_nccl import PretendGpus
from tests.actors.thread_ranks import thread_groups

CPU = torch.device("cpu")
DEGREE = 3
WIDTHS = (4, 2, 3)


def over_gloo(degree: int, timeout_s: float = 120.0) -> list[RankGroup]:
    store = torch.distributed.HashStore()
    seats = [Seat(rank, degree, CPU, timeout_s=timeout_s) for rank in range(degree)]
    with ThreadPoolExecutor(degree) as pool:
        return list(pool.map(lambda seat: DistributedGroup(seat, store), seats))


def as_threads(degree: int) -> list[RankGroup]:
    return list(thread_groups(degree))


@pytest.fixture(params=[over_gloo, as_threads])
def groups(request: Any) -> list[RankGroup]:
    found: list[RankGroup] = request.param(DEGREE)
    return found


def together(groups: Sequence[RankGroup], work: Callable[[RankGroup], Any]) -> list[Any]:
    """What `work` returns on each rank, all at once."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


def part(group: RankGroup, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(group.rank)
    return torch.randn(5, WIDTHS[group.rank], generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_taken_in_float32_and_are_the_same_everywhere(
    groups: list[RankGroup], dtype: torch.dtype
) -> None:
    given = [torch.randn(2, 7).to(dtype) for _ in groups]
    found = together(groups, lambda group: group.all_reduce(given[group.rank].clone()))
    expected = torch.stack([each.double() for each in given]).sum(0)
    assert all(torch.equal(each, found[0]) for each in found)
    assert found[0].dtype == dtype
    spacing = torch.finfo(dtype).eps
    assert torch.allclose(found[0].double(), expected, rtol=spacing, atol=4e-7)


@pytest.mark.parametrize("given", [torch.arange(5), torch.randn(2, 3).bfloat16(), torch.ones(0, 4)])
def test_the_tensor_of_rank_0_comes_to_all(groups: list[RankGroup], given: Tensor) -> None:
    def own(group: RankGroup) -> Tensor:
        return group.broadcast(given.clone() if group.rank == 0 else torch.zeros_like(given))

    assert all(torch.equal(each, given) for each in together(groups, own))


@pytest.mark.parametrize("data", [b"", b"order", bytes(range(256)) * 999])
def test_the_bytes_of_rank_0_come_to_all(groups: list[RankGroup], data: bytes) -> None:
    found = together(groups, lambda group: group.broadcast_bytes(data if not group.rank else None))
    assert found == [data] * DEGREE


def test_parts_of_unequal_widths_lie_side_by_side_on_rank_0(groups: list[RankGroup]) -> None:
    found = together(groups, lambda group: group.gather(part(group), WIDTHS))
    assert torch.equal(found[0], torch.cat([part(group) for group in groups], -1))
    assert found[1:] == [None, None]


def test_a_rank_that_is_gone_is_noticed() -> None:
    first, second = over_gloo(2)
    del second
    with pytest.raises(StageLostError, match="rank 0 of 2 lost another one"):
        first.all_reduce(torch.zeros(3))


def test_the_next_order_may_come_late_but_not_the_end_of_rank_0() -> None:
    first, second = over_gloo(2, timeout_s=1.0)
    with ThreadPoolExecutor(1) as pool:
        order = pool.submit(second.broadcast_bytes, None)
        with pytest.raises(TimeoutError):
            order.result(1.5)
        assert first.broadcast_bytes(b"late") == order.result(120) == b"late"
        order = pool.submit(second.broadcast_bytes, None)
        del first
        with pytest.raises(StageLostError, match="rank 1 of 2 lost another one"):
            order.result(120)


def test_who_does_not_know_the_secret_is_no_rank() -> None:
    store = torch.distributed.HashStore()
    seats = [Seat(0, 2, CPU, secret=b"one"), Seat(1, 2, CPU, secret=b"another")]
    with ThreadPoolExecutor(2) as pool:
        for meeting in [pool.submit(DistributedGroup, seat, store) for seat in seats]:
            with pytest.raises(DeviceError, match=r"did not meet.*not the one that was invited"):
                meeting.result(120)


def test_ranks_meet_in_a_folder_that_only_this_user_reads() -> None:
    meeting = Meeting.on_this_node()
    assert meeting.folder.stat().st_mode & 0o077 == 0
    assert repr(meeting.secret) not in repr(meeting)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: meeting.join(rank, 2, CPU), range(2)))
    meeting.end()
    assert not meeting.folder.exists()
    assert together(groups, lambda group: group.all_reduce(torch.ones(2)))[0].tolist() == [2, 2]


def test_a_rank_that_leaves_is_noticed_by_all_as_they_leave(groups: list[RankGroup]) -> None:
    first, *others = groups

    def notice(group: RankGroup) -> None:
        with pytest.raises(StageLostError):
            group.all_reduce(torch.ones(1))
        group.close()

    first.close()
    together(others, notice)


def test_a_rank_on_a_gpu_that_leaves_ends_what_the_others_wait_for(gpus: PretendGpus) -> None:
    """The device `meta` stands for a GPU."""
    meeting, device = Meeting.on_this_node(), torch.device("meta")
    with ThreadPoolExecutor(DEGREE) as pool:
        groups = list(pool.map(lambda rank: meeting.join(rank, DEGREE, device), range(DEGREE)))
        together(groups, lambda group: group.all_reduce(torch.ones(1, device=device)))
        together(groups, lambda group: group.check())
        first, *others = groups
        first.close()
        assert not meeting.folder.exists()
        for group in others:
            assert pool.submit(gone, group).result(10), "its kernels would wait for ever"
            with pytest.raises(StageLostError, match="lost another one: it has left"):
                group.all_reduce(torch.ones(1, device=device))
            group.close()
    assert all(each.aborted for each in gpus.groups)


def gone(group: DistributedGroup) -> bool:
    """Whether what `group` waits for without the first rank ends, and is told of."""
    with suppress(StageLostError):
        group.all_reduce(torch.ones(1, device="meta"))
    with pytest.raises(StageLostError, match="lost another one: it has left"):
        group.check()
    return True


def test_ranks_that_do_not_come_are_an_error() -> None:
    with pytest.raises(DeviceError, match=r"rank 0 of 2 on 127.0.0.1 did not meet.* 0.2 s"):
        DistributedGroup(Seat(0, 2, CPU, timeout_s=0.2), torch.distributed.HashStore())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_goes_on_while_a_gpu_sums() -> None:
    device = torch.device("cuda:0")
    group = DistributedGroup(Seat(0, 1, device), torch.distributed.HashStore())
    before = torch.ones(8192, 8192, device=device)
    for _ in range(100):  # 110 TFLOP, which the sum comes after
        before @ before
    total = group.all_reduce(torch.ones(2, device=device))
    assert not torch.cuda.current_stream(device).query()
    assert total.tolist() == [1, 1]
    group.close()


def test_one_rank_alone_has_what_it_gives() -> None:
    given = torch.randn(2, 3)
    assert torch.equal(ALONE.all_reduce(given.clone()), given)
    assert torch.equal(ALONE.broadcast(given), given)
    assert ALONE.broadcast_bytes(b"a") == b"a"
    assert ALONE.gather(given, [3]) is given
