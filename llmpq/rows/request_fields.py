"""The fields and messages of a row or a request, brought under our names and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from actors.logprobs import MOST_TOP_LOGPROBS
from llmpq.rows.fields import (
    ANSWERS,
    CALL_OPTIONS,
    LOGPROB_FIELDS,
    MOST_ANSWERS,
    OBJECTS,
    PROMPT_OPTIONS,
    SPELLINGS,
    TEMPLATE_SWITCH,
    asks_nothing,
    unfollowed,
)
from llmpq.rows.results import CALLS, RowError, json_value, plain_value, whole_number
from llmpq.rows.structured import FORM_FIELDS, form_of
from llmpq.rows.tools import CHOICE, TOOLS, add_choice, check_tools, is_choice
from quant.common.errors import FieldError
from quant.common.files import parsed_json

OPTIONS = (*PROMPT_OPTIONS, *CALL_OPTIONS, TEMPLATE_SWITCH)
"""Fields that say how text or messages become tokens, and which tools may be called."""

_LISTS = (TOOLS, "documents")
_OF_TEXT = ("add_special_tokens", *CALL_OPTIONS)  # the others are for messages


class Given(NamedTuple):
    name: str
    value: Any


_NOTHING = Given("", {})


def fields_by_name(given: Mapping[str, Any]) -> dict[str, Given]:
    """The fields of `given` by our names, those in objects such as `sampling_params` among them,
    without those that are as if they were left out.

    Raises `FieldError` for one that asks for what is not done, and for two that contradict.
    """
    found: dict[str, Given] = {}
    for shown, name, raw in _entries(given):
        value = plain_value(raw)
        if isinstance(value, Decimal):  # as databases write numbers
            value = None if value.is_nan() else float(value)
        if asks_nothing(name, value):
            continue
        if name in FORM_FIELDS:
            value = form_of(shown, name, value)
        why = unfollowed(name, value)
        if why is not None:
            raise FieldError(shown, why)
        _put(found, SPELLINGS.get(name, name), Given(shown, value))
    return found


def _entries(given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for name, value in given.items():
        if name not in OBJECTS or plain_value(value) is None:
            yield str(name), str(name), value
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", str(inner), value[inner]) for inner in value)
        else:
            raise FieldError(name, "must be an object")


def _put(found: dict[str, Given], name: str, given: Given) -> None:
    before = found.setdefault(name, given)
    if before.value != given.value:
        raise FieldError(
            name,
            f"is given twice, as {before.value!r:.80} ({before.name}) and as "
            f"{given.value!r:.80} ({given.name}); give it once",
        )


def answers_wanted(found: dict[str, Given]) -> int:
    """How many answers are asked for, taken out of the fields that were `found`."""
    given = found.pop(ANSWERS, Given(ANSWERS, 1))
    wanted = whole_number(given.value)
    if type(wanted) is not int or not 1 <= wanted <= MOST_ANSWERS:
        why = f"is {given.value!r:.80}; it must be a whole number from 1 to {MOST_ANSWERS}"
        raise FieldError(given.name, why)
    return wanted


def logprobs_wanted(found: dict[str, Given]) -> tuple[int | None, int | None]:
    """How many tokens are told beside each of an answer, and of its prompt, with their
    log-probabilities, taken out of the fields that were `found`; None: none, and not its own.

    `logprobs` is true, beside `top_logprobs`, as in OpenAI's chats, or that number, as elsewhere.
    """
    own, top, prompt = (found.pop(name, None) for name in LOGPROB_FIELDS)
    is_switch = own is not None and own.value is True
    if top is not None and not is_switch:
        raise FieldError(top.name, "has no effect unless logprobs is true; give it too")
    if is_switch:
        own = top or Given("top_logprobs", 0)
    wanted, of_prompt = (None if each is None else _beside(each) for each in (own, prompt))
    return wanted, of_prompt


def _beside(given: Given) -> int:
    wanted = whole_number(given.value)
    if type(wanted) is not int or not 0 <= wanted <= MOST_TOP_LOGPROBS:
        why = f"is {given.value!r:.80}; it must be a whole number from 0 to {MOST_TOP_LOGPROBS}"
        raise FieldError(given.name, why)
    return wanted


def prompt_options(found: dict[str, Given], has_messages: bool) -> dict[str, Any]:
    """How text or messages become tokens, taken out of the fields that were `found`.

    Raises `FieldError` for values of other types, options that only chats have beside a prompt, and
    options that contradict.
    """
    if found.keys().isdisjoint(OPTIONS):
        return {}
    given = {name: _checked(name, found.pop(name)) for name in OPTIONS if name in found}
    if not has_messages:
        return _options_of_text(given)
    _take_arguments_out(given)
    if TOOLS in given:
        check_tools(*given[TOOLS])
    choice, parallel = (given.pop(name, Given(name, None)) for name in CALL_OPTIONS)
    if choice.value == "none":
        given.pop(TOOLS, None)
    options = {name: given.pop(name).value for name in PROMPT_OPTIONS if name in given}
    add_choice(options, *choice, parallel.value)
    if given:
        options["chat_template_kwargs"] = {name: each.value for name, each in given.items()}
    continues = options.get("continue_final_message", False)
    if continues and options.setdefault("add_generation_prompt", False):
        raise FieldError(
            "continue_final_message",
            "and add_generation_prompt are both true; an answer either goes on with the last "
            "message or begins a new one: give one of them",
        )
    return options


def _options_of_text(given: Mapping[str, Given]) -> dict[str, Any]:
    for name, each in given.items():
        asks = bool(each.value) or name == TEMPLATE_SWITCH
        must_call = name == CHOICE and each.value not in ("none", "auto")
        if must_call or (asks and name not in _OF_TEXT):
            raise FieldError(each.name, "is for messages; leave it out beside a prompt")
    return {name: each.value for name, each in given.items() if name == _OF_TEXT[0]}


def _take_arguments_out(given: dict[str, Given]) -> None:
    arguments = given.pop("chat_template_kwargs", _NOTHING)
    for name, value in arguments.value.items():
        each = Given(f"{arguments.name}.{name}", value)
        _put(given, name, _checked(name, each) if name in OPTIONS else each)


def _checked(name: str, given: Given) -> Given:
    value, wanted = given.value, "true or false"
    fits = isinstance(value, bool)
    if name == "chat_template_kwargs":
        fits, wanted = isinstance(value, Mapping), "an object"
    elif name in _LISTS:
        fits = isinstance(value, list) and all(isinstance(each, Mapping) for each in value)
        wanted = "a list of objects"
    elif name == CHOICE:
        fits, wanted = is_choice(value), '"none", "auto", "required" or a function by its name'
    if not fits:
        raise FieldError(given.name, f"is {value!r:.80}; it must be {wanted}")
    try:
        return Given(given.name, json_value(value))
    except RowError as error:
        raise FieldError(given.name, str(error)) from error


JOINER = "\n"
"""Separator of the text parts of one message, as in vLLM and llama.cpp for templates of text alone;
the format itself names none.
"""

_OLD_CALL = "function_call"
_EMPTY = (CALLS, "annotations")
"""Fields whose empty lists say nothing: OpenAI's clients write them into every message."""


