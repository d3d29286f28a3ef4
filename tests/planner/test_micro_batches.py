from __future__ import annotations

import pytest

from planner.micro_batches import MicroBatches, micro_batch_pairs
from quant.common.errors import SpecError


def test_the_paper_s_batch_on_four_stages() -> None:
    pairs = micro_batch_pairs(32, 4)
    decode = {4: [1, 2, 4], 8: [1, 2, 4, 8], 16: [1, 2, 4, 8, 16]}
    assert pairs == tuple(MicroBatches(p, d) for d, sizes in decode.items() for p in sizes)


@pytest.mark.parametrize("stages", [1, 3, 8, 16])
@pytest.mark.parametrize("batch", [1, 7, 30, 97, 128, 720])
def test_pairs_keep_to_the_batch_and_to_each_other(batch: int, stages: int) -> None:
    pairs = micro_batch_pairs(batch, stages)
    assert len(set(pairs)) == len(pairs) > 0
    for pair in pairs:
        assert 1 <= pair.prefill <= pair.decode <= batch
        rounded_up = -(-batch // stages)
        assert pair.decode <= max(2 * batch / stages, rounded_up)
        assert pair.decode >= min(batch / (2 * stages), rounded_up)


@pytest.mark.parametrize("batch", [1, 7, 30, 97, 128, 720])
@pytest.mark.parametrize("stages", [1, 3, 8])
def test_the_even_share_is_always_among_them(batch: int, stages: int) -> None:
    """In number of micro-batches: a smaller size with as many of them is never slower."""
    even = -(-batch // stages)
    counts = {-(-batch // pair.decode) for pair in micro_batch_pairs(batch, stages)}
    assert -(-batch // even) in counts


def test_one_stage_may_decode_the_whole_batch_at_once() -> None:
    assert MicroBatches(1, 30) in micro_batch_pairs(30, 1)


def test_no_two_prefill_sizes_need_equally_many_micro_batches() -> None:
    for decode in {pair.decode for pair in micro_batch_pairs(97, 2)}:
        sizes = [pair.prefill for pair in micro_batch_pairs(97, 2) if pair.decode == decode]
        assert len({-(-97 // size) for size in sizes}) == len(sizes)


@pytest.mark.parametrize(("batch", "stages"), [(0, 2), (4, 0), (-1, 1)])
def test_nothing_to_split_is_refused(batch: int, stages: int) -> None:
    with pytest.raises(SpecError, match="at least 1"):
        micro_batch_pairs(batch, stages)
