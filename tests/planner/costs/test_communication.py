"""Transfer times against bytes over bandwidth."""

from __future__ import annotations

import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.communication import Transfers, hidden_bytes
from planner.model.finding import model_shape
from tests.planner.problems import transfer_s

SHAPE = model_shape("opt-30b")
CLUSTER = ClusterSpec.from_counts(["T4", "V100-32G"], [2, 1], internode_gbit_per_s=8)


def test_each_hop_is_latency_and_bytes_over_rate() -> None:
    transfers = Transfers(CLUSTER, SHAPE, (2, 4), prompt_length=512)
    prefill, decode = transfers.of_order(CLUSTER.devices, ["float16"] * 3)
    latency = [
        CLUSTER.link_latency_s(CLUSTER.devices[i], CLUSTER.devices[(i + 1) % 3]) for i in range(3)
    ]
    payload = 2 * 512 * 7168 * 2
    assert prefill - latency == pytest.approx([payload / 16e9, payload / 1e9, 2 * 4 / 1e9])
    small = 4 * 7168 * 2
    assert decode - latency == pytest.approx([small / 16e9, small / 1e9, 4 * 4 / 1e9])


def test_senders_type_decides() -> None:
    assert hidden_bytes(SHAPE, 3, "float32") == 2 * hidden_bytes(SHAPE, 3, "bfloat16")


def test_one_stage_sends_nothing() -> None:
    one = CLUSTER.devices[0]
    assert transfer_s(CLUSTER, one, one, 10**9) == 0
    transfers = Transfers(CLUSTER, SHAPE, (1, 1), prompt_length=512)
    prefill, decode = transfers.of_order([one], ["float16"])
    assert prefill.tolist() == decode.tolist() == [0.0]
