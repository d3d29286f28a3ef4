"""Faults of a run: what happened to which stage, and what was computed meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from actors.processes.health import BatchFailure, SlotTokens
from actors.recovery.policy import FaultKind
from quant.common.errors import StageLostError


class HangError(StageLostError):
    """A stage that does nothing for too long (`stage` None: nobody knows which)."""

    def __init__(self, message: str, stage: int | None) -> None:
        super().__init__(message)
        self.stage = stage

    @property
    def loss(self) -> Loss:
        return Loss.hang(str(self))


class RankLostError(HangError):
    """A stage one of whose ranks has died: the others may wait for it for ever."""

    def __init__(self, stage: int, rank: int) -> None:
        super().__init__(f"rank {rank} of stage {stage} died", stage)
        self.rank = rank

    @property
    def loss(self) -> Loss:
        return Loss("died", f"lost its rank {self.rank}, which died")


class RunInterruptedError(Exception):
    """The end of a run that another thread has asked for; its stages are as they were."""


@dataclass(frozen=True)
class Loss:
    """Why a stage has to be started again; `text` follows the name of the stage in messages."""

    kind: Literal["died", "hung"]
    text: str

    @classmethod
    def death(cls) -> Loss:
        """The loss of a stage whose process has ended."""
        return cls("died", "died")

    @classmethod
    def hang(cls, why: str) -> Loss:
        """The loss of a stage that is killed since it hangs."""
        return cls("hung", f"hung: {why}")

    @classmethod
    def unusable_device(cls, failure: BatchFailure) -> Loss:
        """The loss of a stage whose process can do nothing more with its device."""
        return cls("died", f"cannot use its device again: {failure.text}")


@dataclass
class StoppedRun:
    """A run that all stages have left, as far as it is known: the stages that are lost, the
    micro-batches that failed, by stage, and the tokens of what was in flight (None: the first stage
    is lost).
    """

    lost: dict[int, Loss] = field(default_factory=dict)
    failures: dict[int, BatchFailure] = field(default_factory=dict)
    tokens: SlotTokens | None = None


@dataclass(frozen=True)
class Fault:
    """The event that ended a turn; `stage` is None where no stage in particular is to blame.

    `custom_ids`: the requests that were computed then (None: not known), which count as suspects.
    They do not where the fault `has_remedy`, such as smaller micro-batches.
    """

    kind: FaultKind
    stage: int | None
    text: str
    custom_ids: frozenset[str] | None = None
    has_remedy: bool = False


def lost_by(error: Exception) -> dict[int, Loss]:
    """Return the stage that `error` found to hang or to lack a rank, if it did, with its loss."""
    if isinstance(error, HangError) and error.stage is not None:
        return {error.stage: error.loss}
    return {}
