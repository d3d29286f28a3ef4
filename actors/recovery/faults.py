"""Faults of a run: what happened to which stage, and which requests are suspected of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from actors.messages import Finished, Request, SlotTokens
from actors.processes.health import BatchFailure
from actors.recovery.policy import FaultKind
from quant.common.errors import DeviceError, StageLostError


class HangError(StageLostError):
    """A stage that does nothing for too long (`stage` None: nobody knows which)."""

    def __init__(self, message: str, stage: int | None) -> None:
        super().__init__(message)
        self.stage = stage
        self.loss = Loss("hung", f"hung: {message}")


class RankLostError(HangError):
    """A stage one of whose ranks has died: the others may wait for it for ever."""

    def __init__(self, stage: int, rank: int) -> None:
        super().__init__(f"rank {rank} of stage {stage} died", stage)
        self.loss = Loss("died", f"lost its rank {rank}, which died")


class RunInterruptedError(Exception):
    """The end of a run that another thread has asked for; its stages are as they were."""


@dataclass(frozen=True)
class Loss:
    """Why a stage has to be started again; `text` follows the name of the stage in messages."""

    kind: Literal["died", "hung"]
    text: str


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


ALONE_FAULTS = 2
"""Faults of a request that runs alone until it is held to be their cause: one may be chance."""


class RequestLedger:
    """Keeps the requests that are not finished, says which of them to run next, and takes in what
    went wrong.

    They are run in turns. A turn that has no fault finishes all there is, also what is added
    meanwhile. After a fault the next turn begins with what the last one left. Requests that were
    computed at `retries` faults are suspects, and have turns of their own, half of them at a time,
    until each has finished or is alone; one that fails twice alone is given up. It takes two faults
    alone, so that stages which die by chance do not make errors of innocent requests. More than
    `restarts` turns in a row that finish nothing end the run.
    """

    def __init__(self, retries: int, restarts: int) -> None:
        self._retries, self._restarts = retries, restarts
        self._unfinished: dict[str, Request] = {}
        self._alone: tuple[str, ...] = ()
        self._groups: deque[tuple[str, ...]] = deque()
        self._faults: Counter[str] = Counter()
        self._faults_alone: Counter[str] = Counter()
        self._in_vain = 0
        self._given_up = 0  # requests in a row, with none between them that finished

    @property
    def in_vain(self) -> int:
        """Turns in a row that finished nothing."""
        return self._in_vain

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """Those that were added and have not finished, with the tokens they have."""
        return tuple(self._unfinished.values())

    @property
    def has_suspects(self) -> bool:
        """Whether the turn is one of suspects, to which no other requests may be added."""
        return bool(self._alone)

    def next_turn(self) -> tuple[Request, ...]:
        """Begin the next turn; returns the requests that it begins with."""
        self._alone = ()
        while self._groups and not self._alone:
            self._alone = self._left(self._groups.popleft())
        return tuple(self._unfinished[i] for i in self._alone or self._unfinished)

    def add(self, requests: Iterable[Request]) -> None:
        self._unfinished |= {each.custom_id: each for each in requests}

    def finish(self, custom_id: str) -> None:
        del self._unfinished[custom_id]
        self._in_vain = self._given_up = 0

    def cancel(self, custom_id: str) -> None:
        del self._unfinished[custom_id]

    def progress(self, tokens: Mapping[str, Sequence[int]]) -> None:
        for custom_id, generated in tokens.items():
            request = self._unfinished.get(custom_id)
            if request is not None and len(generated) > len(request.generated):
                self._unfinished[custom_id] = replace(request, generated=tuple(generated))

    def fault(self, fault: Fault) -> tuple[Finished, ...]:
        """Take in that `fault` has ended the turn; return requests that are given up for it.

        Raises `StageLostError`, or `DeviceError` where memory is short, when there is no point in
        going on.
        """
        ids = fault.custom_ids
        hit = self._left(ids if ids is not None else tuple(self._unfinished))
        if self._alone:
            return self._fault_of_suspects(fault, hit)
        self._in_vain += 1
        if self._in_vain > self._restarts:
            what = f"{self._in_vain} restarts in a row, and no request finished between them"
            raise StageLostError(f"gave up after {what}; the last time {fault.text}")
        self._faults.update(hit)
        suspects = tuple(i for i in hit if self._faults[i] >= self._retries)
        self._groups.extend(_halves(suspects))
        return ()

    def _fault_of_suspects(self, fault: Fault, hit: tuple[str, ...]) -> tuple[Finished, ...]:
        left = self._left(self._alone)
        if len(left) != 1:
            hit = tuple(i for i in left if i in hit) or left
            rest = tuple(i for i in left if i not in hit)
            self._faults.update(hit)
            self._groups.extendleft(reversed([*_halves(hit), rest]))
            return ()
        (custom_id,) = left
        self._faults_alone[custom_id] += 1
        if self._faults_alone[custom_id] < ALONE_FAULTS:
            self._groups.appendleft(left)
            return ()
        self._given_up += 1
        if self._given_up > self._restarts:
            what = f"{self._given_up} requests in a row failed alone; the last time {fault.text}"
            raise (DeviceError if fault.kind == "memory" else StageLostError)(f"gave up: {what}")
        times = self._faults[custom_id] + self._faults_alone[custom_id]
        error = (
            f"{fault.text}; this happened {times} times while this row was computed, and in "
            f"{ALONE_FAULTS} of them it ran alone"
        )
        generated = self._unfinished.pop(custom_id).generated
        return (Finished(custom_id, generated, "error", error),)

    def _left(self, custom_ids: Collection[str]) -> tuple[str, ...]:
        wanted = set(custom_ids)
        return tuple(i for i in self._unfinished if i in wanted)


def _halves(custom_ids: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Split into two groups, or fewer where there are not two requests."""
    half = -(-len(custom_ids) // 2)
    return [group for group in (custom_ids[:half], custom_ids[half:]) if group]
