"""Timing hops between two processes, and sums of a tensor-parallel group, as stages make them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from actors.messages import MicroBatch
from actors.processes.answers import get_answer, get_answers
from actors.processes.device import device_here, stage_environment
from actors.processes.placement import CRUMB, Placement
from actors.profiling.on_cluster import bare_errors
from actors.profiling.task import median_and_spread
from actors.transport.collectives import DistributedGroup, Meeting
from actors.transport.message_format import decode, encode
from actors.transport.nccl import GpuLink
from actors.transport.nccl_links import NcclLinks
from actors.transport.pipelines import BoardKeeper, RayMessage, RemoteBoard, from_ray
from actors.transport.rendezvous import CONTROL, Rendezvous
from planner.cluster.device import Place, Way
from planner.profiles.links import WAYS
from quant.common.errors import DeviceError

_PLACING_S = 60.0


@contextmanager
def started_together(kind: type, ends: Sequence[Placement], place: Place) -> Iterator[list[Any]]:
    """Actors of this `kind` with the devices of `ends`, on one node or each on another.

    Each is told whether its device is a GPU. They are gone when it ends. Needs an initialised Ray.
    Raises `DeviceError` where the cluster has no such place, or a process dies.
    """
    bundles = [_bundle(end) for end in ends]
    group = placement_group(bundles, "STRICT_PACK" if place == "node" else "STRICT_SPREAD")
    actors: list[Any] = []
    try:
        if not group.wait(_PLACING_S):
            where = "one node" if place == "node" else f"{len(ends)} nodes"
            raise DeviceError(f"Ray did not grant {bundles} on {where} within {_PLACING_S:g} s")
        with bare_errors():
            for index, end in enumerate(ends):
                strategy = PlacementGroupSchedulingStrategy(group, index)
                actors.append(_start(kind, end, strategy))
            yield actors
    except RayActorError as error:
        raise DeviceError(f"a process died while it was measured: {error}") from error
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _bundle(end: Placement) -> dict[str, float]:
    """The devices alone, as nodes of GPUs may offer no CPUs; else a crumb of one, as messages do
    not keep threads busy.
    """
    devices = {name: amount for name, amount in end.bundle.items() if name != "CPU"}
    return devices or {"CPU": CRUMB}


def _start(kind: type, end: Placement, strategy: PlacementGroupSchedulingStrategy) -> Any:
    make_remote: Any = ray.remote  # its annotations lack concurrency groups
    remote: Any = make_remote(concurrency_groups={CONTROL: 1})(kind).options(
        num_cpus=_bundle(end).get("CPU", 0.0),
        num_gpus=end.num_gpus,
        resources=dict(end.resources),
        runtime_env={"env_vars": stage_environment(end.threads)},
        scheduling_strategy=strategy,
    )
    return remote.remote(end.num_gpus > 0)


PAYLOADS_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
NCCL_PAYLOADS_BYTES = (*PAYLOADS_BYTES, 64 << 20)  # those before say little of a rate like NVLink's
_ROWS = 16
_WARM_UP = 5
_RENDEZVOUS_S = 30.0
_ANSWER_S = 60.0


@dataclass(frozen=True)
class MeasuredHop:
    """Median seconds of half a round trip; `spread` is the interquartile range over it."""

    way: Way
    payload_bytes: int
    seconds: float
    spread: float
    repetitions: int


class End(BoardKeeper):
    """One of two processes that send each other hidden states, on a GPU or none."""

    def __init__(self, on_gpu: bool) -> None:
        torch.set_num_threads(1)
        self._device = device_here("cuda" if on_gpu else "cpu")
        torch.zeros(1, device=self._device)  # from here on host memory is pinned for a GPU
        self._links: NcclLinks

    def host(self) -> str:
        return str(ray.util.get_node_ip_address())

    def connect(self, rendezvous: Rendezvous, index: int, first: Any) -> tuple[Way, ...]:
        """Link to the other end, which does the same now; the `first` one keeps the board. Returns
        the ways on which hidden states can go over the links.
        """
        board = RemoteBoard(first, rendezvous) if index else self.board(rendezvous.secret)
        self._links = NcclLinks(rendezvous, index, board, self._device)
        self._sender = self._links.sender(1 - index)
        self._receiver = self._links.receiver(1 - index, _ANSWER_S)
        return ("gloo",) if self._gpu_link("nccl") is None else ("nccl", "gloo")

    def _gpu_link(self, way: Way) -> GpuLink | None:
        return self._links.gpu_link(1 - self._links.index) if way == "nccl" else None

    def echo(self, message: RayMessage) -> RayMessage:
        """Move the hidden states that Ray brought to the device, and send them back from there."""
        returned: RayMessage = self._returned(from_ray(message)).numpy()
        return returned

    def serve(self, way: Way, turns: int) -> None:
        """Send back what the other end's `by_links` sends."""
        link = self._gpu_link(way)
        for _ in range((_WARM_UP + turns) * len(_payloads(way))):
            self._sender.send(self._returned(self._receiver.receive(), link))

    def _returned(self, message: Tensor, link: GpuLink | None = None) -> Tensor:
        batch, hidden = _hidden(message, link)
        return encode(batch, self._arrived(hidden), link)

    def by_ray(self, other: Any, turns: int) -> list[MeasuredHop]:
        """Time round trips of every payload by object references."""

        def trip(batch: MicroBatch, hidden: Tensor) -> None:
            answer = ray.get(other.echo.remote(encode(batch, hidden).numpy()))
            self._arrived(_hidden(from_ray(answer))[1])

        return self._timed("ray", trip, turns)

    def by_links(self, way: Way, turns: int) -> list[MeasuredHop]:
        """Time round trips of every payload over the links."""
        link = self._gpu_link(way)

        def trip(batch: MicroBatch, hidden: Tensor) -> None:
            self._sender.send(encode(batch, hidden, link))
            self._arrived(_hidden(self._receiver.receive(), link)[1])

        return self._timed(way, trip, turns)

    def by_copies(self, turns: int) -> list[MeasuredHop]:
        """Time copies of every payload to host memory that stays in place, and back."""
        on_gpu, device = self._device.type == "cuda", self._device

        def trip(size: int) -> Callable[[], float]:
            here = torch.zeros(size, dtype=torch.uint8, device=device)
            there = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)

            def copied_s() -> float:
                began = time.perf_counter()
                for target, source in ((there, here), (here, there)):
                    target.copy_(source, non_blocking=True)
                    _wait_for(device)
                return (time.perf_counter() - began) / 2

            return copied_s

        return _hops("copy", NCCL_PAYLOADS_BYTES, trip, turns)

    def _arrived(self, hidden: Tensor) -> Tensor:
        moved = hidden.to(self._device, non_blocking=True)
        _wait_for(self._device)
        return moved

    def _timed(
        self, way: Way, trip: Callable[[MicroBatch, Tensor], None], turns: int
    ) -> list[MeasuredHop]:
        slots = np.arange(_ROWS)
        batch = MicroBatch(slots, np.full(_ROWS, 9), np.ones_like(slots), slots * 10)

        def of_size(size: int) -> Callable[[], float]:
            hidden = torch.randn(_ROWS, size // 2 // _ROWS).half().to(self._device)

            def hop_s() -> float:
                began = time.perf_counter()
                trip(batch, hidden)
                return (time.perf_counter() - began) / 2

            return hop_s

        return _hops(way, _payloads(way), of_size, turns)


def _hops(
    way: Way, sizes: Sequence[int], trip: Callable[[int], Callable[[], float]], turns: int
) -> list[MeasuredHop]:
    found = _in_turns([trip(size) for size in sizes], turns)
    return [MeasuredHop(way, size, *own, turns) for size, own in zip(sizes, found, strict=True)]


def _in_turns(trips: Sequence[Callable[[], float]], turns: int) -> list[tuple[float, float]]:
    """Median and spread of the seconds of each, in turns, so that a slow moment of the machine
    falls on all of them.
    """
    seconds: list[list[float]] = [[] for _ in trips]
    for _ in range(_WARM_UP + turns):
        for own, trip in zip(seconds, trips, strict=True):
            own.append(trip())
    return [median_and_spread(own[_WARM_UP:]) for own in seconds]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _payloads(way: Way) -> tuple[int, ...]:
    return NCCL_PAYLOADS_BYTES if way == "nccl" else PAYLOADS_BYTES


def _hidden(message: Tensor, link: GpuLink | None = None) -> tuple[MicroBatch, Tensor]:
    decoded: Any = decode(message, link=link)
    batch, hidden = decoded
    return batch, hidden


def measure_hops(
    ends: Sequence[Placement], place: Place, turns: int = 60, ways: Sequence[Way] = WAYS
) -> tuple[MeasuredHop, ...]:
    """Time hops between two processes with the devices of `ends`, on one node or on two.

    Needs an initialised Ray. Where gloo does not connect, there are hops by Ray only, and by NCCL
    there are some between two GPUs that it connects. Raises `DeviceError` where the cluster has no
    such place.
    """
    if place == "network" and sum(node["Alive"] for node in ray.nodes()) < len(ends):
        raise DeviceError("the Ray cluster has one node only, and the cluster file several")
    found: list[MeasuredHop] = []
    with started_together(End, ends, place) as (first, second):
        for way in _linked(first, second, "nccl" in ways) if set(ways) - {"ray"} else ():
            if way in ways:
                serving = second.serve.remote(way, turns)
                found += get_answer(first.by_links.remote(way, turns))
                get_answer(serving)
        if "ray" in ways:
            found += get_answer(first.by_ray.remote(second, turns))
    return tuple(found)


def measure_copies(end: Placement, turns: int = 30) -> tuple[MeasuredHop, ...]:
    """Time copies between the device of `end` and its host; as `measure_hops`."""
    with started_together(End, [end], "node") as (only,):
        return tuple(get_answer(only.by_copies.remote(turns)))


def _linked(first: Any, second: Any, nccl: bool) -> tuple[Way, ...]:
    """Link two ends; the ways on which hidden states can go over the links, none without links."""
    ends = (first, second)
    hosts = get_answers([end.host.remote() for end in ends])
    rendezvous = Rendezvous(tuple(hosts), _RENDEZVOUS_S, nccl=nccl)
    get_answer(first.open_rendezvous.remote(rendezvous))
    try:
        ways: list[tuple[Way, ...]] = get_answers(
            [end.connect.remote(rendezvous, i, first) for i, end in enumerate(ends)]
        )
    except RayTaskError as error:
        if not isinstance(error.cause, DeviceError):
            raise
        return ()
    return ways[0]


SUMMED_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
GPU_SUMMED_BYTES = (*SUMMED_BYTES, 64 << 20)
"""Bytes of the tensors in 16 bits: from a token of a small model to thousands of a large one."""

_GPU_SUMS_AT_ONCE = 10
"""A GPU's sums are started one after the other without waiting, as those of layers are."""


@dataclass(frozen=True)
class TimedSum:
    """Median seconds of a sum; `spread` is the interquartile range over it."""

    summed_bytes: int
    seconds: float
    spread: float
    repetitions: int


class Rank:
    """One of the processes that sum, on a GPU or none."""

    def __init__(self, on_gpu: bool) -> None:
        torch.set_num_threads(1)
        self._device = device_here("cuda" if on_gpu else "cpu")
        self._dtype = torch.float16 if on_gpu else torch.bfloat16
        self._meeting: Meeting
        self._group: DistributedGroup

    def meeting(self) -> Meeting:
        """A meeting of all ranks on this node; the first rank ends it."""
        self._meeting = Meeting.on_this_node()
        return self._meeting

    def meet(self, meeting: Meeting, rank: int, degree: int) -> None:
        """Connect to the other ranks; raises `DeviceError` where that fails."""
        self._group = meeting.join(rank, degree, self._device)

    def timed(self, turns: int) -> list[TimedSum]:
        """Time sums of every size in turns, as all ranks do at once."""
        on_gpu = self._device.type == "cuda"
        sizes = GPU_SUMMED_BYTES if on_gpu else SUMMED_BYTES
        at_once = _GPU_SUMS_AT_ONCE if on_gpu else 1

        def trip(size: int) -> Callable[[], float]:
            tensor = torch.zeros(size // 2, dtype=self._dtype, device=self._device)

            def sum_s() -> float:
                self._group.all_reduce(tensor[:1])  # all ranks are here
                _wait_for(self._device)
                began = time.perf_counter()
                for _ in range(at_once):
                    self._group.all_reduce(tensor)
                _wait_for(self._device)
                return (time.perf_counter() - began) / at_once

            return sum_s

        found = _in_turns([trip(size) for size in sizes], turns)
        return [TimedSum(size, *own, turns) for size, own in zip(sizes, found, strict=True)]

    def end(self) -> None:
        """Remove the folder of the meeting, once all ranks are done."""
        self._meeting.end()


def measure_sums(ranks: Sequence[Placement], turns: int = 30) -> tuple[TimedSum, ...]:
    """Time sums among processes with the devices of `ranks` on one node; what the first one saw.

    Needs an initialised Ray. Raises `DeviceError` where no node has so many, or they do not meet.
    """
    with started_together(Rank, ranks, "node") as actors:
        meeting, degree = get_answer(actors[0].meeting.remote()), len(actors)
        try:
            get_answers([each.meet.remote(meeting, i, degree) for i, each in enumerate(actors)])
            found = get_answers([each.timed.remote(turns) for each in actors])
        finally:
            get_answer(actors[0].end.remote())
    return tuple(found[0])
