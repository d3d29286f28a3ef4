"""The controls of each kind of schedule, their ranges, and the schedule of a point.

Each control is turned so that a larger value raises both throughput and latency; measured on the
timelines of this package (`benchmarks.reproduction.latency_bounds`) they do so. What is not
monotone is no control:

- `rra`: newcomers of a group in a turn (B_E / B_m), how often they come (1 / N_D: fewer decode
  steps between turns), and the number of groups (B_m). Of the whole B_E, more groups would make
  both better as far as there are stages for them, and both worse beyond.
- `waa-c`, `waa-m`: the requests that decode (B_D). A turn has as many newcomers as end in a round
  (B_E = B_D / S_D as published, but at least one, which then come less often). Of B_m groups the
  number that makes a round shortest is best for both.
- The prefill micro-batch is the one whose turn is shortest, for the same reason.
- Tensor-parallel groups are devices to the planner, which tries sets of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor

from planner.latency_bound.branch_and_bound import Point
from planner.latency_bound.steady_state.completions import Completions
from planner.length_distribution import LengthDistribution, RequestLengths
from planner.micro_batches import MOST_PREFILL_TOKENS
from planner.scheduling import RequestSchedule, ScheduleKind


@dataclass(frozen=True, eq=False)
class RraControls:
    """Points (newcomers of a group, 1 + longest decode steps - N_D, groups)."""

    lengths: RequestLengths
    most_newcomers: int
    most_groups: int

    @property
    def ranges(self) -> tuple[range, range, range]:
        """The box of points."""
        return (
            range(1, self.most_newcomers + 1),
            range(1, self.longest_steps + 1),
            range(1, self.most_groups + 1),
        )

    def up_to(self, point: Point, ratio: float) -> tuple[range, ...]:
        """The box of points whose controls are at most `ratio` times those of a point."""
        newcomers, frequency, groups = point
        steps = (self.longest_steps + 1 - frequency) / ratio
        most = ceil(newcomers * ratio), self.longest_steps + 1 - floor(steps), groups + 1
        return tuple(
            range(each.start, min(each.stop, end + 1))
            for each, end in zip(self.ranges, most, strict=True)
        )

    @property
    def longest_steps(self) -> int:
        """Decode steps of the longest answer."""
        return max(1, self.lengths.outputs.longest - 1)

    def schedule(self, point: Point, prefill_micro_batch: int) -> RequestSchedule:
        """The schedule of a point."""
        newcomers, frequency, groups = point
        steps = self.longest_steps + 1 - frequency
        return rra_schedule(self.lengths, newcomers * groups, steps, groups, prefill_micro_batch)

    def point(self, schedule: RequestSchedule) -> Point:
        """The point of a schedule."""
        groups = schedule.decode_micro_batches
        frequency = self.longest_steps + 1 - schedule.decode_steps
        return schedule.prefill_requests // groups, frequency, groups


def rra_schedule(
    lengths: RequestLengths,
    prefill_requests: int,
    decode_steps: int,
    groups: int,
    prefill_micro_batch: int,
) -> RequestSchedule:
    """The schedule of these controls, with as many requests decoding as its turns bring."""
    return RequestSchedule(
        "rra",
        prefill_requests,
        max(1, round(prefill_requests * mean_phases(lengths.outputs, decode_steps))),
        decode_steps,
        groups,
        prefill_micro_batch,
        lengths.prompts.mean,
    )


@lru_cache(maxsize=4096)
def mean_phases(outputs: LengthDistribution, decode_steps: int) -> float:
    """Mean number of phases for which a request stays."""
    return Completions(outputs, decode_steps).phases


def waa_schedule(
    kind: ScheduleKind,
    lengths: RequestLengths,
    decode_requests: int,
    groups: int,
    prefill_micro_batch: int,
) -> RequestSchedule:
    """The schedule of so many requests that decode, and newcomers as they end."""
    newcomers = max(1, round(decode_requests / max(1.0, lengths.outputs.mean - 1)))
    return RequestSchedule(
        kind,
        newcomers,
        decode_requests,
        1,
        min(groups, decode_requests),
        min(prefill_micro_batch, newcomers),
        lengths.prompts.mean,
    )


def prefill_sizes(newcomers: int, mean_prompt: float) -> tuple[int, ...]:
    """Prefill micro-batches that may be best for so many newcomers: even shares of them in about
    powers of two, of at most `MOST_PREFILL_TOKENS` tokens beyond one request.
    """
    most = min(newcomers, max(1, int(MOST_PREFILL_TOKENS // mean_prompt)))
    sizes = {1 << power for power in range(most.bit_length())} | {most}
    return tuple(sorted({-(-newcomers // -(-newcomers // size)) for size in sizes}))
