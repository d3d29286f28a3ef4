"""Candidate micro-batch sizes, pruned as in LLM-PQ section 4.3: `decode` (xi) near the even share
of the batch, which keeps stages busy with the fewest passes over the weights, or the greatest that
memory allows; `prefill` (eta) up to it (optimization 1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quant.common.errors import SpecError

NEIGHBOURHOOD = 2  # decode sizes lie within this factor of the even share

MOST_PREFILL_TOKENS = 8192
"""Tokens of a job's prefill micro-batches: with more of them no GPU computes any faster, while
decode steps wait longer."""


@dataclass(frozen=True)
class MicroBatches:
    """Requests in one prefill and one decode micro-batch."""

    prefill: int
    decode: int


def micro_batch_pairs(global_batch: int, stages: int) -> tuple[MicroBatches, ...]:
    """The pairs worth solving for, by decode then prefill size: powers of two, divisors of the
    batch, the even share. SpecError unless both numbers are at least 1.
    """
    if global_batch < 1 or stages < 1:
        raise SpecError(
            f"a global batch of {global_batch} on {stages} stages cannot be split; give at least "
            "1 of each"
        )
    sizes = _round_sizes(global_batch)
    return _with_prefill_sizes(global_batch, _decode_sizes(global_batch, stages, sizes), sizes)


def pairs_of_job(in_flight: int, stages: int, prompt_length: float) -> tuple[MicroBatches, ...]:
    """The pairs of a job, prefill sizes ascending in powers of two up to `MOST_PREFILL_TOKENS`; as
    the number in flight is free, decode sizes other than the even share add little.
    """
    decode = -(-in_flight // stages)
    most = min(decode, max(1, int(MOST_PREFILL_TOKENS // prompt_length)))
    sizes = {1 << power for power in range(most.bit_length())} | {most}
    return tuple(MicroBatches(prefill, decode) for prefill in sorted(sizes))


def pairs_up_to(global_batch: int, most: int) -> tuple[MicroBatches, ...]:
    """The pairs with decode sizes of `most` and round ones below, as far apart as in
    `micro_batch_pairs`.
    """
    sizes = _round_sizes(global_batch)
    near = {size for size in sizes if most <= NEIGHBOURHOOD**2 * size and size <= most}
    return _with_prefill_sizes(global_batch, _fewest_rows(global_batch, near | {most}), sizes)


def _with_prefill_sizes(
    global_batch: int, decode_sizes: Iterable[int], sizes: set[int]
) -> tuple[MicroBatches, ...]:
    return tuple(
        MicroBatches(prefill, decode)
        for decode in decode_sizes
        for prefill in _fewest_rows(global_batch, {size for size in sizes if size <= decode})
    )


def _round_sizes(global_batch: int) -> set[int]:
    sizes = {global_batch}
    power = 1
    while power <= global_batch:
        between = range(min(2 * power - 1, global_batch), power - 1, -1)
        sizes.add(power)
        sizes.update([next((size for size in between if global_batch % size == 0), power)])
        power *= 2
    return sizes


def _decode_sizes(global_batch: int, stages: int, sizes: set[int]) -> list[int]:
    even = -(-global_batch // stages)
    near = {
        size
        for size in sizes
        if global_batch <= NEIGHBOURHOOD * size * stages
        and size * stages <= NEIGHBOURHOOD * global_batch
    }
    return _fewest_rows(global_batch, near | {even})


def _fewest_rows(global_batch: int, sizes: set[int]) -> list[int]:
    smallest: dict[int, int] = {}
    for size in sorted(sizes, reverse=True):
        smallest[-(-global_batch // size)] = size
    return sorted(smallest.values())
