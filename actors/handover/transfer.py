"""The way of keys and values from the actors of stages that prefill to those that hold the same
layers and decode, past the driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from ray import ObjectRef
from ray.exceptions import RayError

from actors.messages import KvPart
from actors.processes.answers import get_answers
from actors.stage.spec import stage_spec, stand_in_spec
from actors.stage_group import StageGroup
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import hands_over, rank_share
from planner.plan.kv_copies import HandoverLink, handover_link, kept_shares
from planner.plan.spec import PlanSpec
from quant.common.errors import SpecError

if TYPE_CHECKING:
    from actors.processes.ranks import Handed


@dataclass(frozen=True)
class RankPart:
    """A rank of a stage, and the part of all keys and values that it holds."""

    stage: int
    rank: int
    part: KvPart


@dataclass(frozen=True)
class Route:
    """One way: `part` of `source`, as `target` takes it, within `link`'s seconds if emulated."""

    source: RankPart
    target: RankPart
    part: KvPart
    as_part: KvPart
    link: HandoverLink | None

    def modelled_s(self, tokens: int, requests: int = 1) -> float:
        """Seconds of so many tokens of requests; 0 over a real link."""
        return 0.0 if self.link is None else self.link.seconds(tokens, requests)


def find_routes(plan: PlanSpec, prefill: PlanSpec, shape: ModelShape) -> tuple[Route, ...]:
    """The routes from the stages of `prefill` to those of `plan`, of a model of this `shape` (with
    a stand-in: that of the small one).

    Every rank that decodes has routes for all that it holds.
    """
    if plan.stand_in is not None:
        return tuple(_stand_in_routes(plan, prefill, shape))
    _check_groups((plan, prefill), shape)
    sources = list(_ends(prefill, shape))
    found: list[Route] = []
    for target in _ends(plan, shape):
        left = {(layer, head) for layer in target.part.layers for head in target.part.heads}
        for source in sources:
            layers = _overlap(source.part.layers, target.part.layers)
            part = KvPart(layers, _overlap(source.part.heads, target.part.heads))
            new = {(layer, head) for layer in part.layers for head in part.heads} & left
            if not new:  # another rank holds these heads too, or it has none of the layers
                continue
            assert len(new) == part.size, "ranks hold equal heads, or others"
            left -= new
            stages = prefill.stages[source.stage], plan.stages[target.stage]
            shares = kept_shares(prefill.workload, shape, layers, stages[0].layers)
            link = handover_link(plan, prefill, stages, shares)
            found.append(Route(source, target, part, part, link))
        assert not left, "each of both plans has all layers"
    return tuple(found)


def _check_groups(plans: Sequence[PlanSpec], shape: ModelShape) -> None:
    divided = [stage for each in plans for stage in each.stages if stage.degree > 1]
    if divided and not hands_over(shape):
        raise SpecError(
            f"stage {divided[0].index} is a group of {divided[0].degree} devices, which cannot "
            f"hand over what {shape.name} keeps: its layers differ in heads or have constant "
            "states; plan again with --tensor_parallel 1, or for --schedule rra"
        )


def _stand_in_routes(plan: PlanSpec, prefill: PlanSpec, shape: ModelShape) -> Iterator[Route]:
    """One route for each stage that decodes: the layer that computes in place of the planned ones
    comes from a stage that holds one of these by its plan. It takes as long as all of them would:
    nodes send at once, and each what its stages hold.
    """
    heads = range(shape.kv_heads)
    for target in plan.stages:
        holders = [s for s in prefill.stages if _overlap(s.layers, target.layers)]
        if not holders:
            continue
        ends = [
            RankPart(
                stage.index, 0, KvPart(stand_in_spec(stage_spec(each, stage), shape).layers, heads)
            )
            for each, stage in ((prefill, holders[0]), (plan, target))
        ]
        by_node: dict[str, HandoverLink] = {}
        for stage in holders:
            share = len(_overlap(stage.layers, target.layers)) / len(stage.layers)
            link = handover_link(plan, prefill, (stage, target), (share, share))
            if link is not None:
                before = by_node.get(stage.node)
                by_node[stage.node] = link if before is None else before.beside(link)
        slowest = max(by_node.values(), key=lambda link: link.seconds(1, 0), default=None)
        yield Route(ends[0], ends[1], ends[0].part, ends[1].part, slowest)


def _ends(plan: PlanSpec, shape: ModelShape) -> Iterator[RankPart]:
    for stage in plan.stages:
        degree = stage_spec(plan, stage).degree
        for rank in range(degree):
            whole = range(shape.kv_heads)
            heads = rank_share(shape, degree, rank).kv_heads if degree > 1 else whole
            yield RankPart(stage.index, rank, KvPart(stage.layers, heads))


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


class Moving(NamedTuple):
    """Requests on their way to stages of `epoch`, by number; each rank answers which it holds."""

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
        return stage.hand_over(
            route.source.rank, numbers, parts, route.modelled_s(tokens, len(numbers))
        )

    def wait(self, moving: Moving) -> frozenset[int]:
        """Wait for all; returns those that came to every stage, and has the others forgotten."""
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
        _forget(self._prefill, numbers)

    def forget_arrived(self, numbers: Sequence[int]) -> None:
        """Have stages that decode forget numbers which nothing will be restored from."""
        _forget(self._decode, numbers)


def _forget(group: StageGroup, numbers: Sequence[int]) -> None:
    if numbers:
        for stage in group.stages:
            stage.forget_keys(numbers)
