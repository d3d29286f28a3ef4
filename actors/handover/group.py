"""Stages that prefill and stages that decode as one group, with the face of one `StageGroup`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from itertools import count

import ray

from actors.handover.ledger import DividedLedger, PrefillPace
from actors.handover.run import DividedLive
from actors.handover.transfer import Transfer, find_routes
from actors.live_group import JoinedObserver, LiveGroup
from actors.processes.handle import StageHandle
from actors.processes.placement import place
from actors.processes.reservation import Reservation, ReservedPart
from actors.recovery.policy import RecoveryEvent, Teller
from actors.stage.model_config import check_frequencies_agree
from actors.stage_group import GroupOptions, StageGroup
from planner.model.finding import model_shape
from planner.plan.spec import PlanSpec, all_stages, parts_of, undivided
from planner.scheduling import PolicyOptions
from quant.checkpoint.model_reference import resolve
from quant.common.errors import DeviceError, SpecError
from quant.rounding.importance_store import ImportanceStore

TOLD_EVERY = 16
"""Micro-batches whose tokens the stages that decode tell of together, where only whole answers are
given out: a message for each would keep the driver busy."""


ENDED_S = 5.0
"""Seconds that threads get to notice that the stages have been ended."""


class DividedGroup(LiveGroup):
    """Context manager over the actors of `plan`, whose stages only decode, and of its
    `prefill_plan`; needs an initialised Ray. `checkpoint` and `options` are as for `StageGroup`,
    which says more of all methods; the schedule is the plan's.

    Raises `SpecError` for a plan that does not divide the phases, `DeviceError` where there is no
    host memory to hand over one prompt, and what `StageGroup` raises.
    """

    group_class = StageGroup

    def __init__(
        self,
        plan: PlanSpec,
        checkpoint: str,
        options: GroupOptions = GroupOptions(),  # noqa: B008  (frozen)
    ) -> None:
        super().__init__(plan)
        schedule = plan.policy.schedule
        if plan.prefill_plan is None or schedule is None:
            raise SpecError("the plan has no stages that prefill for others; it is run as it is")
        prefill, _ = self._parts = parts_of(plan)
        self._checkpoint = checkpoint
        self._options = replace(options, importance=options.importance or ImportanceStore())
        self._teller = Teller(options.on_event)
        self._reservation: Reservation | None = None
        self.prefill = self._group(prefill, plan.policy, 0)
        self.decode = self._group(plan, plan.policy, len(prefill.stages))
        sizes = self.prefill.sizes, self.decode.sizes
        self._pace = PrefillPace(schedule, len(prefill.stages), *sizes)
        self._check_host_memory()
        self._transfer: Transfer | None = None
        self._numbers = count(1)  # of keys: never the same in two runs
        self._live: DividedLive | None = None
        sides = self.prefill, self.decode
        observers = [side.observer for side in sides]
        self.observer = JoinedObserver(lambda _: observers, [len(each.stages) for each in sides])

    def _group(self, plan: PlanSpec, policy: PolicyOptions, first: int) -> StageGroup:
        """The stages of one kind, of which the first is number `first` of all."""
        told = partial(self._teller.tell_of, plan.stages[0].role, first)
        options = replace(self._options, policy=policy, on_event=told)
        reserve = partial(self._reserved, first, len(plan.stages))
        return self.group_class(plan, self._checkpoint, options, reserve)

    def _reserved(self, first: int, stages: int) -> ReservedPart:
        assert self._reservation is not None, "it is made before stages start"
        return ReservedPart(self._reservation, first, stages)

    def _check_host_memory(self) -> None:
        longest = self._plan.workload.prompt_length
        for role, group in (("prefill", self.prefill), ("decode", self.decode)):
            room = group.sizes.parked_tokens
            if room < longest:
                raise DeviceError(
                    f"the stages that {role} have host memory for keys and values of {room} "
                    f"tokens, but prompts have up to {longest}; plan with more host_memory_gib, or "
                    "for CPUs with a lower usable_memory_gib"
                )

    @property
    def plan(self) -> PlanSpec:
        return undivided(self._plan)

    @property
    def stages(self) -> tuple[StageHandle, ...]:
        return (*self.prefill.stages, *self.decode.stages)

    def follow(self, plan: PlanSpec) -> None:
        """Go on by `plan`, of which only the schedule differs; new turns begin by it."""
        schedule = plan.policy.followed_schedule
        self._plan = plan
        self._pace.follow(schedule)
        self.prefill.follow_schedule(schedule)
        self.decode.follow(plan)

    def _start(self) -> None:
        lengths = [part.workload.total_length for part in self._parts]
        check_frequencies_agree(resolve(self._checkpoint, weights=False), lengths)
        placements = place(all_stages(self._plan), ray.cluster_resources())
        self._reservation = Reservation(placements, self._options.placement_s)
        self._load()
        prefill, decode = self._parts
        routes = find_routes(decode, prefill, model_shape(self._checkpoint))
        self._transfer = Transfer(self.prefill, self.decode, routes)

    def _load(self) -> None:
        """Load both kinds of stages at once; raises what the first to fail raises."""
        with ThreadPoolExecutor(2, thread_name_prefix="llmpq-load") as pool:
            loading = [pool.submit(group.__enter__) for group in (self.prefill, self.decode)]
            try:
                for each in as_completed(loading):
                    each.result()
            except BaseException:
                self._end_stages()  # the others fail then
                raise

    def _release(self) -> None:
        if self._live is not None:
            self._live.interrupt()
        self._end_stages()
        if self._live is not None:
            self._live.join(ENDED_S)
        if self._reservation is not None:
            self._reservation.release()
        self._reservation = None

    def _end_stages(self) -> None:
        for group in (self.prefill, self.decode):
            group.__exit__(None, None, None)

    def live(self) -> DividedLive:
        """Return a run as `StageGroup.live`, to be read to its end before anything else."""
        return self._begin_run(told_every=1)

    def whole_answers(self, waits: bool = True) -> DividedLive:
        """Return a run that is asked for whole answers; its turns begin with what is there."""
        return self._begin_run(TOLD_EVERY)

    def _begin_run(self, told_every: int) -> DividedLive:
        """A run on stages that are in no other one."""
        if self._live is not None and not self._live.has_ended:
            self.abandon()
        assert self._transfer is not None, "the group is used as a context manager"
        prefill, decode = self.prefill.live(), self.decode.live(told_every)
        ledger = DividedLedger(self._pace, self._numbers)
        self._live = DividedLive(prefill, decode, self._transfer, ledger, self._tell_lost)
        return self._live

    def abandon(self) -> None:
        live, self._live, self._whole = self._live, None, None
        if live is None:
            return
        live.interrupt()
        live.join()
        for group in (self.prefill, self.decode):
            group.abandon()

    def _tell_lost(self, requests: int) -> None:
        text = (
            f"keys and values of {requests} requests were lost on their way, or found no room; "
            "the stages that decode compute their prompts again"
        )
        self._teller.tell(RecoveryEvent("handover", None, 0.0, text))


def group_of(plan: PlanSpec, checkpoint: str, options: GroupOptions) -> StageGroup | DividedGroup:
    """The stages of `plan`, whether or not some of them prefill for the others."""
    kind = StageGroup if plan.prefill_plan is None else DividedGroup
    return kind(plan, checkpoint, options)
