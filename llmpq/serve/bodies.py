"""OpenAI's requests: the fields that are served, and from bytes to them; errors name the mistake.

Fields that are not served, and other names of those that are, stand in `llmpq/rows/fields.py`.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from actors.logprobs import MOST_TOP_LOGPROBS
from actors.sampling_options import FORM
from llmpq.rows.answers import ChatForm, CompletionForm, Form
from llmpq.rows.fields import DRAWN, MOST_ANSWERS, SAMPLING_FIELDS
from llmpq.rows.request_fields import OPTIONS, Given, fields_by_name, prompt_options
from llmpq.rows.results import whole_number
from llmpq.serve.access import ApiError, bad_request
from quant.common.errors import FieldError
from quant.common.json_text import loads

MOST_STOPS, MOST_ALTERNATIVES_OF_TEXT = 4, 5
"""Largest `stop`, and `logprobs` of a completion, as in OpenAI's interface."""

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
    prompt_logprobs: Annotated[Whole, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    structured_outputs: Any = None  # `Given`, under whichever name

    @property
    def answers(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def new_tokens(self) -> tuple[str, int | None]:
        """Name and value of the limit of an answer."""
        return "max_tokens", self.max_tokens

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """How many alternatives of a token are told; None where log-probabilities are not asked."""

    @property
    @abstractmethod
    def form(self) -> Form:
        """What puts the answers into OpenAI's form."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Those fields of `Sampling` that are given, but the limit of an answer."""
        given = self._given(*SAMPLING_FIELDS, DRAWN)
        return given | ({FORM: given[FORM].value} if FORM in given else {})

    @property
    def form_field(self) -> str:
        """The name under which a form was asked for."""
        return FORM if self.structured_outputs is None else self.structured_outputs.name

    @property
    def prompt_options(self) -> dict[str, Any]:
        """How the prompt becomes tokens; raises `FieldError` for options that contradict."""
        given = self._given(*OPTIONS)
        found = {name: Given(name, value) for name, value in given.items()}
        return prompt_options(found, has_messages=isinstance(self, ChatBody))

    def _given(self, *names: str) -> dict[str, Any]:
        values = {name: getattr(self, name, None) for name in names}
        return {name: value for name, value in values.items() if value is not None}


class CompletionBody(Body):
    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    max_tokens: Annotated[Whole, Field(ge=0)] | None = None
    best_of: Whole | None = None
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=MOST_ALTERNATIVES_OF_TEXT)] | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def form(self) -> Form:
        return CompletionForm(self.logprobs is not None)


class ChatBody(Body):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None

    @property
    def new_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def form(self) -> Form:
        return ChatForm(bool(self.logprobs))


BodyT = TypeVar("BodyT", bound=Body)
ModelT = TypeVar("ModelT", bound=BaseModel)

_LIMIT = "max_tokens"
"""The field of a body that other names of `max_new_tokens` go into."""

_WORDS = {
    "bool_type": "it must be true or false",
    "dict_type": "it must be an object",
    "float_type": "it must be a number",
    "int_type": "it must be a whole number",
    "list_type": "it must be a list",
    "model_type": "it must be an object",
    "string_type": "it must be a text",
}
"""Words for pydantic's kinds of errors; others are told in its own."""


