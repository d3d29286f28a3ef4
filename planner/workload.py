"""What a plan is made for: a batch of requests in flight at once, or a job of many prompts."""

from __future__ import annotations

from dataclasses import dataclass

from planner.lengths import Lengths
from planner.model.shape import ModelShape
from quant.common.errors import SpecError

MAX_REQUESTS = 2**20
MAX_TOKENS = 2**22
"""Far beyond any batch in memory and any model's context: larger numbers are typing errors."""
MOST_PROMPTS = 10**10


@dataclass(frozen=True)
class Workload:
    """`global_batch` requests of `prompt_length` tokens that each get `new_tokens` more.

    Lengths are in tokens (LLM-PQ: B, s, n). `slot_tokens`: the most of prompt and new tokens
    together, where no request has the most of both; None where one may. SpecError unless all are
    whole numbers of at least 1, at most `MAX_REQUESTS` requests and `MAX_TOKENS` tokens in each
    length, and a slot has room for either length but not for more than both.
    """

    global_batch: int
    prompt_length: int
    new_tokens: int
    slot_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the range of the numbers."""
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
        slot = self.slot_tokens
        if slot is None:
            return
        least, most = max(self.prompt_length, self.new_tokens) + 1, self._sum
        if not isinstance(slot, int) or isinstance(slot, bool) or not least <= slot <= most:
            raise SpecError(
                f"slot_tokens is {slot!r}; slots for {self.prompt_length} prompt or "
                f"{self.new_tokens} new tokens must have {least} to {most}"
            )

    @property
    def _sum(self) -> int:
        return self.prompt_length + self.new_tokens

    @property
    def total_length(self) -> int:
        """Tokens of a KV slot: the most that one request has when it is done."""
        return self._sum if self.slot_tokens is None else self.slot_tokens

    def has_room(self, prompt_tokens: int, new_tokens: int) -> bool:
        """Whether a slot has room for a request of these lengths."""
        return (
            prompt_tokens <= self.prompt_length
            and new_tokens <= self.new_tokens
            and prompt_tokens + new_tokens <= self.total_length
        )


@dataclass(frozen=True)
class Job:
    """`prompts` prompts, of which a plan has as many in flight as serves the whole job best.

    `lengths` is a sample of theirs; the longest of it are the longest there are.
    `default_new_tokens`: the most that prompts without a limit of their own may generate, None for
    the longest output. SpecError unless there is at least one prompt, and at most `MOST_PROMPTS`,
    and the limit is within `MAX_TOKENS`.
    """

    prompts: int
    lengths: Lengths
    default_new_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the number of prompts, their default limit and the longest lengths."""
        given = [("prompts", self.prompts, MOST_PROMPTS)]
        if self.default_new_tokens is not None:
            given.append(("default_new_tokens", self.default_new_tokens, MAX_TOKENS))
        for name, value, most in given:
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise SpecError(f"{name} is {value!r}; it must be a whole number of 1 to {most}")
        self.in_flight(1)

    @classmethod
    def of(cls, prompts: int, prompt_length: int, new_tokens: int) -> Job:
        """A job of prompts that are all alike."""
        return cls(prompts, Lengths.constant(prompt_length, new_tokens))

    @property
    def output_tokens(self) -> float:
        """Tokens that all prompts together generate."""
        return self.prompts * self.lengths.mean_output

    def in_flight(self, requests: int) -> Workload:
        """The workload of `requests` slots, each with room for every row."""
        prompt, output = self.lengths.longest_prompt, self.lengths.longest_output
        total = self.lengths.longest_total
        slot = None if total is None or total == prompt + output else total
        return Workload(requests, prompt, output, slot)


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
        "(max_position_embeddings of its config.json); lower --s or --n"
    )
