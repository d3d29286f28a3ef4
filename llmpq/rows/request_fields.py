"""The fields of a row or a request as they were given, brought under our names and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from llmpq.rows.fields import (
    OBJECTS,
    PROMPT_OPTIONS,
    SPELLINGS,
    TEMPLATE_SWITCH,
    asks_nothing,
    unfollowed,
)
from llmpq.rows.own_columns import ColumnError, json_value, plain_value
from quant.common.errors import FieldError

_OPTIONS = (*PROMPT_OPTIONS, TEMPLATE_SWITCH, "tool_choice")
_LISTS = ("tools", "documents")
_OF_TEXT = ("add_special_tokens", "tool_choice")  # the others are for messages


class Given(NamedTuple):
    """A value, and the name under which it was given."""

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
        why = unfollowed(name, value)
        if why is not None:
            raise FieldError(shown, why)
        _put(found, SPELLINGS.get(name, name), Given(shown, value))
    return found


def _entries(given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Each field as it is shown, its name and its value."""
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


def prompt_options(found: dict[str, Given], has_messages: bool) -> dict[str, Any]:
    """How text or messages become tokens, taken out of the fields that were `found`.

    Raises `FieldError` for values of other types, options that only chats have beside a prompt, and
    options that contradict.
    """
    if found.keys().isdisjoint(_OPTIONS):
        return {}
    given = {name: _checked(name, found.pop(name)) for name in _OPTIONS if name in found}
    if not has_messages:
        return _options_of_text(given)
    _take_arguments_out(given)
    if given.pop("tool_choice", _NOTHING).value == "none":
        given.pop("tools", None)
    options = {name: given.pop(name).value for name in PROMPT_OPTIONS if name in given}
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
        if asks and name not in _OF_TEXT:
            raise FieldError(each.name, "is for messages; leave it out beside a prompt")
    return {name: each.value for name, each in given.items() if name == _OF_TEXT[0]}


def _take_arguments_out(given: dict[str, Given]) -> None:
    """Put the arguments in `chat_template_kwargs` beside the other options."""
    arguments = given.pop("chat_template_kwargs", _NOTHING)
    for name, value in arguments.value.items():
        each = Given(f"{arguments.name}.{name}", value)
        _put(given, name, _checked(name, each) if name in _OPTIONS else each)


def _checked(name: str, given: Given) -> Given:
    """An option with its value as JSON has it."""
    value, wanted = given.value, "true or false"
    fits = isinstance(value, bool)
    if name == "chat_template_kwargs":
        fits, wanted = isinstance(value, Mapping), "an object"
    elif name in _LISTS:
        fits = isinstance(value, list) and all(isinstance(each, Mapping) for each in value)
        wanted = "a list of objects"
    elif name == "tool_choice":
        fits, wanted = value in ("none", "auto"), '"none" or "auto", as the model chooses itself'
    if not fits:
        raise FieldError(given.name, f"is {value!r:.80}; it must be {wanted}")
    try:
        return Given(given.name, json_value(value))
    except ColumnError as error:
        raise FieldError(given.name, str(error)) from error
