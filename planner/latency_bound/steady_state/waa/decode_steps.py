"""Steps of groups on the stages that decode (WAA), which are longer by the copies of newcomers."""

from __future__ import annotations

from functools import lru_cache

from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.steady_state.tandem import PassTimes
from planner.latency_bound.steady_state.waa.handover import StageCopies, going_on
from planner.length_distribution import LengthDistribution, RequestLengths


class DecodeSteps:
    """Seconds of steps of groups of one to about `size` requests of these lengths, between which
    time is linear; stages `restore` keys and values of those that join.
    """

    def __init__(
        self, times: StageTimes, restore: StageCopies, lengths: RequestLengths, size: float
    ) -> None:
        size, context = max(2.0, size), mean_context(lengths)
        one_s = times.decode_s(1.0, context)
        each_s = (times.decode_s(size, context) - one_s) / (size - 1)
        self._none_s = (one_s - each_s).tolist()
        self._each_s = each_s.tolist()
        self._joining_s = restore.seconds(1.0, lengths.prompts.mean).tolist()
        self._hop_s = times.decode_hop_s(size).tolist()

    def step(self, size: float, joining: float) -> PassTimes:
        """A step of so many requests, some of which join with it."""
        stages = zip(self._none_s, self._each_s, self._joining_s, strict=True)
        return PassTimes([a + size * b + joining * c for a, b, c in stages], self._hop_s)

    def round_s(self, size: float, joining: float, groups: float) -> float:
        """Seconds in which so many groups make such a step each."""
        step = self.step(max(1.0, size), joining)
        return max(groups * step.busiest_s, step.alone_s)


@lru_cache(maxsize=256)
def mean_context(lengths: RequestLengths) -> float:
    """Mean tokens before the new one, over the requests that decode at a time."""
    outputs = lengths.outputs
    return lengths.prompts.mean + (outputs.variance + outputs.mean**2) / outputs.mean / 2


def mean_steps(outputs: LengthDistribution) -> float:
    """Mean decode steps of a request, of those that make any; 1 where none does."""
    going = going_on(outputs)
    return (outputs.mean - 1) / going if going else 1.0
