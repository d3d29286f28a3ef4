"""Candidate micro-batch sizes of both phases, pruned as in LLM-PQ section 4.3.

`decode` is the paper's xi and `prefill` its eta. Decode is bound by memory traffic, so the global
batch spread evenly over the stages, or a size near that, keeps all stages busy with the fewest
passes over the weights; prefill is bound by computing, so any smaller size may fill the pipeline
sooner (optimization 1: eta in [1, xi]). Where memory allows none of these, the greatest decode size
that it allows takes the place of the even share.
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
    """The pairs worth solving for, decode sizes ascending, then prefill sizes ascending.

    Sizes are powers of two and divisors of the batch, and the even share itself. Raises SpecError
    unless both numbers are at least 1.
    """
    if global_batch < 1 or stages < 1:
        raise SpecError(
            f"a global batch of {global_batch} on {stages} stages cannot be split; give at least "
            "1 of each"
        )
    sizes = _round_sizes(global_batch)
    return _with_prefill_sizes(global_batch, _decode_sizes(global_batch, stages, sizes), sizes)


def pairs_of_job(in_flight: int, stages: int, prompt_length: float) -> tuple[MicroBatches, ...]:
    """The pairs worth solving for in a job, prefill sizes ascending.

    As the number in flight is free too, decode sizes other than its even share add little. Prefill
    sizes are powers of two up to that, and it; beyond one request they have at most
    `MOST_PREFILL_TOKENS` tokens of prompts of the mean `prompt_length`.
    """
    decode = -(-in_flight // stages)
    most = min(decode, max(1, int(MOST_PREFILL_TOKENS // prompt_length)))
    sizes = {1 << power for power in range(most.bit_length())} | {most}
    return tuple(MicroBatches(prefill, decode) for prefill in sorted(sizes))


def pairs_up_to(global_batch: int, most: int) -> tuple[MicroBatches, ...]:
    """The pairs where memory allows no decode size above `most`.

    Decode sizes are `most` and round sizes below it, as far apart as in `micro_batch_pairs`.
    """
    sizes = _round_sizes(global_batch)
    near = {size for size in sizes if most <= NEIGHBOURHOOD**2 * size and size <= most}
    return _with_prefill_sizes(global_batch, _fewest_rows(global_batch, near | {most}), sizes)


def _with_prefill_sizes(
    global_batch: int, decode_sizes: Iterable[int], sizes: set[int]
) -> tuple[MicroBatches, ...]:
    """Pair every decode size with every round prefill size up to it."""
    return tuple(
        MicroBatches(prefill, decode)
        for decode in decode_sizes
        for prefill in _fewest_rows(global_batch, {size for size in sizes if size <= decode})
    )


def _round_sizes(global_batch: int) -> set[int]:
    """Powers of two up to the batch, and its greatest divisor between each two of them."""
    sizes = {global_batch}
    power = 1
    while power <= global_batch:
        between = range(min(2 * power - 1, global_batch), power - 1, -1)
        sizes.add(power)
        sizes.update([next((size for size in between if global_batch % size == 0), power)])
        power *= 2
    return sizes


def _decode_sizes(global_batch: int, stages: int, sizes: set[int]) -> list[int]:
    """The even share and the round sizes near it."""
    even = -(-global_batch // stages)
    near = {
        size
        for size in sizes
        if global_batch <= NEIGHBOURHOOD * size * stages
        and size * stages <= NEIGHBOURHOOD * global_batch
    }
    return _fewest_rows(global_batch, near | {even})


def _fewest_rows(global_batch: int, sizes: set[int]) -> list[int]:
    """Sort sizes and keep only the smallest of those that need equally many micro-batches."""
    smallest: dict[int, int] = {}
    for size in sorted(sizes, reverse=True):
        smallest[-(-global_batch // size)] = size
    return sorted(smallest.values())
