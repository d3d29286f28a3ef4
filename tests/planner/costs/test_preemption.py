"""From how many tokens copying a request's keys and values is cheaper than computing them."""

from __future__ import annotations

import numpy as np
import pytest

from planner.costs.communication import COPY_LAUNCH_S, HostCopies, park_tokens_from
from planner.optimiser.problem import FloatArray

Stage = tuple[HostCopies, FloatArray]

MIB = 2**20


def stage_of(
    bytes_per_token: float, bytes_per_s: float, s_per_token: float, tensors: int = 0
) -> Stage:
    compute_s = s_per_token * np.arange(1, 1001)
    return HostCopies(bytes_per_token, tensors, bytes_per_s), compute_s


def parked_from(*stages: Stage) -> int:
    copies, compute_s = zip(*stages, strict=True)
    return park_tokens_from(copies, compute_s)


def test_copying_takes_its_bytes_twice_and_every_tensor_a_start() -> None:
    """LLaMA-33B's 1.5 MiB a token over PCIe 4.0 x8, as in the paper's environment."""
    copies = HostCopies(1.5 * MIB, 120, 16e9)
    assert 2 * copies.one_way_s(100) == pytest.approx(2 * (150 * MIB / 16e9 + 120 * COPY_LAUNCH_S))


@pytest.mark.parametrize("s_per_token", [1e-4, 2e-4, 2.01e-4, 4e-4, 1.0])
@pytest.mark.parametrize("tensors", [0, 40])
def test_copying_pays_from_where_its_starts_are_made_up_for(
    tensors: int, s_per_token: float
) -> None:
    """1 MB a token at 10 GB/s there and back: 200 us a token, beside the starts."""
    found = parked_from(stage_of(1e6, 10e9, s_per_token, tensors))
    starts_s = 2 * tensors * COPY_LAUNCH_S
    cheaper = [n for n in range(1, 1001) if s_per_token * n > 2e-4 * n + starts_s]
    assert found == (cheaper[0] if cheaper else 0)
    assert (found > 0) == (s_per_token > 2e-4)


def test_the_slowest_stage_counts_either_way() -> None:
    """One stage has a slow way to its host, another computes slowly: they work side by side."""
    slow_link, slow_device = stage_of(1e6, 1e9, 1e-5), stage_of(1e6, 100e9, 1e-3)
    assert parked_from(slow_link) == 0
    assert parked_from(slow_device) == 1
    assert parked_from(slow_link, slow_device) == 0
    slower = stage_of(1e6, 100e9, 2.1e-3)
    assert parked_from(slow_link, slower) == 1


def test_all_longer_requests_are_cheaper_to_copy_too() -> None:
    """Measured times are not straight lines."""
    compute_s = np.concatenate([[1.0] * 10, 1e-3 * np.arange(11, 101)])
    copies = HostCopies(1e6, 0, 1e8)
    copy_s = 2 * copies.one_way_s(np.arange(1.0, 101))
    assert (copy_s[:10] < compute_s[:10]).all()
    assert parked_from((copies, compute_s)) == 0
    steep_s = 1e-3 * np.arange(1, 101) ** 1.9
    least = parked_from((copies, steep_s))
    assert 1 < least <= 100
    assert copy_s[least - 2] >= steep_s[least - 2]
    assert (copy_s[least - 1 :] < steep_s[least - 1 :]).all()