def plain_message(message: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """`message` with its content as one string; other fields are as they were.

    Raises `RowError` for a message without role, without content (unless an assistant calls
    tools), for content that is not text, and for calls that `template_message` cannot take.
    """
    if CALLS in message or _OLD_CALL in message:
        template_message(message, number)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RowError(f"message {number} has no role; give system, user or assistant")
    if content is None:
        if role == "assistant" and (message.get(CALLS) or message.get(_OLD_CALL)):
            return message
        raise RowError(f"message {number} ({role!r:.40}) has no content; give it a text")
    if isinstance(content, str):
        return message
    if not isinstance(content, list) or not content:
        kind = "an empty list" if content == [] else f"of type {type(content).__name__}"
        raise RowError(
            f"the content of message {number} is {kind}; give a text, or a list of text parts"
        )
    return {**message, "content": JOINER.join(_text_of(part, number) for part in content)}


def template_message(message: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """`message` number `number` as templates expect it, which write arguments by `tojson` and ask
    whether a message has calls: arguments of calls are objects, fields that say nothing are left
    out, and the `function_call` of OpenAI's first interface is a call as any other.

    Raises `RowError` where arguments are no JSON object: a template would write other text.
    """
    said = {
        name: value
        for name, value in message.items()
        if value is not None and not (name in _EMPTY and value == [])
    }
    old = said.pop(_OLD_CALL, None)
    if old is not None:
        said.setdefault(CALLS, [{"type": "function", "function": old}])
    if CALLS not in said:
        return said
    calls = said[CALLS]
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RowError(f"{CALLS} of message {number} is no list of objects")
    made = [_call(call, number) for call in calls]
    return {"content": None, **said, CALLS: made}


def _call(call: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """A call of a tool, with its arguments as an object; one of no function stays as it is."""
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": {**function, "arguments": _arguments(function, number)}}
    return {**call, "arguments": _arguments(call, number)} if "arguments" in call else call


def _arguments(function: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    given, why = function.get("arguments"), ""
    try:
        found = parsed_json(given.strip() or "{}") if isinstance(given, str) else given or {}
    except ValueError as error:
        found, why = None, f" ({error})"
    if isinstance(found, Mapping):
        return found
    raise RowError(
        f"message {number} calls {function.get('name')!r:.60} with arguments that are no JSON "
        f"object: {given!r:.80}{why}; mend them, or leave the call out"
    )


def _text_of(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise RowError(
            f"a part of the content of message {number} has no type; give "
            '{"type": "text", "text": …}'
        )
    text = part.get("text")
    if kind != "text":
        raise RowError(
            f"message {number} has a part of type {kind!r:.40}; the model reads text alone: leave "
            "the part out, or put into words what it shows"
        )
    if not isinstance(text, str):
        raise RowError(f"a text part of message {number} has no text")
    return text
