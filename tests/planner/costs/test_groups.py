"""Costs of tensor-parallel groups against sums that are counted step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cluster.device import Device, MeasuredSum
from planner.cluster.groups import group_of, grouped_cluster
from planner.cluster.spec import ClusterSpec
from planner.costs.adjusted_latency import GroupLatency
from planner.costs.communication import Collectives
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_shape
from planner.model.tensor_parallel import largest_rank_shape
from quant.common.errors import SpecError
from tests.planner.problems import transfer_s

CLUSTER = ClusterSpec.from_counts(["V100", "T4"], [4, 4])
SHAPE = model_shape("opt-30b")
LATENCY = GroupLatency(RooflineLatency(SHAPE))


def group(degree: int, first: int = 0) -> Device:
    return group_of(CLUSTER.devices[first : first + degree])


@pytest.mark.parametrize("degree", [2, 4])
def test_ring_moves_what_its_steps_move(degree: int) -> None:
    """Each of 2 (k - 1) steps moves a k-th of the tensor over every link at once."""
    sums = Collectives(degree, step_s=1e-5, bytes_per_s=1e9)
    seconds = 0.0
    for _ in range(degree - 1):
        seconds += 1e-5 + 8e6 / degree / 1e9  # partial sums go on
    for _ in range(degree - 1):
        seconds += 1e-5 + 8e6 / degree / 1e9  # whole sums go on
    assert sums.ring_s(8e6) == pytest.approx(seconds)


def test_small_tensors_take_the_tree_and_large_ones_the_ring() -> None:
    sums = Collectives(8, step_s=1e-5, bytes_per_s=1e9)
    assert sums.sum_s(8) == sums.tree_s(8) < sums.ring_s(8)
    assert sums.sum_s(1e8) == sums.ring_s(1e8) < sums.tree_s(1e8)


def test_single_devices_keep_their_times() -> None:
    single = CLUSTER.devices[0]
    plain = RooflineLatency(SHAPE)
    assert LATENCY.layer_decode_s(single, 4, 8, 512, "float16") == plain.layer_decode_s(
        single, 4, 8, 512, "float16"
    )
    assert Collectives.of(single).sum_s(1e6) == 0.0


@pytest.mark.parametrize("degree", [2, 4])
def test_layer_is_the_part_of_a_rank_and_two_sums(degree: int) -> None:
    one, ranks = CLUSTER.devices[0], group(degree)
    part = RooflineLatency(largest_rank_shape(SHAPE, degree))
    sum_s = Collectives.of(ranks).sum_s(16 * 128 * SHAPE.hidden_size * 2)
    expected = part.layer_prefill_s(one, 8, 16, 128, "float16") + 2 * sum_s
    assert LATENCY.layer_prefill_s(ranks, 8, 16, 128, "float16") == pytest.approx(expected)
    started = replace(part, replays=False).layer_decode_s(one, 8, 16, 128, "float16")
    found = LATENCY.layer_decode_s(ranks, 8, 16, 128, "float16")
    sum_s = Collectives.of(ranks).sum_s(16 * SHAPE.hidden_size * 2)
    assert found == pytest.approx(started + 2 * sum_s)
    assert started > part.layer_decode_s(one, 8, 16, 128, "float16")
    assert expected < LATENCY.layer_prefill_s(one, 8, 16, 128, "float16")


@pytest.mark.parametrize(
    ("name", "sums"),
    [
        ("qwen3-30b-a3b", [2048] * 2),
        ("qwen3-next-80b-a3b", [2048] * 2),
        ("gemma-4-26b-a4b", [2816] * 3),
        ("olmo-2-7b", [1, 1, 4096, 4096]),
    ],
)
def test_parts_of_unlike_layers_are_those_of_a_rank_with_every_sum(
    name: str, sums: list[int]
) -> None:
    """Each kind of layer; experts beside an MLP are summed apart where each is normed."""
    shape, one, ranks = model_shape(name), CLUSTER.devices[0], group(2)
    of_rank = largest_rank_shape(shape, 2)
    workload = 8, "decode", 16, 128, "float16"
    sums_s = sum(Collectives.of(ranks).sum_s(16 * width * 2) for width in sums)
    for whole, part in zip(shape.kind_shapes, of_rank.kind_shapes, strict=True):
        alone = RooflineLatency(part, replays=False)
        parts = GroupLatency(RooflineLatency(whole)).parts
        rest, experts = (
            each.layer_seconds(ranks, *workload) for each in (parts.rest, parts.experts)
        )
        expected_s = alone.layer_seconds(one, *workload).whole_s
        assert rest.whole_s + experts.whole_s == pytest.approx(expected_s + sums_s)
        assert experts.whole_s == pytest.approx(alone.experts_s(one, 8, 16, "float16"))


def test_measured_sums_come_before_the_datasheet() -> None:
    measured = MeasuredSum("V100-32GB", 2, 1e-3, 0.0, "sums.csv")
    latency = GroupLatency(
        RooflineLatency(SHAPE), sums=(replace(measured, accelerator=group(2).accelerator.name),)
    )
    plain = LATENCY.layer_decode_s(group(2), 8, 4, 100, "float16")
    sum_s = Collectives.of(group(2)).sum_s(4 * SHAPE.hidden_size * 2)
    with_measured = latency.layer_decode_s(group(2), 8, 4, 100, "float16")
    assert with_measured == pytest.approx(plain + 2 * (1e-3 - sum_s))
    assert "sums.csv" in latency.provenance(group(2), "float16", (8,))


def test_hop_reaches_every_rank() -> None:
    to_one = transfer_s(CLUSTER, CLUSTER.devices[4], CLUSTER.devices[0], 1e6)
    to_group = transfer_s(CLUSTER, CLUSTER.devices[4], group(4), 1e6)
    latency_s, per_byte_s = Collectives.of(group(4)).broadcast_terms
    assert to_group == pytest.approx(to_one + latency_s + 1e6 * per_byte_s)


def test_groups_are_equal_devices_of_one_node() -> None:
    with pytest.raises(SpecError, match="cannot be one group"):
        group_of(CLUSTER.devices[3:5])
    names = [device.name for device in CLUSTER.devices]
    found = grouped_cluster(CLUSTER, ((names[4], names[6]), (names[0],)))
    assert [device.label for device in found.devices] == [f"{names[4]}+2", names[0]]
    assert found.devices[0].name == names[4]
    assert found.fingerprint() != CLUSTER.fingerprint()
