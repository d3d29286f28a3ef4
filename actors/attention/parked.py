"""Keys and values of preempted requests in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.messages import EVERY_KEY, Park


class ParkedTokens:
    """At most `most_tokens` tokens, by key, in copies of the parts of a cache on `device`.

    From and to a GPU copies are queued like its kernels, without waiting: what was queued before a
    copy is done before it, and what is queued after it is done after it. Such memory is pinned;
    torch keeps freed blocks for the next ones.
    """

    def __init__(self, most_tokens: int, device: torch.device) -> None:
        self._most_tokens = most_tokens
        self._pinned = device.type == "cuda"
        self._held: dict[int, tuple[int, list[Tensor]]] = {}  # tokens and their copies

    @property
    def tokens(self) -> int:
        """The number of tokens that lie here."""
        return sum(tokens for tokens, _ in self._held.values())

    def forget(self, keys: Sequence[int]) -> None:
        """Free what lies under `keys`, or all of it; keys without anything are ignored."""
        for key in keys:
            if key == EVERY_KEY:
                self._held.clear()
            else:
                self._held.pop(key, None)

    def park(self, park: Park, parts: Sequence[Tensor]) -> None:
        """Copy `parts`, each of which has the tokens of `park` in one of the cache's tensors.

        Raises RuntimeError where there would be too many tokens.
        """
        if park.key in self._held or self.tokens + park.tokens > self._most_tokens:
            raise RuntimeError(
                f"{park.tokens} tokens are to be parked as number {park.key} beside "
                f"{self.tokens}; at most {self._most_tokens} may be, each number once"
            )
        self._held[park.key] = park.tokens, [self._copy(part) for part in parts]

    def _copy(self, part: Tensor) -> Tensor:
        copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=self._pinned)
        return copy.copy_(part, non_blocking=True)

    def restore(self, back: Park, parts: Sequence[Tensor]) -> None:
        """Copy what lies under the key of `back` into `parts`, and free it.

        Raises RuntimeError where so many tokens do not lie there.
        """
        tokens, copies = self._held.pop(back.key, (0, []))
        if tokens != back.tokens:
            raise RuntimeError(
                f"{back.tokens} parked tokens are wanted of number {back.key}, which has {tokens}"
            )
        for part, copy in zip(parts, copies, strict=True):
            part.copy_(copy, non_blocking=True)
