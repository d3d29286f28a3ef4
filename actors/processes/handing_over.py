"""The part of an actor that hands keys and values to other stages, or takes them, while it
computes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from actors.messages import KvPart
from actors.stage.handed_over import HeldKeysValues
from actors.transport.pipelines import RayMessage, from_ray
from quant.common.errors import StageLostError

HANDOVER = "handover"  # an actor's own thread for keys and values

Handed = tuple[RayMessage, float]
"""A message with keys and values, and when an emulated link has brought it, by the monotonic clock
of the machine (0: there is none)."""


class KeysValuesKeeper:
    """Hands over and takes over what lies in its host memory, between `open_handover` and
    `close_handover`.
    """

    def __init__(self) -> None:
        self._handing = Lock()  # around what must not be done half when its run ends
        self._keys_values: HeldKeysValues | None = None
        self._handed_epoch = 0
        self._link_free_s = 0.0  # by a clock that all processes of the machine share

    def open_handover(self, keys_values: HeldKeysValues, epoch: int) -> None:
        """Take and give from now on, as of this `epoch` of the stage's pipeline."""
        with self._handing:
            self._keys_values, self._handed_epoch = keys_values, epoch

    def close_handover(self) -> None:
        """Take nothing more: what was taken is forgotten."""
        with self._handing:
            self._keys_values = None

    @ray.method(concurrency_group=HANDOVER)
    def hand_over(
        self, keys: Sequence[int], part: KvPart, as_part: KvPart, modelled_s: float
    ) -> Handed:
        """Run `HeldKeysValues.hand_over`; the message travels for `modelled_s` seconds over an
        emulated link, one after the other (0: over a real one).

        Raises `StageLostError` where the stage has left its run.
        """
        message = self._open().hand_over(keys, part, as_part)
        arrival_s = 0.0
        if modelled_s:
            arrival_s = max(time.monotonic(), self._link_free_s) + modelled_s
            self._link_free_s = arrival_s
        content: RayMessage = message.numpy()
        return content, arrival_s

    @ray.method(concurrency_group=HANDOVER)
    def take_over(self, epoch: int, sent: Sequence[ObjectRef[Handed]]) -> tuple[int, ...]:
        """Run `HeldKeysValues.take_over` with what other stages have `sent`, once that is there.

        Returns nothing where a stage that sends is lost. Raises `StageLostError` where `epoch` is
        over: what was handed over in it is forgotten.
        """
        try:
            handed = ray.get(list(sent))
        except RayError:
            return ()
        messages = [from_ray(message) for message, _ in handed]
        wait_s = max((arrival_s for _, arrival_s in handed), default=0.0) - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        with self._handing:
            if epoch != self._handed_epoch:
                raise StageLostError(
                    f"keys and values of epoch {epoch} came in epoch {self._handed_epoch}"
                )
            return self._open().take_over(messages)

    @ray.method(concurrency_group=HANDOVER)
    def forget_keys(self, keys: Sequence[int]) -> None:
        """Free what lies under `keys`, as far as something does."""
        with self._handing:
            if self._keys_values is not None:
                self._keys_values.forget(keys)

    def _open(self) -> HeldKeysValues:
        if self._keys_values is None:
            raise StageLostError("a stage that has left its run has no keys and values")
        return self._keys_values
