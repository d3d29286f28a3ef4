"""The ways of keys and values: every rank that decodes gets each head of its layers once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from actors.handover.transfer import Route, find_routes
from actors.messages import KvPart
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import rank_share
from planner.plan.spec import PlanSpec, StagePlan
from quant.common.errors import SpecError
from tests.actors.configs import CONFIGS, LAYERS
from tests.actors.models import save_tiny
from tests.llmpq.divided_plans import GIB, divided_plan


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, CONFIGS["llama"])
    return folder


@pytest.fixture(scope="module")
def shape(llama: Path) -> ModelShape:
    return model_shape(str(llama))


@pytest.fixture(scope="module")
def plan(llama: Path) -> PlanSpec:
    """Two stages that prefill and two that decode."""
    return divided_plan(llama, (0.0008, 0.0006), (0.0009, 0.0005))


def with_stages(plan: PlanSpec, bounds: list[int], degree: int = 1) -> PlanSpec:
    """The plan with stages of these layers, each real and of so many ranks."""

    def stage(index: int) -> StagePlan:
        layers = range(bounds[index], bounds[index + 1])
        devices = tuple(f"{index}/CPU:{rank}" for rank in range(degree))
        return replace(
            plan.stages[0],
            index=index,
            layers=layers,
            bitwidths=(16,) * len(layers),
            device=devices[0],
            devices=devices if degree > 1 else (),
            accelerator="CPU",
            emulated=False,
        )

    return replace(plan, stages=tuple(stage(i) for i in range(len(bounds) - 1)))


def held(plan: PlanSpec, shape: ModelShape, stage: int, rank: int) -> KvPart:
    own = plan.stages[stage]
    heads = range(shape.kv_heads)
    if own.degree > 1:
        heads = rank_share(shape, own.degree, rank).kv_heads
    return KvPart(own.layers, heads)


def cells(part: KvPart) -> list[tuple[int, int]]:
    return [(layer, head) for layer in part.layers for head in part.heads]


def of_target(routes: tuple[Route, ...], stage: int, rank: int) -> list[Route]:
    return [r for r in routes if (r.target.stage, r.target.rank) == (stage, rank)]


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2), (2, 3), (3, 2), (6, 2)])
@pytest.mark.parametrize("bounds", [([0, 5], [0, 2, 5]), ([0, 2, 2, 5], [0, 3, 5])])
def test_every_rank_gets_each_head_of_its_layers_once_from_one_that_holds_it(
    plan: PlanSpec,
    shape: ModelShape,
    bounds: tuple[list[int], list[int]],
    degrees: tuple[int, int],
) -> None:
    """The model has two key/value heads: of more ranks several hold the same one."""
    assert shape.kv_heads == 2
    assert plan.prefill_plan is not None
    prefill = with_stages(plan.prefill_plan, bounds[0], degrees[0])
    decode = with_stages(plan, bounds[1], degrees[1])
    routes = find_routes(decode, prefill, shape)
    for stage in decode.stages:
        for rank in range(degrees[1]):
            own = of_target(routes, stage.index, rank)
            found = Counter(cell for route in own for cell in cells(route.part))
            assert found == Counter(cells(held(decode, shape, stage.index, rank)))
    for route in routes:
        source = held(prefill, shape, route.source.stage, route.source.rank)
        assert set(cells(route.part)) <= set(cells(source))
        assert route.as_part == route.part
        assert route.modelled_s(1000) == 0.0


def test_groups_whose_layers_keep_other_heads_hand_nothing_over(
    plan: PlanSpec, shape: ModelShape
) -> None:
    assert plan.prefill_plan is not None
    decode, wider = with_stages(plan, [0, 5], 2), replace(shape, kind="wider", heads=12)
    mixed = replace(shape, kinds=(shape, wider), pattern=(0, 1, 0, 1, 0))
    with pytest.raises(SpecError, match=r"group of 2 devices.*differ in heads.*--schedule rra"):
        find_routes(decode, plan.prefill_plan, mixed)


def test_emulated_links_take_the_bytes_of_the_shared_layers_over_the_network(
    llama: Path, shape: ModelShape
) -> None:
    """float32 keys and values of two heads of eight numbers, at 0.1 Gbit/s and twice the time."""
    plan = divided_plan(llama, (GIB,), (0.0009, 0.0005), network=0.1)
    assert plan.prefill_plan is not None
    plan = replace(plan, time_scale=2.0)
    routes = find_routes(plan, plan.prefill_plan, shape)
    latency_s = routes[0].modelled_s(0)
    assert 0 < latency_s < 1e-3
    for route, stage in zip(routes, plan.stages, strict=True):
        token_bytes = 2 * 4 * 2 * 8 * len(stage.layers)
        seconds = 2.0 * 100 * token_bytes / (0.1e9 / 8)
        assert route.modelled_s(100) == pytest.approx(latency_s + seconds)
    off = replace(plan, time_scale=0.0)
    assert {route.link for route in find_routes(off, plan.prefill_plan, shape)} == {None}
    unknown = replace(plan, origin=None)
    assert {route.link for route in find_routes(unknown, plan.prefill_plan, shape)} == {None}


def test_with_a_stand_in_each_stage_gives_the_layer_that_it_has(
    plan: PlanSpec, shape: ModelShape
) -> None:
    """Of planned layers 0-2 and 3-4 here, 0-1 and 2-4 there, the small model computes one each."""
    assert plan.prefill_plan is not None
    prefill = replace(with_stages(plan.prefill_plan, [0, 2, 5]), stand_in="small")
    decode = replace(with_stages(plan, [0, 3, 4, 5]), stand_in="small")
    routes = find_routes(decode, prefill, shape)
    assert LAYERS > 3
    assert [(route.source.stage, route.target.stage) for route in routes] == [
        (0, 0),
        (1, 1),
        (1, 2),
    ]
    assert [route.part.layers for route in routes] == [range(1), range(1, 2), range(1, 2)]
    assert [route.as_part.layers for route in routes] == [range(1), range(1, 2), range(2, 3)]
