"""How many newcomers a group of requests takes at its turn, and when, under a schedule for a bound
on latency (ExeGPT, sections 4.1 and 5.2).

A turn has `prefill_requests / groups` newcomers, and where the group is too small as many more as
ended in it since its last turn, "to maintain consistent batch sizes" (section 4.1). So a group that
fills up for the first time grows by the newcomers of one turn at a time: its requests have unlike
ages, as in the steady state, and nobody waits for many more prompts of others than the forecast of
latencies has. In simulations of six kinds of lengths groups that were filled at once had 0.8 to
2.3 % of their first requests above the 99th percentile of the steady state, those that grow 0.5 to
1.2 %; jobs of 3,000 requests took 0.2 to 0.7 % longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from planner.scheduling import RequestSchedule


@dataclass(frozen=True)
class GroupTurn:
    """A group at its turn: its `requests`, how many `ended` since its last turn, what it has left
    over of the newcomers of earlier turns (`credit`, in shares of a newcomer), the most newcomers
    that it may have (`share`), and how many requests at the front of the queue have run before a
    fault (`replayed`).
    """

    requests: int
    ended: int
    credit: int
    share: int
    replayed: int = 0


@dataclass(frozen=True)
class Turns:
    """The turns of `groups` groups that follow `schedule`: in the steady state each of them has
    `least` to `most` requests after its turn.
    """

    schedule: RequestSchedule
    groups: int
    least: int
    most: int

    @classmethod
    def of(cls, schedule: RequestSchedule, most_requests: int | None = None) -> Turns:
        """Turns of as many groups as the schedule has decode micro-batches; of more, where a group
        would have more than `most_requests`.
        """
        groups = schedule.decode_micro_batches
        found = cls._of_groups(schedule, groups)
        while most_requests is not None and found.most > max(1, most_requests):
            groups += 1
            found = cls._of_groups(schedule, groups)
        return found

    @classmethod
    def _of_groups(cls, schedule: RequestSchedule, groups: int) -> Turns:
        """The numbers of requests next to the mean one are always among those of a group."""
        mean, tolerance = Fraction(schedule.decode_requests, groups), schedule.exact_tolerance
        least = min(floor(mean), ceil(mean * (1 - tolerance)))
        return cls(schedule, groups, least, max(ceil(mean), floor(mean * (1 + tolerance))))

    def first_credit(self, group: int) -> int:
        """The credit of a group before its first turn: groups get what is over one by one."""
        return group * self.schedule.prefill_requests % self.groups

    def next_credit(self, credit: int) -> int:
        """The credit that is left after a turn."""
        return (credit + self.schedule.prefill_requests) % self.groups

    def is_near(self, steps_left: Iterable[int]) -> bool:
        """Whether a group that has come to its turn waits for another one, as these groups come to
        theirs in so many steps; one without requests never waits.

        Prefills leave a bubble behind them, which those that follow at once share: turns of groups
        that were apart by a step took up to 7 % of the tokens per second of 2 stages. A group that
        waits makes steps meanwhile.
        """
        near = self.schedule.decode_steps // 2
        return any(0 < each <= near for each in steps_left)

    def newcomers(self, turn: GroupTurn, texts: Sequence[int]) -> int:
        """How many requests at the front of the queue, whose prompts have `texts` tokens [at most
        `most`], join the group, if there is memory for all of them.
        """
        wanted = (turn.credit + self.schedule.prefill_requests) // self.groups
        missing = self.least - turn.requests
        if wanted < missing:
            wanted = min(missing, max(wanted + turn.ended, turn.replayed))
        if not turn.requests:
            wanted = max(1, wanted)
        room = min(self.most - turn.requests, turn.share)
        wanted = min(wanted, room)
        fewest = missing if wanted >= missing else min(wanted, turn.replayed)
        return evened(self.schedule, wanted, room, texts, fewest)


def evened(
    schedule: RequestSchedule, wanted: int, room: int, texts: Sequence[int], fewest: int = 0
) -> int:
    """About `wanted`, at least `fewest` and at most `room`: so many prompts of `texts` tokens, in
    this order, that the sum of their tokens is within the tolerance of that of `wanted` prompts of
    the mean, where this is possible (ExeGPT section 5.2).
    """
    tokens, tolerance = wanted * Fraction(schedule.mean_prompt_tokens), schedule.exact_tolerance
    low, high = ceil((1 - tolerance) * tokens), floor((1 + tolerance) * tokens)
    room = min(room, len(texts))
    count = min(wanted, room)
    if count < 1:
        return 0
    total = sum(texts[:count])
    while total > high and count > max(1, fewest):
        count -= 1
        total -= texts[count]
    while total < low and count < room and total + texts[count] <= high:
        total += texts[count]
        count += 1
    return count


def even_parts(requests: int, most: int) -> list[int]:
    """The fewest parts of at most `most` requests, as even as possible, the larger ones first."""
    parts = -(-requests // most)
    each, more = divmod(requests, parts) if parts else (0, 0)
    return [each + (i < more) for i in range(parts)]
