"""How a run goes on after faults, and what it reports of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from quant.common.errors import SpecError

OnDeviceLoss = Literal["replan", "wait", "fail"]
EventKind = Literal[
    "died", "hung", "failed", "memory", "broken", "waiting", "given up", "replanned", "tokenizer"
]


@dataclass(frozen=True)
class Recovery:
    """`retries`: faults at which a request in flight becomes a suspect (0: the first fault ends the
    run); `restarts` in a row in which no request finishes end it too.

    `hang_s`: seconds without a sign of life of a stage, or without progress of any micro-batch,
    after which it is killed and started again; a micro-batch must not take longer. `replace_s`: how
    long a dead stage waits for a device; then, or with `on_device_loss` "fail" as soon as no node
    has one, the run ends with `DeviceLostError`. "wait" waits for ever. The caller who wants to
    "replan" does so on that error.
    """

    retries: int = 2
    restarts: int = 5
    hang_s: float = 120.0
    replace_s: float = 120.0
    on_device_loss: OnDeviceLoss = "replan"

    def __post_init__(self) -> None:
        """Check ranges; raises `SpecError` naming the field."""
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
                raise SpecError(f"recovery.{name} is {getattr(self, name)!r}; it must be {wanted}")


@dataclass(frozen=True)
class RecoveryEvent:
    """Something went wrong at `time_s` (of `time.time`) and cost `lost_s`; `stage` None: none in
    particular.
    """

    time_s: float
    kind: EventKind
    stage: int | None
    lost_s: float
    text: str


OnEvent = Callable[[RecoveryEvent], None]


def ignore_event(event: RecoveryEvent) -> None:
    """For those who do not want to know."""
