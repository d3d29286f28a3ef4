"""A pretend pipeline with a KV cache of token slots, whose content it checks at every pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.messages import (
    EVERY_KEY,
    Finished,
    FinishReason,
    MicroBatch,
    Request,
    Sampled,
    Sampling,
    TokenIds,
)
from actors.schedule.scheduler import QueueSizes

NUMBERS = 1 << 20  # the token at position p of request r is r * NUMBERS + p, unlike all others


def request(
    number: int,
    prompt: int,
    max_new_tokens: int,
    generated: int = 0,
    expected: int | None = None,
) -> Request:
    """Request `number`, of which so many new tokens are there already."""
    text = tuple(range(number * NUMBERS, number * NUMBERS + prompt + generated))
    return Request(
        str(number),
        text[:prompt],
        max_new_tokens,
        Sampling(),
        text[prompt:],
        expected_tokens=expected,
    )


def sizes_of(
    stages: int, max_batch_size: int, kv_tokens: int, chunk: int = 0, cap: int = 0
) -> QueueSizes:
    """Sizes for the policy `orca`."""
    return QueueSizes(
        stages * max_batch_size,
        prefill_micro_batch=1,
        decode_micro_batch=max_batch_size,
        slot_tokens=kv_tokens,
        policy="orca",
        kv_tokens=kv_tokens,
        max_batch_size=max_batch_size,
        max_batch_tokens=cap,
        prefill_chunk_tokens=chunk,
    )


def assert_right_tokens(
    finished: Sequence[Finished], requests: Sequence[Request], outputs: Sequence[int]
) -> None:
    """Each request ended once, with as many of its own tokens as it should."""
    found = {each.custom_id: each.token_ids for each in finished}
    assert len(found) == len(finished)
    assert found == {
        r.custom_id: tuple(
            int(r.custom_id) * NUMBERS + len(r.prompt_ids) + position for position in range(n)
        )
        for r, n in zip(requests, outputs, strict=True)
    }


@dataclass
class TokenPipeline:
    """Ends each request after its own number of new tokens, in `outputs` by `custom_id`.

    Every stage sees micro-batches in the order of `submit`, so the one store here stands for each
    of theirs: what is parked is kept aside, moves are made, then admitted requests get their slot
    and a cleared range, and what they have parked. Then what a request wrote before must be where
    its range begins, and is added to.

    `fixed_rooms`: requests reserve all that they may need, as under `orca`.
    """

    stages: int
    kv_tokens: int
    outputs: dict[str, int]
    fixed_rooms: bool = True
    batches: list[MicroBatch] = field(default_factory=list)
    names: list[tuple[str, ...]] = field(default_factory=list)  # of the requests of each batch
    n_rsrv: list[int] = field(default_factory=list)  # slots reserved when each was submitted
    under_way: int = 0
    moved: int = 0
    most_parked: int = 0

    def __post_init__(self) -> None:
        self._store = np.full(self.kv_tokens, -1)
        self._holder: dict[int, str] = {}
        self._prompt: dict[str, int] = {}
        self._size: dict[str, int] = {}
        self._reserved: dict[int, int] = {}  # by slot
        self._running: set[int] = set()
        self.parked: dict[int, TokenIds] = {}

    def expect(self, requests: Sequence[Request]) -> None:
        """Note the lengths of requests, which messages do not say."""
        for each in requests:
            self._prompt[each.custom_id] = len(each.prompt_ids)
            self._size[each.custom_id] = len(each.prompt_ids) + each.max_new_tokens

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        self.under_way += 1
        self.batches.append(batch)
        for key in batch.drops:
            _ = self.parked.clear() if key == EVERY_KEY else self.parked.pop(key)
        for park in batch.parks:
            assert park.key not in self.parked
            self.parked[park.key] = self._store[park.begin : park.begin + park.tokens].copy()
        self.most_parked = max(self.most_parked, sum(map(len, self.parked.values())))
        for move in batch.moves:
            taken = self._store[move.begin : move.begin + move.tokens].copy()
            self._store[move.to : move.to + move.tokens] = taken
            self.moved += move.tokens
        for admission in batch.admitted:
            assert admission.slot not in self._running
            size = self._size[admission.custom_id]
            assert admission.room.size == size if self.fixed_rooms else admission.room.size <= size
            assert 0 <= admission.room.begin <= admission.room.end <= self.kv_tokens
            self._holder[admission.slot] = admission.custom_id
            self._reserved[admission.slot] = admission.room.size
            self._store[admission.room.begin : admission.room.end] = -1
        for back in batch.restores:
            self._store[back.begin : back.begin + back.tokens] = self.parked.pop(back.key)
        slots = batch.slots.tolist()
        assert len(set(slots)) == len(slots)
        assert not self._running.intersection(slots), "a request that is still under way"
        self._running.update(slots)
        self._write(batch, token_ids)
        self.names.append(tuple(self._holder[slot] for slot in slots))
        self.n_rsrv.append(sum(self._reserved.values()))
        return batch

    def _write(self, batch: MicroBatch, token_ids: TokenIds) -> None:
        assert batch.sizes is not None
        assert (batch.lengths <= batch.sizes).all()
        assert (batch.begins + batch.sizes <= self.kv_tokens).all()
        ends = batch.counts.cumsum()
        assert len(token_ids) == ends[-1]
        for row, slot in enumerate(batch.slots.tolist()):
            name = self._holder[slot]
            begin, start = int(batch.begins[row]), int(batch.starts[row])
            end = start + int(batch.counts[row])
            assert end <= self._size[name]
            text = int(name) * NUMBERS + np.arange(end)
            assert (self._store[begin : begin + start] == text[:start]).all()
            assert (token_ids[ends[row] - (end - start) : ends[row]] == text[start:]).all()
            self._store[begin : begin + end] = text

    def result(self, handle: MicroBatch) -> Sampled:
        self.under_way -= 1
        self._running.difference_update(handle.slots.tolist())
        tokens: list[int] = []
        reasons: list[FinishReason | None] = []
        for row in handle.sampled_rows.tolist():
            slot = int(handle.slots[row])
            name = self._holder[slot]
            position = int(handle.starts[row] + handle.counts[row])
            tokens.append(int(name) * NUMBERS + position)
            ends = position - self._prompt[name] + 1 == self.outputs[name]
            reasons.append("length" if ends else None)
            if ends:
                del self._reserved[slot]
        return Sampled(np.array(tokens, dtype=np.int64), tuple(reasons))
