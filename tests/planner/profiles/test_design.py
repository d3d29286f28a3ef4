"""The design of profiles: within its space, over all of it, and nothing twice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from planner.profiles.design import DesignSpace, LayerWorkload, design
from planner.scheduling import PHASES, Phase
from quant.common.errors import SpecError

SPACE = DesignSpace()


def all_workloads(phase: Phase) -> Iterator[LayerWorkload]:
    """Every batch size with lengths from the shortest to the longest that the space holds."""
    for batch_size in range(1, 33):
        for length in range(16, 1025, 16):
            workload = LayerWorkload(phase, batch_size, length)
            if SPACE.holds(workload):
                yield workload


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("points", [4, 16, 20])
def test_points_are_different_workloads_of_the_space(phase: Phase, points: int) -> None:
    chosen = design(SPACE, phase, points)
    assert len(set(chosen)) == points
    assert all(SPACE.holds(each) and each.phase == phase for each in chosen)


def test_corners_are_among_the_points() -> None:
    found = {(each.batch_size, each.length) for each in design(SPACE, "prefill", 4)}
    assert {(1, 16), (1, 1024), (32, 16)} <= found
    assert max(batch * length for batch, length in found) == pytest.approx(4096, rel=0.01)


@pytest.mark.parametrize("phase", PHASES)
def test_no_workload_is_far_from_a_point(phase: Phase) -> None:
    """Farther than a grid of as many points over the box would leave one."""
    where = np.log([(w.batch_size, w.length) for w in design(SPACE, phase, 16)])
    spans = np.log([32, 64])
    for each in all_workloads(phase):
        away = (np.log([each.batch_size, each.length]) - where) / spans
        assert np.linalg.norm(away, axis=1).min() < math.hypot(1 / 3, 1 / 3) / 2 + 0.03


def test_a_small_space_is_taken_whole() -> None:
    space = DesignSpace(batch_sizes=(2,), min_length=5, max_length=7)
    chosen = design(space, "decode", 16)
    assert {each.length for each in chosen} == {5, 6, 7}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"batch_sizes": (0, 1)}, "batch_sizes"),
        ({"max_length": 8}, "max_length is 8"),
        ({"prefill_tokens": 8}, "at most 8 tokens"),
    ],
)
def test_impossible_spaces_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(SPACE, **change)  # type: ignore[arg-type]


def test_decode_steps_are_of_like_and_of_unlike_requests() -> None:
    """Those of unlike lengths are half as long to half as long again, as told in the mean."""
    like, unlike = (
        [
            each
            for each in design(SPACE, "decode", 16)
            if each.batch_size > 1 and each.unlike is kind
        ]
        for kind in (False, True)
    )
    assert len(like) > 4
    assert len(unlike) > 4
    assert all(len(set(each.lengths)) == 1 for each in like)
    for each in unlike:
        assert each.lengths[0] == each.length // 2
        assert each.lengths[-1] == 3 * each.length // 2
        assert each.length - 1 <= each.tokens / each.batch_size <= each.length
    assert not any(each.unlike for each in design(SPACE, "prefill", 16))
