"""The pipeline of stages as the first one sees it: over links of gloo and between GPUs, or by calls
of Ray.

Either way a stage's result travels as one message, which the next stage decodes and computes. The
board by which ends of gloo find each other is kept by an actor, under Ray's token and TLS.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import ray
import torch
from torch import Tensor

from actors.messages import MicroBatch, Sampled, TokenIds
from actors.transport.gloo_links import Links, LocalBoard
from actors.transport.message_format import Codec
from actors.transport.nccl import GpuLink
from actors.transport.rendezvous import CONTROL, Rendezvous
from quant.common.errors import DeviceError, StageLostError

ANSWER_S = 1800.0
"""A micro-batch that takes longer than half an hour to come back hangs."""

RayMessage = npt.NDArray[np.uint8]
"""A message `[bytes]` as Ray carries it: arrays are shipped without copying them."""


class ComputingStage(Protocol):
    def compute(self, batch: MicroBatch, inputs: Tensor) -> Tensor | Sampled:
        """Run `actors.stage.stage.Stage.step`; it returns when that is computed."""

    def finish(self, batch: MicroBatch, last_hidden: Tensor) -> Sampled:
        """Run `actors.stage.stage.Stage.finish`."""

    def sent(self) -> None:
        """Told when what was computed last was passed on."""


class RayPipeline:
    """Stages that pass their results on as objects of Ray's, which the next actor's call names.

    `following` are the actors of the other stages, which must be in the same `epoch`.
    """

    def __init__(
        self, first: ComputingStage, following: Sequence[Any], codec: Codec, epoch: int = 0
    ) -> None:
        self._first = first
        self._following = following
        self._codec = codec
        self._epoch = epoch
        self.stages = 1 + len(following)

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Any:
        """Compute the first stage here and hand the result down the pipeline."""
        result = self._first.compute(batch, torch.from_numpy(token_ids))
        if not self._following:
            return batch, result
        message: Any = self._codec.encode(batch, result).numpy()
        for actor in self._following:
            message = actor.step.remote(message, self._epoch)
        self._first.sent()
        return batch, message

    def result(self, handle: Any) -> Sampled:
        """The sampled tokens; the first stage samples them where the LM head lives there."""
        batch, answer = handle
        if isinstance(answer, ray.ObjectRef):
            return _sampled(self._first, batch, self._codec.decode(from_ray(ray.get(answer))))
        return answer if isinstance(answer, Sampled) else self._first.finish(batch, answer)


class GlooPipeline:
    """Stages that exchange messages over `links`; answers come in the order of submission."""

    def __init__(self, first: ComputingStage, links: Links, codec: Codec) -> None:
        self._first, self._codec = first, codec
        self.stages = links.stages
        self._down, self._gpu_link = links.sender(1), links.gpu_link(1)
        self._back = links.receiver(links.stages - 1, ANSWER_S, codec.message_bytes)

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        """Compute the first stage here and send the result down the pipeline."""
        result = self._first.compute(batch, torch.from_numpy(token_ids))
        self._down.send(self._codec.encode(batch, result, self._gpu_link))
        self._first.sent()
        return batch

    def result(self, handle: MicroBatch) -> Sampled:
        return _sampled(self._first, handle, self._codec.decode(self._back.receive()))


def _sampled(
    first: ComputingStage, asked: MicroBatch, answer: tuple[MicroBatch, Tensor] | Sampled
) -> Sampled:
    """The tokens of `asked` from the last stage's `answer`, which may be hidden states."""
    if isinstance(answer, Sampled):
        rows, wanted = len(answer.token_ids), len(asked.sampled_rows)
    else:
        rows, wanted = len(answer[1]), len(asked.head_rows)
    if rows != wanted:
        raise StageLostError(f"the last stage answered with {rows} rows, asked were {wanted}")
    return answer if isinstance(answer, Sampled) else first.finish(asked, answer[1])


def serve(stage: ComputingStage, links: Links, codec: Codec) -> None:
    """Compute and send on what comes, until a link breaks or `relay` raises `StageLostError`."""
    from_before = links.receiver(links.index - 1, bytes_of=codec.message_bytes)
    onward = links.sender((links.index + 1) % links.stages)
    gpu_links = links.gpu_link(links.index - 1), links.gpu_link(links.index + 1)
    while True:
        onward.send(relay(stage, from_before.receive(), codec, *gpu_links))
        stage.sent()


def relay(
    stage: ComputingStage,
    message: Tensor,
    codec: Codec,
    before: GpuLink | None = None,
    onward: GpuLink | None = None,
) -> Tensor:
    """Compute the `message` of the stage before; returns the message to the next one. Hidden states
    come and go over GPU links where there are some.

    Raises `StageLostError` for a message that no stage before this one sends.
    """
    content = codec.decode(message, before)
    if isinstance(content, Sampled):
        raise StageLostError("a stage before the last one sampled")
    batch, hidden = content
    if len(hidden) != batch.counts.sum():
        raise StageLostError(
            f"the stage before sent {len(hidden)} rows for {batch.counts.sum()} tokens"
        )
    result = stage.compute(batch, hidden)
    if before is not None:
        before.check()
    return codec.encode(batch, result, onward)


def from_ray(message: RayMessage) -> Tensor:
    """`message` as a tensor; copied, as Ray's objects may not be changed."""
    return torch.from_numpy(message.copy())


class BoardKeeper:
    """The part of an actor that keeps the latest rendezvous' board, behind its secret."""

    _kept: tuple[Rendezvous, LocalBoard] | None = None

    @ray.method(concurrency_group=CONTROL)
    def open_rendezvous(self, rendezvous: Rendezvous) -> None:
        """Begin with an empty board; the one of an earlier rendezvous is gone."""
        self._kept = rendezvous, LocalBoard(len(rendezvous.hosts))

    @ray.method(concurrency_group=CONTROL)
    def board_put(self, secret: bytes, key: str, value: bytes) -> None:
        self.board(secret).put(key, value)

    @ray.method(concurrency_group=CONTROL)
    def board_read(self, secret: bytes, keys: Sequence[str]) -> dict[str, bytes]:
        return self.board(secret).read(keys)

    def board(self, secret: bytes) -> LocalBoard:
        """The board of the rendezvous with this `secret`; raises `DeviceError` where it is over."""
        if self._kept is None or not hmac.compare_digest(self._kept[0].secret, secret):
            raise DeviceError("the rendezvous of the stages is over, another one may have begun")
        return self._kept[1]

    def close_rendezvous(self) -> None:
        self._kept = None


class RemoteBoard:
    """The board of `rendezvous` that the actor `keeper` has."""

    def __init__(self, keeper: Any, rendezvous: Rendezvous) -> None:
        self._keeper, self._rendezvous = keeper, rendezvous

    def put(self, key: str, value: bytes) -> None:
        self._get(self._keeper.board_put.remote(self._rendezvous.secret, key, value))

    def read(self, keys: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = self._get(
            self._keeper.board_read.remote(self._rendezvous.secret, list(keys))
        )
        return found

    def _get(self, reference: Any) -> Any:
        try:
            return ray.get(reference, timeout=self._rendezvous.timeout_s)
        except ray.exceptions.RayError as error:
            raise DeviceError(f"the first stage does not answer its neighbours: {error}") from error
