"""What a plan is made for: a batch of requests in flight at once, or a job of many prompts; and
the micro-batch sizes that it may have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import numpy as np

from planner.assumed_predictor import AssumedPredictor
from planner.lengths import NO_HEADS, Lengths, PlannedHeads
from planner.model.shape import ModelShape
from planner.scheduling import (
    BOUNDED,
    FORESEEING,
    GROWTH,
    KV_TOKEN_POLICIES,
    PREDICTING,
    PolicyName,
)
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
    """The pairs worth solving for, pruned as in LLM-PQ section 4.3: powers of two, divisors of the
    batch, the even share. `decode` (xi) is near the even share, which keeps stages busy with the
    fewest passes over the weights; `prefill` (eta) up to it (optimization 1). SpecError unless both
    numbers are at least 1.
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
    """The pairs with decode sizes of `most` and round ones below, apart as `micro_batch_pairs`."""
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


ROOM_SHARE, ROOM_TOKENS = 8, 64
"""Token slots of a window's room beyond the window: a share of it, at least so many. Its latest
tokens are copied once in so many steps, which then move a sixteenth more than attention reads."""


def window_room(window: int | None, requests: int, kv_tokens: int) -> int | None:
    """Token slots of the room of each of `requests` in a layer that sees `window` tokens; None
    where it keeps all tokens, as it sees all, or as their `kv_tokens` slots are no more than those
    of all rooms.
    """
    if window is None:
        return None
    room = window + max(window // ROOM_SHARE, min(ROOM_TOKENS, window))
    return room if requests * room < kv_tokens else None


MAX_REQUESTS = 2**20
MAX_TOKENS = 2**22
"""Far beyond any batch in memory and any model's context: larger numbers are typing errors."""
MOST_PROMPTS = 10**10

HOLES = 0.05
"""Share of token slots that stays free where requests reserve different numbers: with none, ranges
of the conversation trace move by ten tokens for each token of a request (docs/scheduling.md).
"""
GROWING_HOLES = 0.02
"""The same where ranges grow: half of what they grow by is empty in the mean besides."""


def holes_of(policy: PolicyName) -> float:
    return GROWING_HOLES if policy == FORESEEING else HOLES


@dataclass(frozen=True)
class Workload:
    """`global_batch` requests of `prompt_length` tokens that each get `new_tokens` more (LLM-PQ: B,
    s, n). `slot_tokens`: the most of both together, None for the sum. `n_slots`: the token slots of
    the KV cache, None for the longest each. Prompts may share `heads`, whose slots each has all the
    same. SpecError unless whole numbers from 1 up to `MAX_REQUESTS` and `MAX_TOKENS`, and slots
    with room for the longest but not more than all need.
    """

    global_batch: int
    prompt_length: int
    new_tokens: int
    slot_tokens: int | None = None
    n_slots: int | None = None
    heads: PlannedHeads = NO_HEADS

    def __post_init__(self) -> None:
        limits = {
            "global_batch": MAX_REQUESTS,
            "prompt_length": MAX_TOKENS,
            "new_tokens": MAX_TOKENS,
        }
        for name, most in limits.items():
            value = getattr(self, name)
            if not _is_number(value) or value < 1:
                raise SpecError(f"{name} is {value!r}; it must be a whole number of at least 1")
            if value > most:
                raise SpecError(f"{name} is above {most}, the most that can be planned; lower it")
        self.heads.check(self.prompt_length)
        slot = self.slot_tokens
        least, most = max(self.prompt_length, self.new_tokens) + 1, self._sum
        if slot is not None and not (_is_number(slot) and least <= slot <= most):
            raise SpecError(
                f"slot_tokens is {slot!r}; slots for {self.prompt_length} prompt or "
                f"{self.new_tokens} new tokens must have {least} to {most}"
            )
        least, most = self.total_length, self.global_batch * self.total_length
        if self.n_slots is not None and not (
            _is_number(self.n_slots) and least <= self.n_slots <= most
        ):
            raise SpecError(
                f"n_slots is {self.n_slots!r}; for {self.global_batch} requests of at most {least} "
                f"tokens it must be {least} to {most}"
            )

    @property
    def _sum(self) -> int:
        return self.prompt_length + self.new_tokens

    @property
    def total_length(self) -> int:
        """Tokens of a KV slot: the most that one request has when it is done."""
        return self._sum if self.slot_tokens is None else self.slot_tokens

    @property
    def kv_tokens(self) -> int:
        return self.n_slots or self.global_batch * self.total_length

    @property
    def reservable_tokens(self) -> int:
        """The token slots that requests may reserve: without `HOLES` where they differ."""
        return self.reservable_under(BOUNDED)

    def reservable_under(self, policy: PolicyName) -> int:
        """The same under a policy of `KV_TOKEN_POLICIES`."""
        if self.n_slots is None:
            return self.kv_tokens
        return max(self.total_length, int((1 - holes_of(policy)) * self.n_slots))

    @property
    def equal_slots(self) -> int:
        """The requests that the KV cache has room for where all of them are of the longest."""
        return self.kv_tokens // self.total_length

    def room(self, window: int | None) -> int | None:
        """Token slots of a request's room in layers of this window: see `window_room`."""
        return window_room(window, self.global_batch, self.kv_tokens)

    def has_room(self, prompt_tokens: int, new_tokens: int) -> bool:
        return (
            prompt_tokens <= self.prompt_length
            and new_tokens <= self.new_tokens
            and prompt_tokens + new_tokens <= self.total_length
        )


@dataclass(frozen=True)
class Job:
    """`prompts` prompts, of which a plan has the best number in flight. `lengths` is a sample with
    the longest. `default_new_tokens`: of prompts without a limit, None for the longest output.
    `predictor`: by which `s3` reserves. Prompts may share `heads`. SpecError for numbers out of
    range.
    """

    prompts: int
    lengths: Lengths
    default_new_tokens: int | None = None
    predictor: AssumedPredictor | None = None
    heads: PlannedHeads = NO_HEADS

    def __post_init__(self) -> None:
        given = [("prompts", self.prompts, MOST_PROMPTS)]
        if self.default_new_tokens is not None:
            given.append(("default_new_tokens", self.default_new_tokens, MAX_TOKENS))
        for name, value, most in given:
            if not _is_number(value) or not 1 <= value <= most:
                raise SpecError(f"{name} is {value!r}; it must be a whole number of 1 to {most}")
        self.in_flight(1)

    @cached_property
    def computed_tokens(self) -> float:
        """Mean tokens of a prompt that are computed."""
        return float(np.mean([self.heads.computed(each) for each in self.lengths.prompt_tokens]))

    @classmethod
    def of(cls, prompts: int, prompt_length: int, new_tokens: int) -> Job:
        return cls(prompts, Lengths.constant(prompt_length, new_tokens))

    @classmethod
    def of_batch(cls, batch: Workload) -> Job:
        lengths = Lengths.constant(batch.prompt_length, batch.new_tokens)
        return cls(batch.global_batch, lengths, heads=batch.heads)

    @property
    def output_tokens(self) -> float:
        return self.prompts * self.lengths.mean_output

    @cached_property
    def _mean_grown(self) -> float:
        return self.lengths.mean_grown(GROWTH)

    @cached_property
    def _mean_predicted(self) -> float:
        if self.predictor is None:
            return self.lengths.mean_reserved
        return self.predictor.mean_reserved(self.lengths)

    def mean_held(self, policy: PolicyName) -> float:
        """Mean token slots of a request in flight: by what it has, by its prediction, or of its
        longest answer.
        """
        if policy == FORESEEING:
            return self._mean_grown
        return self._mean_predicted if policy in PREDICTING else self.lengths.mean_reserved

    def in_flight(self, requests: int, policy: PolicyName = "static") -> Workload:
        """The workload of so many requests in flight, any of which may be the longest. Under `orca`
        and `exegpt` they have the slots that so many reserve in the mean, over the time each takes,
        and `HOLES`; under `s3` those that ranges have which grow with their answers, and under
        `s3-published` those that are predicted.
        """
        prompt, output = self.lengths.longest_prompt, self.lengths.longest_output
        total = self.lengths.longest_total
        slot = None if total is None or total == prompt + output else total
        alike = Workload(requests, prompt, output, slot, heads=self.heads)
        if policy not in KV_TOKEN_POLICIES:
            return alike
        needed = ceil(requests * self.mean_held(policy) / (1 - holes_of(policy)))
        needed = max(alike.total_length, needed)
        return replace(alike, n_slots=needed) if needed < alike.kv_tokens else alike


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_length(shape: ModelShape, workload: Workload) -> None:
    """Raise SpecError where requests exceed the model's context; ALiBi has no limit."""
    if shape.alibi or workload.total_length <= shape.max_positions:
        return
    if workload.slot_tokens is None:
        tokens = f"{workload.prompt_length} prompt and {workload.new_tokens} new tokens are"
    else:
        tokens = "prompt and new tokens of the longest request are"
    raise SpecError(
        f"{tokens} {workload.total_length}, but {shape.name} has {shape.max_positions} positions "
        "(by max_position_embeddings and rope_scaling of its config.json); lower --s or --n"
    )
