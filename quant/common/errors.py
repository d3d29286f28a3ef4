"""The errors that a user can cause or correct; a command prints one message and exits with 2."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from quant.common.text import printable, without_library_advice

if TYPE_CHECKING:
    from pydantic import ValidationError

MESSAGE_CHARACTERS = 1500
"""Longest message: messages quote text from files and other libraries."""


class LlmpqError(Exception):
    """An error that a user can correct: the message names problem, number and remedy."""

    def __str__(self) -> str:
        return printable(without_library_advice(super().__str__()), MESSAGE_CHARACTERS)


class SpecError(LlmpqError):
    """A cluster, model, workload or command-line option that cannot be used as written."""


class FieldError(SpecError):
    """A field `name` of a row, a request or an option that cannot be followed; `why` goes on from
    it.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} {why}")
        self.name = name
        self.why = why


def invalid_field(error: ValidationError, source: str) -> SpecError:
    first = error.errors()[0]
    found = "" if isinstance(first["input"], dict | list) else f" (found {first['input']!r:.40})"
    where = ".".join(map(str, first["loc"]))
    problem = first["msg"].removeprefix("Value error, ")
    return SpecError(f"{source}: field {where}: {problem}{found}")


class InfeasibleError(LlmpqError):
    """No plan fits; the message is the `problem`, and each of the `remedies` that were tried."""

    def __init__(self, message: str, problem: str = "", remedies: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problem = problem or message
        self.remedies = remedies


class DoesNotFitError(InfeasibleError):
    """No plan fits because memory is short for every plan that was allowed."""


class BoundNotMetError(InfeasibleError):
    """Plans fit, but none within bound `option`, of which `reachable` is the least found value;
    `in_time` has a hint where the search ended by its time.
    """

    def __init__(
        self,
        message: str,
        option: str,
        reachable: float,
        problem: str = "",
        remedies: tuple[str, ...] = (),
        in_time: str = "",
    ) -> None:
        super().__init__(message, problem, remedies)
        self.option = option
        self.reachable = reachable
        self.in_time = in_time


class CheckpointError(LlmpqError):
    """Model weights that are missing, truncated or of another model."""


class PlanMismatchError(LlmpqError):
    """A plan that belongs to another model or cluster than the one it is run on."""


class InputError(LlmpqError):
    """A batch file that cannot be read as a whole, or an output that cannot be written."""


class DeviceError(LlmpqError):
    """A device that is missing, or offers less than the plan needs."""


NO_TORCH = (
    "torch is not installed, which all but plans needs; `llmpq doctor` says which command installs "
    "the build for this machine"
)


def need_torch() -> None:
    """Raise `DeviceError` where torch is not installed."""
    if find_spec("torch") is None:
        raise DeviceError(NO_TORCH)


class StageLostError(Exception):
    """A stage's process died while it was needed. No mistake of the user; the run is over."""


class HeadLostError(Exception):
    """A local Ray has ended, which does not come back, so that the run is over."""


class DeviceLostError(StageLostError):
    """`devices` did not come back in time: `stages` have none; another plan may hold the model."""

    def __init__(self, message: str, stages: tuple[int, ...], devices: tuple[str, ...]) -> None:
        super().__init__(message)
        self.stages = stages
        self.devices = devices