def parse_json(body: bytes, what: str = "the body") -> Mapping[str, object]:
    """The JSON object of a body; 400 for anything else, which is called `what`."""
    try:
        content = loads(body.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise bad_request(f"{what} is not UTF-8 (byte {error.start})") from error
    except ValueError as error:
        raise bad_request(f"{what} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise bad_request(f"{what} must be a JSON object")
    return content


def _no_number(name: str) -> float:
    raise ValueError(f"it has {name}, which is no number of JSON")


def completion_body(content: Mapping[str, object]) -> CompletionBody:
    """Raises 400 naming the first field that cannot be served."""
    body = _fields(CompletionBody, content)
    if body.best_of not in (None, body.answers):
        raise bad_request(
            f"best_of is {body.best_of}, n is {body.answers}; all answers are returned: leave "
            "best_of out",
            "best_of",
        )
    return body


def chat_body(content: Mapping[str, object]) -> ChatBody:
    """Raises 400 naming the first field that cannot be served."""
    body = _fields(ChatBody, content)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs has no effect unless logprobs is true", "top_logprobs")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise bad_request(
            f"max_tokens is {body.max_tokens} and max_completion_tokens "
            f"{body.max_completion_tokens}; give one of them",
            "max_tokens",
        )
    return body


def _fields(model: type[BodyT], content: Mapping[str, object]) -> BodyT:
    own = model.model_fields.keys() - {FORM}  # which has many forms
    served = {name: value for name, value in content.items() if name in own}
    others = {name: value for name, value in content.items() if name not in served}
    try:
        names = _add_others(served, others, model)
        body = checked(model, served, StreamOptions, names)
        _ = body.prompt_options
    except FieldError as error:
        raise bad_request(str(error), error.name) from error
    if body.max_tokens == 0 and not (isinstance(body, CompletionBody) and body.echo):
        name = names.get(_LIMIT, _LIMIT)
        raise bad_request(f"{name} is 0; it must be at least 1, unless echo is true", name)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options has no effect unless stream is true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        why = "prompt_logprobs come with whole answers alone: leave stream out"
        raise bad_request(why, "prompt_logprobs")
    return body


def _add_others(
    served: dict[str, object], others: Mapping[str, object], model: type[Body]
) -> dict[str, str]:
    """Add to `served` what `others` mean, return their names. `FieldError`, or `ApiError`."""
    found, names = fields_by_name(others), {}
    for name in (*found,):
        field = _LIMIT if name == "max_new_tokens" else name
        if field not in model.model_fields:
            continue
        given = found.pop(name)
        names[field], value = given if name != FORM else (given.name, given)
        if served.get(field) not in (None, value):
            raise FieldError(names[field], f"and {field} are given and differ; give one of them")
        served[field] = value
    prompt_options(found, has_messages=model is ChatBody)
    if found:
        name = next(iter(found.values())).name
        raise _unknown(name, name, tuple(model.model_fields))
    return names


def checked(
    model: type[ModelT],
    content: Mapping[str, object],
    nested: type[BaseModel] | None = None,
    names: Mapping[str, str] | None = None,
) -> ModelT:
    """The fields of `content`; 400 naming the first that is wrong.

    `nested`: the model of the one field that has fields itself. `names`: under which some of the
    fields were given.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise _wrong_field(first, nested if len(first["loc"]) > 1 else model, names) from error


def _unknown(path: str, name: str, known: Sequence[str]) -> ApiError:
    near = get_close_matches(name, known, 1)
    hint = f"the nearest is {near[0]}" if near else f"known are {', '.join(known)}"
    return bad_request(f"unknown field {path!r:.80}; {hint}", path)


def _wrong_field(
    error: ErrorDetails, model: type[BaseModel] | None, names: Mapping[str, str] | None
) -> ApiError:
    path = ""
    for part in error["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
        path = (names or {}).get(path, path)
    if error["type"] == "missing":
        return bad_request(f"{path} is missing", path)
    if error["type"] == "extra_forbidden" and model is not None:
        return _unknown(path, str(error["loc"][-1]), tuple(model.model_fields))
    why = _WORDS.get(error["type"], error["msg"])
    return bad_request(f"{path} is {_shown(error['input'])}: {why}", path)


def _shown(value: object) -> str:
    """A value of a request in a few characters, whatever its size."""
    if isinstance(value, str):
        return repr(value[:60])
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if abs(value) < 10**18 else "a number of many digits"
    if isinstance(value, float | bool) or value is None:
        return json.dumps(value)
    return "a list" if isinstance(value, list) else "an object"
