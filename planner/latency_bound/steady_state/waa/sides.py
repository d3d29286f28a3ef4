"""Stages that prefill and stages that decode, with the way between them and the requests (WAA)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.steady_state.waa.decode_steps import DecodeSteps
from planner.latency_bound.steady_state.waa.handover import Handover
from planner.latency_bound.steady_state.waa.prompt_passes import BusyPrefills, busy_prefills
from planner.length_distribution import RequestLengths
from planner.scheduling import RequestSchedule


@dataclass(frozen=True, eq=False)
class WaaSides:
    """Times of stages that `prefill` and of stages that `decode`, without the copies of
    `handover`, for requests of these lengths. What is known of them is kept, for any schedule.
    """

    prefill: StageTimes
    decode: StageTimes
    handover: Handover
    lengths: RequestLengths
    _busy: dict[tuple[int, int], BusyPrefills] = field(default_factory=dict)

    @cached_property
    def prefill_and_keep(self) -> StageTimes:
        """The times of stages that prefill, with their copies."""
        return self.handover.prefilling(self.prefill, self.lengths.outputs)

    @cached_property
    def restore_and_decode(self) -> StageTimes:
        """The times of stages that decode, with a share of copies in every step."""
        return self.handover.decoding(self.decode, self.lengths)

    def busy(self, schedule: RequestSchedule) -> BusyPrefills:
        """What stages that prefill do where prompts wait all the time."""
        key = schedule.prefill_requests, schedule.prefill_micro_batch
        if key not in self._busy:
            prompts = self.lengths.prompts
            self._busy[key] = busy_prefills(self.prefill_and_keep, prompts, schedule)
        return self._busy[key]

    def steps(self, size: float) -> DecodeSteps:
        """The steps of groups of about so many requests."""
        return DecodeSteps(self.decode, self.handover.restore, self.lengths, size)
