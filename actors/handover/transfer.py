"""Having keys and values go from the actors of stages that prefill to those that decode, past the
driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ray import ObjectRef
from ray.exceptions import RayError

from actors.handover.routes import Route
from actors.processes.answers import get_answers
from actors.processes.handing_over import Handed
from actors.stage_group import StageGroup


class Moving(NamedTuple):
    """Requests on their way, by the numbers of their keys, to stages that were linked for the time
    number `epoch`; every rank that takes keys and values will answer which it holds.
    """

    numbers: tuple[int, ...]
    epoch: int
    answers: tuple[ObjectRef[tuple[int, ...]], ...]


class Transfer:
    """Hands over the keys and values of prompts from `prefill` to `decode` by `routes`."""

    def __init__(self, prefill: StageGroup, decode: StageGroup, routes: Sequence[Route]) -> None:
        self._prefill, self._decode = prefill, decode
        by_target = groupby(routes, key=lambda route: (route.target.stage, route.target.rank))
        self._routes = {target: tuple(own) for target, own in by_target}

    def begin(self, numbers: Sequence[int], tokens: int) -> Moving:
        """Have the prompts of these numbers, which have so many tokens together, go on."""
        epoch = self._decode.epoch
        answers = []
        for (stage, rank), routes in self._routes.items():
            sent = [self._sent(route, numbers, tokens) for route in routes]
            answers.append(self._decode.stages[stage].take_over(rank, epoch, sent))
        return Moving(tuple(numbers), epoch, tuple(answers))

    def _sent(self, route: Route, numbers: Sequence[int], tokens: int) -> ObjectRef[Handed]:
        stage = self._prefill.stages[route.source.stage]
        parts = route.part, route.as_part
        return stage.hand_over(route.source.rank, numbers, parts, route.modelled_s(tokens))

    def wait(self, moving: Moving) -> frozenset[int]:
        """Wait until all have come or are lost; returns the numbers of those that have come to
        every stage. The others are forgotten everywhere.
        """
        arrived = frozenset(moving.numbers)
        for answer in moving.answers:
            try:
                arrived &= frozenset(get_answers([answer])[0])
            except RayError:  # a stage is lost, or has been linked anew since
                arrived = frozenset()
        self.forget_prefilled(moving.numbers)
        self.forget_arrived([number for number in moving.numbers if number not in arrived])
        return arrived

    def forget_prefilled(self, numbers: Sequence[int]) -> None:
        """Have the stages that prefill forget these numbers."""
        _forget(self._prefill, numbers)

    def forget_arrived(self, numbers: Sequence[int]) -> None:
        """Have the stages that decode forget these numbers, which nothing will be restored from."""
        _forget(self._decode, numbers)


def _forget(group: StageGroup, numbers: Sequence[int]) -> None:
    if numbers:
        for stage in group.stages:
            stage.forget_keys(numbers)
