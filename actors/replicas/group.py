"""What a run asks of loaded stages, be they one pipeline or several that share its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, runtime_checkable

from actors.messages import Finished, Request
from actors.stage_figures import LayersLoaded, StageStats
from actors.telemetry.observer import StageTrace
from planner.plan.spec import PlanSpec


class Observed(Protocol):
    """Looks at stages in the plan's order without ever harming them, as `Observer`."""

    def figures(self) -> tuple[StageStats, ...] | None:
        """Return the figures of every stage; None where they do not answer."""

    def loading(self) -> Sequence[LayersLoaded | None]:
        """Return how far each stage is with loading."""

    def align(self) -> None:
        """Estimate how the stages' clocks differ from this process's."""

    def traces(self) -> tuple[StageTrace | None, ...]:
        """Return every stage's micro-batches."""


class Group(Protocol):
    """A context manager over stages that generate, as `StageGroup`, whose words say more."""

    @property
    def plan(self) -> PlanSpec:
        """The plan of the stages."""

    @property
    def observer(self) -> Observed:
        """What looks at them."""

    def __enter__(self) -> Group:
        """Place and load all stages."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free actors and placement groups."""

    def generate(
        self, requests: Iterable[Request | None], few: bool = False
    ) -> Iterator[tuple[Finished, ...]]:
        """Generate for any number of requests; yields those that ended."""

    def interrupt(self) -> None:
        """Have the `generate` that another thread waits in raise `RunInterruptedError` soon."""

    def halt(self) -> tuple[Finished, ...]:
        """Stop the last `generate` for good; return what had finished and was not given out."""

    def abandon(self) -> None:
        """Give up what the last `generate` has in flight."""

    def unfinished(self) -> tuple[Request, ...]:
        """Return the requests that were taken and not given out, with the tokens they have."""

    def tokens_in_flight(self) -> dict[str, int]:
        """Return the number of new tokens of each request in a KV slot."""


@runtime_checkable
class FollowsPlan(Protocol):
    """Stages that another plan for them may be put in force for while they generate."""

    def follow(self, plan: PlanSpec) -> None:
        """Go on by `plan`, of which nothing but the schedule differs."""
