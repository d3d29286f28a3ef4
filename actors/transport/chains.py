"""The stages in a row as the first one's scheduler sees them: hidden states go down, tokens come
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import ray
import torch
from torch import Tensor

from actors.messages import MicroBatch, Sampled, TokenIds
from actors.transport.links import Links
from actors.transport.packed import pack, unpack
from actors.transport.wire import Limits, decode, encode
from quant.common.errors import StageLostError

ANSWER_S = 1800.0
"""A micro-batch that takes longer than half an hour to come back hangs."""


class Computing(Protocol):
    """A stage that takes its planned time."""

    def compute(self, batch: MicroBatch, inputs: Tensor) -> Tensor | Sampled:
        """As `actors.stage.stage.Stage.step`."""

    def finish(self, batch: MicroBatch, last_hidden: Tensor) -> Sampled:
        """As `actors.stage.stage.Stage.finish`."""

    @property
    def ready_at_s(self) -> float:
        """When an emulated link has brought what was computed last to the next stage, else 0."""

    def wait_for(self, ready_at_s: float) -> None:
        """Until an emulated link has brought what is `ready_at_s`."""

    def sent(self) -> None:
        """Told when what was computed last was passed on."""


class RayChain:
    """Each stage's result is an object of Ray's, which the next actor's call names."""

    def __init__(self, first: Computing, following: Sequence[Any], epoch: int = 0) -> None:
        self._first = first
        self._following = following
        self._epoch = epoch  # which the other stages must be in too
        self.stages = 1 + len(following)

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Any:
        """Compute the first stage here and hand the result down the chain."""
        result = self._first.compute(batch, torch.from_numpy(token_ids))
        if not self._following:
            return batch, result
        passed: Any = result
        if not isinstance(result, Sampled):
            passed = pack(result, self._first.ready_at_s)
        for actor in self._following:
            passed = actor.step.remote(batch, passed, self._epoch)
        self._first.sent()
        return batch, passed

    def result(self, handle: Any) -> Sampled:
        """The sampled tokens; the first stage samples them where the LM head lives there."""
        batch, answer = handle
        if isinstance(answer, ray.ObjectRef):
            answer = ray.get(answer)
            self._first.wait_for(answer.ready_at_s)
            answer = answer if isinstance(answer, Sampled) else unpack(answer)
        return answer if isinstance(answer, Sampled) else self._first.finish(batch, answer)


class LinkChain:
    """Messages over links; the other stages `serve`. Answers come in the order of submission."""

    def __init__(self, first: Computing, links: Links, limits: Limits | None = None) -> None:
        self._first, self._limits = first, limits
        self.stages = links.stages
        self._down = links.sender(1)
        self._back = links.receiver(links.stages - 1, ANSWER_S, limits)

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        """Compute the first stage here and send the result down the chain."""
        result = self._first.compute(batch, torch.from_numpy(token_ids))
        self._down.send(encode(batch, result, self._first.ready_at_s))
        self._first.sent()
        return batch

    def result(self, handle: MicroBatch) -> Sampled:
        """The sampled tokens; the first stage samples them where the LM head lives there."""
        answer = decode(self._back.receive(), self._limits)
        if isinstance(answer, Sampled):
            _check_answer(len(answer.token_ids), handle)
            self._first.wait_for(answer.ready_at_s)
            return answer
        returned, last_hidden = answer
        _check_answer(len(last_hidden), handle)
        self._first.wait_for(returned.ready_at_s)
        return self._first.finish(handle, last_hidden)


def _check_answer(rows: int, asked: MicroBatch) -> None:
    if rows != len(asked.slots):
        raise StageLostError(
            f"the last stage answered for {rows} requests, asked were {len(asked.slots)}"
        )


def serve(stage: Computing, links: Links, limits: Limits | None = None) -> None:
    """Compute what comes from the stage before and send it on, for as long as both are there.

    Raises `StageLostError` for a message that is none of a stage before this one, or goes beyond
    `limits`.
    """
    from_before = links.receiver(links.index - 1, limits=limits)
    onward = links.sender((links.index + 1) % links.stages)
    while True:
        message = decode(from_before.receive(), limits)
        if isinstance(message, Sampled):
            raise StageLostError("a stage before the last one sampled")
        batch, hidden = message
        if len(hidden) != batch.counts.sum():
            raise StageLostError(
                f"stage {links.index - 1} sent {len(hidden)} rows for {batch.counts.sum()} tokens"
            )
        result = stage.compute(batch, hidden)
        onward.send(encode(batch, result, stage.ready_at_s))
        stage.sent()
