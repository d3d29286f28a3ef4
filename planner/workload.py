"""The batch that a plan is made for: how many requests, how long, and how much to generate."""

from __future__ import annotations

from dataclasses import dataclass

from planner.model.shape import ModelShape
from quant.common.errors import SpecError

MAX_REQUESTS = 2**20
MAX_TOKENS = 2**22
"""Far beyond any batch in memory and any model's context: larger numbers are typing errors."""


@dataclass(frozen=True)
class Workload:
    """`global_batch` requests of `prompt_length` tokens that each get `new_tokens` more.

    Lengths are in tokens (LLM-PQ: B, s, n). SpecError unless all are whole numbers of
    at least 1, at most `MAX_REQUESTS` requests and `MAX_TOKENS` tokens in each length.
    """

    global_batch: int
    prompt_length: int
    new_tokens: int

    def __post_init__(self) -> None:
        """Check the range of the three numbers."""
        limits = {
            "global_batch": MAX_REQUESTS,
            "prompt_length": MAX_TOKENS,
            "new_tokens": MAX_TOKENS,
        }
        for name, most in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecError(f"{name} is {value!r}; it must be a whole number of at least 1")
            if value > most:
                raise SpecError(f"{name} is above {most}, the most that can be planned; lower it")

    @property
    def total_length(self) -> int:
        """Tokens of one request when it is done, which the KV cache has to hold."""
        return self.prompt_length + self.new_tokens


def check_length(shape: ModelShape, workload: Workload) -> None:
    """Raise SpecError where requests exceed the model's context; ALiBi has no limit."""
    if not shape.alibi and workload.total_length > shape.max_positions:
        raise SpecError(
            f"{workload.prompt_length} prompt and {workload.new_tokens} new tokens are "
            f"{workload.total_length}, but {shape.name} has {shape.max_positions} positions "
            "(max_position_embeddings of its config.json); lower --s or --n"
        )
