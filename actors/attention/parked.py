"""Keys and values in host memory: of preempted requests, on the way to other stages, and of heads
that prompts share.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from actors.messages import EVERY_KEY, Park


class ParkedCopies(NamedTuple):
    """Copies of `tokens` tokens in all tensors of a cache, `[kv_heads, tokens, ...]`."""

    tokens: int
    copies: tuple[Tensor, ...]


class ParkedTokens:
    """At most `most_tokens` tokens, by key, in copies of the parts of a cache on `device`.

    From and to a GPU copies are queued like its kernels, without waiting: what was queued before a
    copy is done before it, and what is queued after it is done after it. Such memory is pinned;
    torch keeps freed blocks for the next ones. Any thread may call `forget`, `found` and `put`.
    """

    def __init__(self, most_tokens: int, device: torch.device) -> None:
        self._most_tokens = most_tokens
        self._pinned = device.type == "cuda"
        self._lock = Lock()
        self._held: dict[int, ParkedCopies] = {}

    @property
    def tokens(self) -> int:
        return sum(held.tokens for held in tuple(self._held.values()))

    def forget(self, keys: Sequence[int]) -> None:
        """Free what lies under `keys`; keys without anything are ignored."""
        with self._lock:
            if EVERY_KEY in keys:
                self._held = {key: held for key, held in self._held.items() if key < EVERY_KEY}
            for key in keys:
                self._held.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()

    def park(self, park: Park, parts: Sequence[Tensor]) -> None:
        """Copy `parts`, each of which has the tokens of `park` in one of the cache's tensors.

        Raises RuntimeError where there would be too many tokens.
        """
        with self._lock:
            if park.key in self._held or not self._has_room(park.tokens):
                raise RuntimeError(
                    f"{park.tokens} tokens are to be parked as number {park.key} beside "
                    f"{self.tokens}; at most {self._most_tokens} may be, each number once"
                )
            self._held[park.key] = self._copies(park, parts)

    def keep(self, park: Park, parts: Sequence[Tensor]) -> None:
        """Copy `parts` as `park` does, but where there is no room, do nothing."""
        with self._lock:
            self._held.pop(park.key, None)  # of a run before a fault
            if self._has_room(park.tokens):
                self._held[park.key] = self._copies(park, parts)

    def _has_room(self, tokens: int) -> bool:
        return self.tokens + tokens <= self._most_tokens

    def _copies(self, park: Park, parts: Sequence[Tensor]) -> ParkedCopies:
        made = (self.empty(each.shape, each.dtype).copy_(each, non_blocking=True) for each in parts)
        return ParkedCopies(park.tokens, tuple(made))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._pinned)

    def found(self, key: int) -> ParkedCopies | None:
        """What lies under `key`, once the device has done what was queued; None: nothing."""
        return self._held.get(key)

    def put(self, key: int, held: ParkedCopies) -> bool:
        """Keep copies that were made elsewhere under `key`; False where there is no room."""
        with self._lock:
            if key in self._held or not self._has_room(held.tokens):
                return False
            self._held[key] = held
            return True

    def restore(self, back: Park, parts: Sequence[Tensor]) -> None:
        """Copy what lies under the key of `back` into `parts`, and free it, unless it is a head.

        Raises RuntimeError where so many tokens do not lie there.
        """
        with self._lock:
            take = self._held.get if back.key < EVERY_KEY else self._held.pop
            tokens, copies = take(back.key, ParkedCopies(0, ()))
        if tokens != back.tokens:
            raise RuntimeError(
                f"{back.tokens} parked tokens are wanted of number {back.key}, which has {tokens}"
            )
        for part, copy in zip(parts, copies, strict=True):
            part.copy_(copy, non_blocking=True)
