"""By which ways keys and values go: from the stages that prefill to those that hold the same layers
and decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from actors.emulation.stand_in import stand_in_spec
from actors.messages import KvPart
from actors.stage.spec import stage_spec
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import rank_share
from planner.plan.divided import HandoverLink, handover_link
from planner.plan.spec import PlanSpec, StagePlan


@dataclass(frozen=True)
class RankPart:
    """A rank of a stage, and the part of all keys and values that it holds."""

    stage: int
    rank: int
    part: KvPart


@dataclass(frozen=True)
class Route:
    """One way: the `part` that `source` gives, and as which `target` takes it. On emulated devices
    it takes the seconds of `link`.
    """

    source: RankPart
    target: RankPart
    part: KvPart
    as_part: KvPart
    link: HandoverLink | None

    def modelled_s(self, tokens: int) -> float:
        """Seconds of so many tokens; 0 over a real link."""
        return 0.0 if self.link is None else self.link.seconds(tokens)


def find_routes(plan: PlanSpec, prefill: PlanSpec, shape: ModelShape) -> tuple[Route, ...]:
    """The routes from the stages of `prefill` to those of `plan`, of a model of this `shape` (with
    a stand-in: that of the small one).

    Every rank that decodes has routes for all that it holds.
    """
    if plan.stand_in is not None:
        return tuple(_stand_in_routes(plan, prefill, shape))
    sources = list(_ends(prefill, shape))
    found: list[Route] = []
    for target in _ends(plan, shape):
        left = {(layer, head) for layer in target.part.layers for head in target.part.heads}
        for source in sources:
            part = _common(source.part, target.part)
            new = {(layer, head) for layer in part.layers for head in part.heads} & left
            if not new:  # another rank holds these heads too, or it has none of the layers
                continue
            assert len(new) == part.size, "ranks hold equal heads, or others"
            left -= new
            link = _link(plan, prefill, source, target, len(part.layers))
            found.append(Route(source, target, part, part, link))
        assert not left, "each of both plans has all layers"
    return tuple(found)


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
            RankPart(stage.index, 0, KvPart(_stand_in_layers(each, stage, shape), heads))
            for each, stage in ((prefill, holders[0]), (plan, target))
        ]
        by_node: dict[str, HandoverLink] = {}
        for stage in holders:
            layers = len(_overlap(stage.layers, target.layers))
            link = handover_link(plan, prefill, (stage, target), layers)
            if link is not None:
                before = by_node.get(stage.node)
                by_node[stage.node] = link if before is None else before.beside(link)
        slowest = max(by_node.values(), key=lambda link: link.seconds(1), default=None)
        yield Route(ends[0], ends[1], ends[0].part, ends[1].part, slowest)


def _stand_in_layers(plan: PlanSpec, stage: StagePlan, shape: ModelShape) -> range:
    return stand_in_spec(stage_spec(plan, stage), shape).layers


def _ends(plan: PlanSpec, shape: ModelShape) -> Iterator[RankPart]:
    for stage in plan.stages:
        degree = stage_spec(plan, stage).degree
        for rank in range(degree):
            whole = range(shape.kv_heads)
            heads = rank_share(shape, degree, rank).kv_heads if degree > 1 else whole
            yield RankPart(stage.index, rank, KvPart(stage.layers, heads))


def _common(one: KvPart, other: KvPart) -> KvPart:
    return KvPart(_overlap(one.layers, other.layers), _overlap(one.heads, other.heads))


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _link(
    plan: PlanSpec, prefill: PlanSpec, source: RankPart, target: RankPart, layers: int
) -> HandoverLink | None:
    pair = prefill.stages[source.stage], plan.stages[target.stage]
    return handover_link(plan, prefill, pair, layers)
