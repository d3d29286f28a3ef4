"""Requests that come at random times into random ranges of the KV cache, in random parts, and are
moved at random: all that a policy may ask of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.messages import (
    Admission,
    MicroBatch,
    Move,
    Request,
    Sampled,
    TokenIds,
    TokenRange,
)

Submit = Callable[[MicroBatch, TokenIds], Sampled]
LARGEST_SPARE = 4


@dataclass(eq=False)
class Running:
    """A request in its room of the cache, of which `stored` tokens are there."""

    request: Request
    slot: int
    room: TokenRange
    tokens: list[int]
    stored: int = 0
    moved: bool = False

    @property
    def own(self) -> TokenRange:
        """What it relies on: its room, after a move only its tokens, as nothing else is cleared."""
        return TokenRange(self.room.begin, self.stored) if self.moved else self.room


@dataclass
class RandomPolicy:
    """Makes random micro-batches of `requests` until all have ended.

    `before` is called with the ranges that belong to requests before every micro-batch; `kinds` and
    `unsampled` note what came up.
    """

    slots: int
    kv_tokens: int
    seed: int
    before: Callable[[Sequence[TokenRange]], None]
    kinds: set[str] = field(default_factory=set)
    unsampled: int = 0
    moves: int = 0

    def run(self, requests: Sequence[Request], submit: Submit) -> dict[str, list[int]]:
        """New tokens of each request by its id."""
        self._draw = np.random.default_rng(self.seed)
        self._running: list[Running] = []
        waiting, done = list(requests), {}
        while waiting or self._running:
            self.before([each.own for each in self._running])
            moves = self._moved()
            newcomers = self._admitted(waiting)
            rows = self._chosen(newcomers)
            if rows:
                batch, token_ids = self._batch(rows, newcomers, moves)
                self._take(rows, batch, submit(batch, token_ids), done)
            else:
                assert not moves
        return done

    def _free(self, own: Running | None, size: int) -> int | None:
        """The begin of `size` token slots that no other request has, at random."""
        taken = np.zeros(self.kv_tokens + 1, dtype=np.int64)
        for each in self._running:
            if each is not own:
                taken[each.room.begin + 1 : each.room.end + 1] = 1
        used = np.cumsum(taken)
        begins = np.flatnonzero(used[size:] == used[:-size])
        return int(self._draw.choice(begins)) if len(begins) else None

    def _moved(self) -> tuple[Move, ...]:
        moves = []
        for each in self._running:
            to = self._free(each, each.room.size)
            if each.stored and to is not None and self._draw.random() < 0.1:
                moves.append(Move(each.room.begin, to, each.stored))
                each.room, each.moved = TokenRange(to, each.room.size), True
        self.moves += len(moves)
        return tuple(moves)

    def _admitted(self, waiting: list[Request]) -> list[Running]:
        newcomers: list[Running] = []
        while waiting and self._draw.random() < 0.5:
            free = sorted(set(range(self.slots)) - {each.slot for each in self._running})
            size = len(waiting[0].prompt_ids) + waiting[0].max_new_tokens - 1
            size += int(self._draw.integers(LARGEST_SPARE))
            begin = self._free(None, size)
            if not free or begin is None:
                break
            request, slot = waiting.pop(0), int(self._draw.choice(free))
            room = TokenRange(begin, size)
            newcomers.append(Running(request, slot, room, list(request.prompt_ids)))
            self._running.append(newcomers[-1])
        return newcomers

    def _chosen(self, newcomers: list[Running]) -> list[Running]:
        others = [each for each in self._running if each not in newcomers]
        some = [each for each in others if self._draw.random() < 0.7]
        rows = newcomers + (some or others)
        return [rows[i] for i in self._draw.permutation(len(rows))]

    def _batch(
        self, rows: list[Running], newcomers: list[Running], moves: tuple[Move, ...]
    ) -> tuple[MicroBatch, TokenIds]:
        missing = [len(each.tokens) - each.stored for each in rows]
        whole = self._draw.random(len(rows)) < 0.4
        parts = [
            n if all_of_it else int(self._draw.integers(1, n + 1))
            for n, all_of_it in zip(missing, whole, strict=True)
        ]
        texts = [r.tokens[r.stored : r.stored + n] for r, n in zip(rows, parts, strict=True)]
        batch = MicroBatch(
            np.array([each.slot for each in rows]),
            np.array([each.stored for each in rows]),
            np.array(parts),
            np.array([each.room.begin for each in rows]),
            tuple(Admission.of(each.slot, each.request, each.room) for each in newcomers),
            moves,
            np.array(parts) == missing,
            sizes=np.array([each.room.size for each in rows]),
        )
        return batch, np.concatenate([np.array(text, dtype=np.int64) for text in texts])

    def _take(
        self, rows: list[Running], batch: MicroBatch, sampled: Sampled, done: dict[str, list[int]]
    ) -> None:
        self.kinds.add(batch.kind)
        self.unsampled += not len(batch.sampled_rows)
        assert len(sampled.token_ids) == len(sampled.finish_reasons) == len(batch.sampled_rows)
        for each, count in zip(rows, batch.counts.tolist(), strict=True):
            each.stored += count
        answers = zip(sampled.token_ids.tolist(), sampled.finish_reasons, strict=True)
        for row, (token, reason) in zip(batch.sampled_rows, answers, strict=True):
            each = rows[row]
            each.tokens.append(token)
            if reason is not None:
                assert reason != "error"
                done[each.request.custom_id] = each.tokens[len(each.request.prompt_ids) :]
                self._running.remove(each)
