"""How a run goes on after faults, and what it reports of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Literal

from quant.common.errors import SpecError

OnDeviceLoss = Literal["replan", "wait", "fail"]
FaultKind = Literal["died", "hung", "failed", "memory", "broken"]
"""A process that died or hung, a micro-batch that failed or found too little memory, a link that
broke."""

EventKind = (
    FaultKind
    | Literal["waiting", "given up", "replanned", "tokenizer", "predictor", "long rows", "drift"]
    | Literal["replica", "handover", "rescheduled"]
)


@dataclass(frozen=True)
class Recovery:
    """Limits within which a run goes on after faults.

    `retries`: faults at which a request in flight becomes a suspect (0: the first fault ends the
    run); `restarts` in a row in which no request finishes end it too.

    `hang_s`: seconds without a sign of life of a stage, or without progress of any micro-batch,
    after which it is killed and started again; a micro-batch must not take longer. `replace_s`: how
    long a lost stage waits for a device. Then the run ends with `DeviceLostError`: with
    `on_device_loss` "replan" the caller plans again on that error, with "fail" it is raised as soon
    as no node has the device, with "wait" never.
    """

    retries: int = 2
    restarts: int = 5
    hang_s: float = 120.0
    replace_s: float = 120.0
    on_device_loss: OnDeviceLoss = "replan"

    def __post_init__(self) -> None:
        rules = {
            "retries": (self.retries >= 0, "0 (off) or more"),
            "restarts": (self.restarts >= 0, "0 or more"),
            "hang_s": (self.hang_s > 0, "above 0"),
            "replace_s": (self.replace_s > 0, "above 0"),
            "on_device_loss": (
                self.on_device_loss in ("replan", "wait", "fail"),
                "replan|wait|fail",
            ),
        }
        for name, (holds, wanted) in rules.items():
            if not holds:
                raise SpecError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")


@dataclass(frozen=True)
class RecoveryEvent:
    """A fault or repair at `time_s` (`time.time`), which cost `lost_s`; `stage` may be None."""

    kind: EventKind
    stage: int | None
    lost_s: float
    text: str
    time_s: float = field(default_factory=time.time)


OnEvent = Callable[[RecoveryEvent], None]


def ignore_event(event: RecoveryEvent) -> None:
    """Do nothing, for a run whose events nobody wants."""


class Teller:
    """Tells `on_event` of the events of several groups of stages, one at a time."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._telling = Lock()

    def tell(self, event: RecoveryEvent) -> None:
        with self._telling:
            self._on_event(event)

    def tell_of(self, name: str, first: int, event: RecoveryEvent) -> None:
        """Tell of an event of the group `name`, whose stages are those from `first` on."""
        stage = None if event.stage is None else first + event.stage
        self.tell(replace(event, stage=stage, text=f"{name}: {event.text}"))
