"""The stages of one plan at a time, and the Ray that they are on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from llmpq.remote.session import head_loss_raised, prepared_forks, ray_session
from planner.plan.spec import PlanSpec
from quant.common.errors import DeviceError, HeadLostError, LlmpqError, StageLostError

if TYPE_CHECKING:
    from actors.live_group import LiveGroup
    from llmpq.remote.local_ray import GiveUp


class SharedStages:
    """The stages of one plan at a time, which `make` makes; Ray is that of `address`.

    `kept`: they stay from one run to the next until `close`, else until the first run has ended.
    What processes of a local Ray are made of is prepared as soon as this is made.
    `start_s`: the seconds that the present ones took to start.
    """

    def __init__(
        self, make: Callable[[PlanSpec], LiveGroup], address: str | None, kept: bool
    ) -> None:
        self._make, self._address, self._kept = make, address, kept
        self.forks = prepared_forks(address)
        self._ray: ExitStack | None = None
        self._not_started: LlmpqError | None = None
        self._give_up: GiveUp | None = None
        self._group: LiveGroup | None = None
        self._plan: PlanSpec | None = None
        self._is_started = False
        self.start_s = 0.0

    def begin(self) -> None:
        """Start a local Ray whose workers are forks ahead of `joined`, which raises where that
        fails.
        """
        if self.forks is not None:
            try:
                self._join()
            except LlmpqError as error:
                self._not_started = error

    @contextmanager
    def joined(self, give_up: GiveUp | None = None) -> Iterator[None]:
        """Ray, for what is done in the body of the `with` statement; `give_up` as `ray_session`."""
        try:
            self._give_up = give_up
            self._join()
            with head_loss_raised():
                yield
        except HeadLostError:
            self.close()
            raise
        finally:
            if not self._kept:
                self.close()

    def of(self, plan: PlanSpec) -> LiveGroup:
        """The stages of `plan`, which `lent` starts; those of another plan give way to them."""
        if self._group is None or self._plan is not plan:
            self._release()
            self._group, self._plan = self._make(plan), plan
        return self._group

    def keep_for(self, plan: PlanSpec) -> None:
        """Keep the present stages for `plan`, by which they go on."""
        self._plan = plan

    @contextmanager
    def lent(
        self, group: LiveGroup, loading: AbstractContextManager[Any] | None = None
    ) -> Iterator[None]:
        """Have `group`, which `of` gave last, loaded for the body of the `with` statement; where it
        has to be loaded first, that is done in the body of `loading`.

        Where the body is left early, what it has in flight is given up, and it is ready for the
        next run; where it is lost, the next run starts others.
        """
        self._start(group, loading)
        try:
            yield
        except BaseException as error:
            if not self._kept or _is_of_stages(error):
                self._release()
            else:
                self._clear(group)
            raise
        if not self._kept:
            self._release()

    def start(self, plan: PlanSpec) -> None:
        """Start the stages of `plan` ahead of the first run; on an error nothing stays."""
        try:
            with self.joined():
                self._start(self.of(plan))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the stages, and leave the Ray that was started or joined here."""
        try:
            self._release()
        finally:
            joined, self._ray = self._ray, None
            if joined is not None:
                joined.close()
            forks, self.forks = self.forks, None
            if forks is not None:
                forks.close()

    def _join(self) -> None:
        import ray

        if self._not_started is not None:
            raise self._not_started
        if self._ray is not None and not ray.is_initialized():  # somebody has left it meanwhile
            self._is_started = False
            self.close()
        if self._ray is None:
            with ExitStack() as joining:
                joining.enter_context(ray_session(self._address, self._end, self.forks))
                self._ray = joining.pop_all()

    def _end(self, why: str) -> None:
        if self._give_up is not None:
            self._give_up(why)

    def _start(self, group: LiveGroup, loading: AbstractContextManager[Any] | None = None) -> None:
        if self._is_started:
            return
        began_s = time.perf_counter()
        try:
            with loading or nullcontext():
                group.__enter__()
        except BaseException:
            self._group = None
            raise
        self._is_started = True
        self.start_s = time.perf_counter() - began_s

    def _clear(self, group: LiveGroup) -> None:
        """Give up what `group` has in flight; let it go where that is not possible."""
        try:
            group.abandon()
        except BaseException as error:
            self._release()
            if not isinstance(error, Exception):  # else the next run starts others
                raise

    def _release(self) -> None:
        group, self._group = self._group, None
        is_started, self._is_started = self._is_started, False
        if group is not None and is_started:
            group.__exit__(None, None, None)


def _is_of_stages(error: BaseException) -> bool:
    """Whether stages that raise it, or for which it is raised, are of no more use."""
    from ray.exceptions import RayError

    return isinstance(error, StageLostError | HeadLostError | DeviceError | RayError)
