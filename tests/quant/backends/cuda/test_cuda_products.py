"""The choice among ways to multiply, timed by a pretend clock, and how columns are split."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from quant.backends.cuda.driver import Kernels
from quant.backends.cuda.packed import _TEST_SHAPE, _TEST_TOKENS
from quant.backends.cuda.products import (
    KERNELS,
    PACKED,
    RESTORED,
    ROW_BUCKETS,
    TENSOR,
    TENSOR_KERNELS,
    Codes,
    CudaProducts,
    Grid,
    has_tensor_cores,
    splits_of,
)
from quant.backends.table import FUSED_TOKENS, TENSOR_TOKENS

CODES = Codes(torch.zeros(256, 512, dtype=torch.uint8), torch.zeros(256, 8, 2), 1024, bits=4)


class Clock:
    """Gives each way the seconds of `speeds` for each row, the restored weight 100 more."""

    def __init__(self, speeds: dict[str, float]) -> None:
        self.speeds = speeds
        self.timed: list[tuple[str, int]] = []

    def __call__(self, work: Callable[[], None]) -> float:
        way = work.func.__name__.removeprefix("_multiply_")  # type: ignore[attr-defined]
        rows = len(work.args[0].x)  # type: ignore[attr-defined]
        self.timed.append((way, rows))
        return self.speeds[way] * rows + (100 if way == "restored" else 0)


def products(
    clock: Clock | None, names: tuple[str, ...] = KERNELS + TENSOR_KERNELS
) -> CudaProducts:
    functions = dict.fromkeys(names, ctypes.c_void_p())
    kernels = Kernels(ctypes.CDLL(None), functions, torch.device("cpu"))
    return CudaProducts(kernels, torch.float16, 80, clock)


@pytest.fixture(autouse=True)
def not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_the_fastest_way_is_timed_once() -> None:
    clock = Clock({"packed": 6.0, "on_tensor_cores": 3.0, "restored": 1.5})
    own = products(clock)
    assert own.way_for(CODES, 33) == TENSOR  # of 64 rows: 192 against 196 and 384
    assert {rows for _, rows in clock.timed} == {64}
    assert len(clock.timed) == 3
    assert own.way_for(CODES, 64) == TENSOR
    assert len(clock.timed) == 3
    assert own.way_for(CODES, 65) == RESTORED
    assert own.way_for(CODES._replace(columns=512), 64) == TENSOR
    assert len(clock.timed) == 9


def test_a_way_that_is_slow_here_is_not_taken() -> None:
    own = products(Clock({"packed": 1.0, "on_tensor_cores": 50.0, "restored": 0.5}))
    assert [own.way_for(CODES, rows) for rows in (1, 2, 3, 100, 128, 200, 256)] == [
        PACKED, PACKED, PACKED, PACKED, PACKED, RESTORED, RESTORED
    ]  # fmt: skip


def test_nothing_is_left_to_time_after_the_warm_up() -> None:
    clock = Clock({"packed": 6.0, "on_tensor_cores": 3.0, "restored": 1.5})
    own = products(clock)
    own.warm_up(CODES)
    assert len(clock.timed) == 3 * len(ROW_BUCKETS)
    for rows in range(1, 300):
        own.way_for(CODES, rows)
    assert len(clock.timed) == 3 * len(ROW_BUCKETS)
    assert own.way_for(CODES, 257) == RESTORED


def test_while_a_graph_is_recorded_an_estimate_stands_and_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock({"packed": 1.0, "on_tensor_cores": 50.0, "restored": 0.5})
    own = products(clock)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert own.way_for(CODES, 32) == TENSOR
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert own.way_for(CODES, 32) == TENSOR  # a replay has the same bits as an eager step
    assert clock.timed == []


def test_estimates_by_what_the_gpu_has() -> None:
    new, old = products(None), products(None, KERNELS)
    assert [new.way_for(CODES, rows) for rows in (2, 3, TENSOR_TOKENS, TENSOR_TOKENS + 1)] == [
        PACKED, TENSOR, TENSOR, RESTORED
    ]  # fmt: skip
    assert old.way_for(CODES, 16) == PACKED
    assert old.way_for(CODES, FUSED_TOKENS + 8) == RESTORED
    assert TENSOR not in old.ways
    assert not has_tensor_cores((6, 1), torch.float16)
    assert has_tensor_cores((7, 0), torch.float16)
    assert not has_tensor_cores((7, 5), torch.bfloat16)
    assert has_tensor_cores((8, 0), torch.bfloat16)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1024, 4096, 5120, 13824, 128256])
@pytest.mark.parametrize("multiprocessors", [40, 80, 108, 132])
def test_columns_are_split_where_rows_leave_multiprocessors_idle(
    width: int, rows: int, multiprocessors: int
) -> None:
    tiles, stages = rows // 128, 40
    splits = splits_of(tiles, stages, width, multiprocessors)
    assert 1 <= splits <= stages
    if 32 <= tiles < multiprocessors:  # fewer leave more than they read
        assert tiles * splits >= 0.75 * multiprocessors
    if tiles >= 4 * multiprocessors:
        assert splits == 1
    assert tiles * splits * width * 4096 <= 1 << 25


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("tokens", _TEST_TOKENS)
def test_the_self_test_splits_columns(tokens: int, bits: int) -> None:
    assert all(
        Grid.of((*_TEST_SHAPE, bits), tokens, each).splits > 1 for each in (40, 80, 108, 132)
    )


def test_no_more_parts_than_stages() -> None:
    assert splits_of(1, 1, 1, 80) == 1
    assert splits_of(1, 3, 1, 80) == 3
    assert splits_of(5000, 40, 8, 80) == 1
