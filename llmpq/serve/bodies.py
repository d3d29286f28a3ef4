"""The fields of OpenAI's requests that are served, with their types.

Fields that are not served, and other names of those that are, stand in `llmpq/rows/fields.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

from llmpq.rows.fields import DRAWN, PROMPT_OPTIONS, SAMPLING_FIELDS, TEMPLATE_SWITCH
from llmpq.rows.request_fields import Given, prompt_options
from llmpq.rows.results import whole_number

MOST_ANSWERS = 128
"""Largest `n`, as in OpenAI's interface."""

MOST_STOPS = 4
"""Stop strings, as in OpenAI's interface."""

MOST_ALTERNATIVES = 20
"""Largest `top_logprobs`, as in OpenAI's interface."""

MOST_ALTERNATIVES_OF_TEXT = 5
"""Largest `logprobs` of a completion, as in OpenAI's interface."""

Prompt = str | list[int]
Whole = Annotated[int, BeforeValidator(whole_number)]


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{why}", {"why": message})


def _prompts(value: object) -> list[Prompt]:
    """The single prompts of OpenAI's four forms."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _wrong("it must be a text, a list of token ids, or a list of either, not empty")
    if isinstance(value[0], int | float):
        return [_token_ids(value, "")]
    return [
        each if isinstance(each, str) else _token_ids(each, f"[{number}]")
        for number, each in enumerate(value)
    ]


def _token_ids(value: object, place: str) -> list[int]:
    where = f"its entry {place} " if place else "it "
    if not isinstance(value, list):
        raise _wrong(f"{where}is neither a text nor a list of token ids")
    ids = list(map(whole_number, value))
    for number, each in enumerate(ids):
        if type(each) is not int or each < 0:
            raise _wrong(
                f"{where}has {each!r:.80} at {number}; token ids are whole numbers of at least 0"
            )
    return ids


def _stops(value: object) -> list[str] | None:
    given = [value] if isinstance(value, str) else value
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise _wrong("it must be a text or a list of texts")
    if len(given) > MOST_STOPS:
        raise _wrong(f"it has {len(given)} texts, at most {MOST_STOPS} are looked for")
    return given


class StreamOptions(BaseModel):
    """`stream_options`; obfuscation is asked for by clients of OpenAI, and never added here."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class Body(BaseModel):
    """Fields that completions and chats have in common; null is as if a field were left out."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str
    n: Annotated[Whole, Field(ge=1, le=MOST_ANSWERS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    stop: Annotated[list[str] | None, PlainValidator(_stops)] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Whole | None = None
    ignore_eos: bool | None = None
    do_sample: bool | None = None
    min_tokens: Annotated[Whole, Field(ge=0)] | None = None
    stop_token_ids: list[Whole] | None = None
    add_special_tokens: bool | None = None

    @property
    def answers(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def new_tokens(self) -> tuple[str, int | None]:
        """Name and value of the limit of an answer."""
        return "max_tokens", self.max_tokens

    @property
    @abstractmethod
    def alternatives(self) -> tuple[str, int | None]:
        """Field that asks for log-probabilities, and how many alternatives of each token it wants;
        None where it asks for nothing.
        """

    @property
    def sampling(self) -> dict[str, Any]:
        """Those fields of `Sampling` that are given, but the limit of an answer."""
        return self._given(*SAMPLING_FIELDS, DRAWN)

    @property
    def prompt_options(self) -> dict[str, Any]:
        """How the prompt becomes tokens; raises `FieldError` for options that contradict."""
        given = self._given(*PROMPT_OPTIONS, TEMPLATE_SWITCH, "tool_choice")
        found = {name: Given(name, value) for name, value in given.items()}
        return prompt_options(found, has_messages=isinstance(self, ChatBody))

    def _given(self, *names: str) -> dict[str, Any]:
        """Those of the fields that are given."""
        values = {name: getattr(self, name, None) for name in names}
        return {name: value for name, value in values.items() if value is not None}


class CompletionBody(Body):
    """A request of `/v1/completions`."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    best_of: Whole | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=MOST_ALTERNATIVES_OF_TEXT)] | None = None

    @property
    def alternatives(self) -> tuple[str, int | None]:
        """As in `Body`."""
        return "logprobs", self.logprobs


class ChatBody(Body):
    """A request of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    documents: list[dict[str, Any]] | None = None

    @property
    def new_tokens(self) -> tuple[str, int | None]:
        """As in `Body`."""
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def alternatives(self) -> tuple[str, int | None]:
        """As in `Body`."""
        if not self.logprobs:
            return "logprobs", None
        return "top_logprobs" if self.top_logprobs else "logprobs", self.top_logprobs or 0
