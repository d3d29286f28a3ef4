"""What generates tokens for the server: its requests, its tokens, what it tells of itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from actors.messages import Request
from actors.sampling_options import Sampling
from llmpq.rows.row import Row
from llmpq.tokenizing.answer_text import FinishReason as FinishReason
from llmpq.tokenizing.answer_text import TokenEvent as TokenEvent
from llmpq.tokenizing.reasoning import Markers
from llmpq.tokenizing.tool_calls import CallReading

EngineStatus = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True)
class EngineLimits:
    """Tokens that fit: of a prompt, of an answer, and of both together in a slot.

    `default_new_tokens`: those of an answer whose request names no limit. `vocab_size` is the
    number of token ids.
    """

    prompt_tokens: int
    new_tokens: int
    slot_tokens: int
    default_new_tokens: int
    vocab_size: int

    def room(self, prompt_tokens: int) -> int:
        """Most new tokens after so many of a prompt."""
        return min(self.new_tokens, self.slot_tokens - prompt_tokens)


@dataclass(frozen=True)
class QueueState:
    """Generations that wait and that have one of the `slots`, token slots of the KV cache, and what
    the plans of what is loaded predict (0: nothing).
    """

    waiting: int
    running: int
    slots: int
    kv_tokens_used: int
    kv_tokens: int
    planned_tokens_per_s: float = 0.0


class PromptError(Exception):
    """A prompt that has no token ids; its text says why."""


class FormError(Exception):
    """A form that answers cannot have; its text says why."""


class PromptTooLongError(Exception):
    """A prompt that the engine has no room for; its text says how long it is: "812 tokens"."""


class EngineStoppingError(Exception): ...


class GenerationError(Exception):
    """A generation that failed through no fault of the request; its text must quote no prompt."""


class Engine(Protocol):
    @property
    def model_name(self) -> str:
        """Name of the model as users know it."""

    @property
    def adapters(self) -> Collection[str]:
        """Names of adapters that requests may choose in place of the model alone."""

    @property
    def created_s(self) -> int:
        """Unix time at which the model was loaded, in seconds."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def sampling(self) -> Sampling:
        """Sampling of requests where they name none of their own."""

    @property
    def markers(self) -> Markers | None:
        """What the model's reasoning stands between, if it has such tokens."""

    def call_reading(self, options: Mapping[str, Any]) -> CallReading | None:
        """How calls of tools are read in the answer to a chat with such `Row.prompt_options`."""

    @property
    def status(self) -> EngineStatus:
        """Whether requests are taken: only when `ready`."""

    @property
    def queue(self) -> QueueState: ...

    async def encode(self, row: Row) -> tuple[int, ...]:
        """Token ids of a row's prompt; `PromptError`, or `PromptTooLongError` beyond the limit."""

    async def decode(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text that ids add to `before`, without special tokens; U+FFFD for half characters."""

    async def kept_form(self, form: str, has_begun: bool | None = None) -> str:
        """The form `Sampling.structured_outputs` as stages keep it, behind reasoning unless
        `has_begun` is None: whether the prompt begins that. Raises `FormError` where no answer can
        have it.
        """

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """The tokens of an answer; closing the generator ends the generation and frees its slot.

        The `custom_id` of a request is its own, and the same request with the same seed and
        `draw_id` is answered alike. The engine may be ahead of whoever reads, by at most
        `max_new_tokens` tokens. Raises `EngineStoppingError` before the first token,
        `GenerationError` at any.
        """
