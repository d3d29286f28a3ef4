"""Hidden states from GPU to GPU beside messages, over a pretend NCCL."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.messages import MicroBatch, Sampled
from actors.transport import nccl
from actors.transport.message_format import Codec, decode, encode, message_bytes
from actors.transport.message_limits import Limits
from actors.transport.nccl import Communicator, GpuLink, broadcast_from, gpu_name, nccl_group
from actors.transport.nccl_links import NcclLinks
from actors.transport.pipelines import relay
from quant.common.errors import DeviceError, StageLostError
from tests.actors.batches import batch_in_ranges
from tests.actors.linking import CPU, GPU, meet_on_gpus
from tests.actors.pretend_nccl import WAIT_S, PretendGpus, PretendNccl, Wire

WIDTH = 6


def a_batch(tokens: int = 3) -> MicroBatch:
    return batch_in_ranges([5, 2], [0, 4], [tokens, tokens], (), 16)


def linked(links: list[NcclLinks]) -> list[bool]:
    """Whether each stage sends to the next one from GPU to GPU; both of them say so."""
    found = [link.gpu_link(link.index + 1) is not None for link in links[:-1]]
    assert found == [link.gpu_link(link.index - 1) is not None for link in links[1:]]
    assert links[0].gpu_link(len(links) - 1) is None or len(links) == 2, "tokens go over gloo"
    return found


def gpu_links(links: list[NcclLinks]) -> tuple[GpuLink, GpuLink]:
    here, there = links[0].gpu_link(1), links[1].gpu_link(0)
    assert here is not None
    assert there is not None
    return here, there


@pytest.mark.parametrize(
    ("devices", "hosts", "expected"),
    [
        ((GPU, GPU), (), [True]),
        ((GPU, GPU, GPU, GPU), (), [True, True, True]),
        ((GPU, CPU, GPU, GPU), (), [False, False, True]),
        ((GPU, GPU, GPU), ("127.0.0.1", "127.0.0.1", "127.0.0.2"), [True, False]),
    ],
)
def test_neighbours_on_one_node_with_a_gpu_each_are_linked(
    devices: tuple[str, ...], hosts: tuple[str, ...], expected: list[bool], gpus: PretendGpus
) -> None:
    assert linked(meet_on_gpus(devices, hosts)) == expected
    assert len(gpus.groups) == 2 * sum(expected)


@pytest.mark.usefixtures("gpus")
def test_who_wants_gloo_has_gloo_alone() -> None:
    assert linked(meet_on_gpus((GPU, GPU), nccl=False)) == [False]


def test_two_stages_on_one_gpu_go_by_gloo_without_a_word(gpus: PretendGpus) -> None:
    gpus.names = repeat("the same GPU")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert linked(meet_on_gpus((GPU, GPU))) == [False]


def test_a_torch_without_nccl_has_no_gpu_for_it() -> None:
    if nccl.has_nccl():
        pytest.skip("this torch has NCCL")
    assert gpu_name(torch.device("cuda", 0)) == gpu_name(torch.device("cpu")) == ""
    with pytest.raises(DeviceError, match="no NCCL"):
        nccl_group(None, 0, 2, torch.device("cuda", 0), nccl.timedelta(seconds=1))


class CannotConnect(PretendNccl):
    def _begin(self, what: object, tensors: list[Tensor]) -> Any:
        raise RuntimeError("unhandled system error, NCCL version 2.27")


class BringsOtherNumbers(PretendNccl):
    def _begin(self, what: object, tensors: list[Tensor]) -> Any:
        work = super()._begin(what, tensors)
        work.wait()
        tensors[0][7] += 1
        return work


class Hangs(PretendNccl):
    def __init__(self, wire: Wire, rank: int) -> None:
        super().__init__(Wire(2), rank)


@pytest.mark.parametrize(
    ("kind", "rank", "said"),
    [
        (CannotConnect, 0, "unhandled system error"),
        (CannotConnect, 1, "unhandled system error"),
        (BringsOtherNumbers, 1, "NCCL did not bring what was sent"),
        (Hangs, 0, "NCCL did not connect within 0.1 s"),
    ],
)
def test_where_nccl_does_not_work_both_stages_go_by_gloo_with_one_warning(
    kind: Any, rank: int, said: str, gpus: PretendGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.transport.nccl_links.CONNECT_S", 0.1)
    gpus.changed = lambda group: kind(group.wire, group.rank) if group.rank == rank else group
    with pytest.warns(RuntimeWarning) as found:
        links = meet_on_gpus((GPU, GPU))
    assert linked(links) == [False]
    (warning,) = found
    assert "NCCL does not link the GPUs of stages 0 and 1: " in str(warning.message)
    assert said in str(warning.message)
    links[0].sender(1).send(encode(a_batch(), torch.ones(6, WIDTH)))
    assert isinstance(decode(links[1].receiver(0, WAIT_S).receive()), tuple)


def test_stages_that_do_not_share_files_go_by_gloo(
    gpus: PretendGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    with pytest.warns(RuntimeWarning, match="the stages do not share files"):
        assert linked(meet_on_gpus((GPU, GPU))) == [False]
    assert not gpus.groups


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_hidden_states_arrive_beside_their_messages_in_order(dtype: torch.dtype) -> None:
    """The sender is ahead; each tensor is that of its message, and no message has one."""
    links = meet_on_gpus((GPU, GPU))
    here, there = gpu_links(links)
    sender, receiver = links[0].sender(1), links[1].receiver(0, WAIT_S)
    given = [torch.randn(2 * tokens, 4 * WIDTH).to(dtype)[:, ::4] for tokens in (1, 5, 9, 3)]

    def send() -> None:
        for hidden in given:
            message = encode(a_batch(len(hidden) // 2), hidden, here)
            assert len(message) == message_bytes(message) < 512
            sender.send(message)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        for hidden in given:
            found = decode(receiver.receive(), link=there)
            assert not isinstance(found, Sampled)
            assert found[0].counts.tolist() == [len(hidden) // 2] * 2
            assert found[1].dtype == dtype
            assert torch.equal(found[1], hidden)
        sending.result()


@pytest.mark.usefixtures("gpus")
def test_one_transfer_leaves_at_a_time() -> None:
    """The second one waits for the first, and ends where that is aborted."""
    here, there = gpu_links(meet_on_gpus((GPU, GPU)))
    with ThreadPoolExecutor(1) as pool:
        here.send(torch.ones(2, 2))
        second = pool.submit(here.send, torch.zeros(2, 2))
        with pytest.raises(TimeoutError):
            second.result(0.05)
        assert there.receive(2, 2, torch.float32).sum() == 4
        second.result(WAIT_S)
        third = pool.submit(here.send, torch.zeros(2, 2))
        here.abort()
        with pytest.raises(StageLostError, match="it has left"):
            third.result(WAIT_S)


@pytest.mark.usefixtures("gpus")
def test_tokens_go_in_the_message_also_where_there_is_a_gpu_link() -> None:
    here, there = gpu_links(meet_on_gpus((GPU, GPU)))
    sampled = Sampled(np.array([5, 7]), (None, "stop"))
    found = decode(encode(a_batch(), sampled, here), link=there)
    assert isinstance(found, Sampled)
    assert found.token_ids.tolist() == [5, 7]


@dataclass
class Untouched:
    """A link that takes no memory."""

    sent: list[Tensor] = field(default_factory=list)

    def send(self, hidden: Tensor) -> None:
        self.sent.append(hidden)


@pytest.mark.parametrize("limited", [{"rows": 5}, {"columns": 5}, {"requests": 1}])
def test_what_goes_beyond_the_plan_is_refused_before_memory_is_taken(
    limited: dict[str, int],
) -> None:
    link: Any = Untouched()
    message = encode(a_batch(), torch.ones(6, WIDTH), link)
    assert len(link.sent) == 1
    limits = Limits(requests=2, rows=6, columns=6, slots=8, max_tokens=16, kv_tokens=128)
    with pytest.raises(StageLostError, match="were planned"):
        decode(message, replace(limits, **limited), link)
    with pytest.raises(StageLostError, match="over a link that there is not"):
        decode(message, limits)


class Echo:
    def compute(self, batch: MicroBatch, inputs: Tensor) -> Tensor:
        return inputs + 1

    def finish(self, batch: MicroBatch, last_hidden: Tensor) -> Sampled:
        raise AssertionError("the first stage has no head")

    def sent(self) -> None: ...


@pytest.mark.parametrize("stops_itself", [True, False])
def test_what_a_lost_stage_did_not_send_is_not_computed_with(
    stops_itself: bool, gpus: PretendGpus
) -> None:
    """Its message has come, its hidden states have not: the driver stops the stage that waits."""
    links = meet_on_gpus((GPU, GPU, GPU))
    link: Any = Untouched()
    message = encode(a_batch(), torch.ones(6, WIDTH), link)
    before, onward = links[1].gpu_link(0), links[1].gpu_link(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(relay, Echo(), message, Codec(), before, onward)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        (links[1].stop if stops_itself else links[1].close)()
        with pytest.raises(StageLostError, match=r"stage 0 cannot be reached.*: it has left"):
            waiting.result(WAIT_S)
    for stage, other in ((1, 0), (1, 2)):
        ended = links[stage].gpu_link(other)
        assert ended is not None
        with pytest.raises(StageLostError, match=f"stage {other} cannot be reached"):
            ended.send(torch.ones(2, 2))
    assert sum(group.aborted for group in gpus.groups) == 2, "of the stage that was stopped"


def test_stages_that_link_again_have_new_communicators(gpus: PretendGpus) -> None:
    """What was sent and never received is nothing to them."""
    first = meet_on_gpus((GPU, GPU))
    gpu_links(first)[0].send(torch.full((2, 2), 7.0))
    folders = [meeting.folder for each in first for meeting in each._meetings]
    assert all(folder.is_dir() for folder in folders)
    for each in first:
        each.close()
    assert all(group.aborted for group in gpus.groups)
    assert not any(folder.exists() for folder in folders)
    here, there = gpu_links(meet_on_gpus((GPU, GPU)))
    here.send(torch.full((2, 2), 8.0))
    assert there.receive(2, 2, torch.float32).tolist() == [[8.0] * 2] * 2


def test_calls_in_another_order_hang_until_they_are_aborted() -> None:
    """So does NCCL, and so the pretend one tells whether both sides keep the order."""
    wire = Wire(2)
    here, there = (Communicator(PretendNccl(wire, rank), StageLostError) for rank in (0, 1))
    here.begin(lambda group: group.broadcast([torch.ones(2)], broadcast_from(0)))
    with pytest.raises(DeviceError, match=r"NCCL did not connect within 0.05 s"):
        there.complete(lambda group: group.broadcast([torch.ones(3)], broadcast_from(0)), 0.05)
    there.abort()
    with pytest.raises(StageLostError, match="it has left"):
        there.check()


@dataclass
class Streams:
    """The streams of a GPU: what is done in which one, and which waits for which."""

    done: list[str] = field(default_factory=list)
    current: str = "layers"

    def Stream(self) -> Stream:  # noqa: N802  (as torch calls it)
        return Stream(self, "own")

    def current_stream(self) -> Stream:
        return Stream(self, self.current)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


@dataclass
class Stream:
    streams: Streams
    name: str

    def wait_stream(self, other: Stream) -> None:
        self.streams.done.append(f"{self.name} waits for {other.name}")


class OnGpu(Tensor):
    """A tensor whose memory the caching allocator has."""

    streams: Streams
    is_cuda = True  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        self.streams.done.append(f"memory is used in {stream.name}")


class Noting(PretendNccl):
    streams: Streams

    def _begin(self, what: object, tensors: list[Tensor]) -> Any:
        work = super()._begin(what, tensors)
        self.streams.done.append(f"moved in {self.streams.current}")
        return work


def test_transfers_and_layers_wait_for_each_other_by_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, wire = Streams(), Wire(2)
    OnGpu.streams = Noting.streams = streams
    monkeypatch.setattr(nccl.torch, "get_device_module", lambda device: streams)
    here, there = (
        GpuLink(Noting(wire, rank), rank, torch.device("cpu"), StageLostError) for rank in (0, 1)
    )
    monkeypatch.setattr(
        nccl.torch, "empty", lambda *shape, **kinds: torch.zeros(shape).as_subclass(OnGpu)
    )
    here.send(torch.ones(2, 3).as_subclass(OnGpu))
    moved = ["own waits for layers", "moved in own", "memory is used in own"]
    assert streams.done == moved
    assert there.receive(2, 3, torch.float32).tolist() == [[1.0] * 3] * 2
    assert streams.done == [*moved, *moved, "layers waits for own"]


def test_links_that_were_made_end_where_a_neighbour_is_lost_meanwhile(
    gpus: PretendGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three stages the last one cannot be heard."""
    exchange = NcclLinks._exchange

    def heard(links: NcclLinks, other: int, words: str) -> str:
        if 2 in (links.index, other):
            raise StageLostError("its process died")
        return exchange(links, other, words)

    monkeypatch.setattr(NcclLinks, "_exchange", heard)
    with pytest.raises(StageLostError):
        meet_on_gpus((GPU, GPU, GPU))
    assert [(group.rank, group.aborted) for group in sorted(gpus.groups, key=rank_of)] == [
        (0, False),
        (1, True),
    ]


def rank_of(group: PretendNccl) -> int:
    return group.rank
