"""The batch that a plan is made for: how many requests, how long, and how much to generate."""

from __future__ import annotations

from dataclasses import dataclass

from quant.errors import SpecError


@dataclass(frozen=True)
class Workload:
    """`global_batch` requests of `prompt_length` tokens that each get `new_tokens` more.

    Lengths are in tokens (LLM-PQ: B, s, n). SpecError unless all are positive integers.
    """

    global_batch: int
    prompt_length: int
    new_tokens: int

    def __post_init__(self) -> None:
        """Check the three numbers."""
        for name in ("global_batch", "prompt_length", "new_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecError(f"{name} is {value!r}; it must be a whole number of at least 1")

    @property
    def total_length(self) -> int:
        """Tokens of one request when it is done, which the KV cache has to hold."""
        return self.prompt_length + self.new_tokens
