"""The calls of tools in the text of an answer, told from what the model writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from llmpq.rows.answers import ToolCall
from llmpq.rows.results import is_writable
from llmpq.rows.tools import CHOICE, PARALLEL, TOOLS, chosen_function, parameter_types
from llmpq.tokenizing.reasoning import overlap
from quant.common.json_text import check_depth

_ID_DIGITS = 9  # templates of Mistral take no other length
_NAMED, _REQUIRED = "named", "required"
_QWEN, _GLM = "qwen3_coder", "glm45"  # vLLM's names
_Types = Mapping[str, Mapping[str, Sequence[str]]]


class CallReading(NamedTuple):
    """How calls are read in an answer: by one of `TOOL_PARSERS`, or as the form of an answer that
    must call, of the `function` that is named. `is_single`: only the first call counts. `types`:
    those of JSON that parameters may have, by function, where the model does not write them.
    """

    parser: str
    function: str = ""
    is_single: bool = False
    types: _Types | None = None


def call_reading(
    options: Mapping[str, Any], parser: str | None, job: Mapping[str, Any]
) -> CallReading | None:
    """The reading of a chat with such `Row.prompt_options`, or None where its answer has no calls:
    without tools, and where it is not known how the model writes them. `job`: options of rows that
    do not say.
    """
    choice, is_single = options.get(CHOICE), options.get(PARALLEL) is False
    if choice is not None:
        name = chosen_function(choice)
        return CallReading(_NAMED if name else _REQUIRED, name, is_single)
    offered = options.get(TOOLS) or job.get("chat_template_kwargs", {}).get(TOOLS)
    if not offered or parser in (None, "none"):
        return None
    is_untyped = parser in (_QWEN, _GLM)
    return CallReading(str(parser), "", is_single, parameter_types(offered) if is_untyped else None)


class _Call(NamedTuple):
    name: str
    arguments: str


class _Format(NamedTuple):
    """A call stands from `opening` to `closing`, or to the next `opening`, where `is_last` to the
    end of the answer. Where `is_bare`, an answer that begins as an object may be one too.

    `read` has the calls in what stands between, and the text behind them; `ValueError` for others.
    It is given the types of parameters too.
    """

    opening: str
    read: Callable[[str, _Types], tuple[list[_Call], str]]
    closing: str = ""
    is_last: bool = False
    is_bare: bool = False


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


_DECODE = json.JSONDecoder(strict=False, parse_constant=_no_number).raw_decode
"""Line breaks within texts, which models write, are taken."""


def _value(text: str) -> tuple[Any, str]:
    """The JSON value with which `text` begins, and what stands behind it."""
    text = text.lstrip()
    check_depth(text)
    value, end = _DECODE(text)
    return value, text[end:].lstrip()


def _called(name: Any, arguments: Any) -> _Call:
    if isinstance(arguments, str):
        arguments, _ = _value(arguments or "{}")
    if not isinstance(name, str) or not name or not is_writable(name):
        raise ValueError("a call has no name")
    if not isinstance(arguments, Mapping):
        raise ValueError("arguments are no object")
    text = json.dumps(arguments, ensure_ascii=False)
    return _Call(name, text if is_writable(text) else json.dumps(arguments))


def _call_of(value: Any) -> _Call:
    if not isinstance(value, Mapping):
        raise ValueError("a call is no object")
    return _called(value.get("name"), value.get("arguments", value.get("parameters", {})))


def _calls_of(value: Any) -> list[_Call]:
    return [_call_of(each) for each in (value if isinstance(value, list) else [value])]


def _read_objects(text: str, types: _Types) -> tuple[list[_Call], str]:
    """Objects one after another, with `;` or `,` between them, as Llama writes several calls."""
    calls = []
    while text:
        value, text = _value(text)
        calls += _calls_of(value)
        text = text.lstrip(";, \n")
    return calls, ""


_NAMED_CALL = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def _read_mistral(text: str, types: _Types) -> tuple[list[_Call], str]:
    """A list of calls, or the name of one, perhaps an id, and its arguments."""
    found = _NAMED_CALL.match(text)
    value, behind = _value(text[found.end() :] if found else text)
    return ([_called(found[1], value)] if found else _calls_of(value)), behind


_FUNCTION = re.compile(r"\s*<function=([^<>]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>]+)>(.*?)</parameter>\s*", re.DOTALL)
_PAIR = re.compile(r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _read_qwen(text: str, types: _Types) -> tuple[list[_Call], str]:
    """A function, and its parameters on lines of their own."""
    found = _FUNCTION.fullmatch(text)
    if not found:
        raise ValueError("it is no function")
    return [_tagged_call(found[1], found[2], _PARAMETER, types)], ""


def _read_glm(text: str, types: _Types) -> tuple[list[_Call], str]:
    """The name of a function, and pairs of a name and a value."""
    name, opening, pairs = text.partition("<arg_key>")
    return [_tagged_call(name, opening + pairs, _PAIR, types)], ""


def _tagged_call(name: str, text: str, pattern: re.Pattern[str], types: _Types) -> _Call:
    """The call of `name` with the values in `text`, which is one `pattern` after another."""
    name, at, arguments = name.strip(), 0, {}
    if any(sign in name for sign in "<>{"):
        raise ValueError("a call has no name")
    text = text.rstrip()
    while at < len(text):
        found = pattern.match(text, at)
        if not found:  # not searched for further on, which would take its length squared
            raise ValueError("it is no parameter")
        key, at = found[1].strip(), found.end()
        arguments[key] = _typed(found[2], types.get(name, {}).get(key, ()))
    return _called(name, arguments)


_WORDS = {"True": True, "False": False, "None": None}  # as templates of Qwen show values to it


def _typed(text: str, types: Sequence[str]) -> Any:
    """The value that `text` stands for: itself where the parameter may be a text, else JSON, if it
    is. A line break at either end stands for itself in no form.
    """
    text = text.removeprefix("\n").removesuffix("\n")
    if "string" in types and not ("null" in types and text in ("null", "None")):
        return text
    if text in _WORDS:
        return _WORDS[text]
    try:
        value, behind = _value(text)
    except ValueError:
        return text
    return text if behind else value


_FORMATS: Mapping[str, _Format] = {
    "hermes": _Format("<tool_call>", _read_objects, "</tool_call>"),
    "llama3": _Format("<|python_tag|>", _read_objects, is_last=True, is_bare=True),
    "mistral": _Format("[TOOL_CALLS]", _read_mistral),
    _QWEN: _Format("<tool_call>", _read_qwen, "</tool_call>"),
    _GLM: _Format("<tool_call>", _read_glm, "</tool_call>"),
}


class CallStream:
    """Divides an answer that comes in pieces into content and calls.

    What may be a part of a call is held back, and white space before one: it is no content. A call
    that cannot be read is content as it stands. `answer_id` is what the ids of calls are made from,
    and `calls` counts them.
    """

    def __init__(self, reading: CallReading, answer_id: str) -> None:
        self._reading, self._answer_id = reading, answer_id
        self._format = _FORMATS.get(reading.parser)
        self._held = ""
        self._has_content = False
        self.calls = 0

    def add(self, piece: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Content and calls that are certain with `piece`."""
        self._held += piece
        return self._taken(is_end=False)

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        return self._taken(is_end=True)

    def _taken(self, is_end: bool) -> tuple[str, tuple[ToolCall, ...]]:
        content, calls = "", list[ToolCall]()
        while self._held:
            begin, end = self._next_call(is_end)
            before = self._held[:begin]
            kept = before if is_end and end is None and not self.calls else before.rstrip()
            content += kept
            self._has_content |= bool(kept)
            self._held = self._held[len(kept) :]
            if end is None:
                self._held = "" if is_end else self._held
                break
            text, self._held = self._held[: end - len(kept)], self._held[end - len(kept) :]
            try:
                found, behind = self._read(text.lstrip())
            except ValueError:
                content += text
                self._has_content = True
            else:
                calls += self._numbered(found)
                self._held = behind + self._held
        return content, tuple(calls)

    def _next_call(self, is_end: bool) -> tuple[int, int | None]:
        """Where in the text that is held a call may begin, and where it ends, if that is known."""
        held, form = self._held, self._format
        length = len(held)
        if form is None:  # the whole answer is to be calls
            return 0, length if is_end else None
        begin = held.find(form.opening)
        if form.is_bare and not self._has_content and not self.calls and _is_object(held):
            begin = 0
        if begin < 0:
            return (length if is_end else length - overlap(held, form.opening)), None
        if form.is_last:
            return begin, length if is_end else None
        marker = form.closing or form.opening
        end = held.find(marker, begin + len(form.opening))
        if end >= 0:
            return begin, end + len(form.closing)
        return begin, length if is_end else None

    def _read(self, text: str) -> tuple[list[_Call], str]:
        form, reading = self._format, self._reading
        if form is None:
            value, behind = _value(text)
            calls = [_called(reading.function, value)] if reading.function else _calls_of(value)
            return calls, behind
        inner = text.removeprefix(form.opening).removesuffix(form.closing)
        calls, behind = form.read(inner, reading.types or {})
        if not calls:
            raise ValueError("there is no call")
        return calls, behind

    def _numbered(self, found: list[_Call]) -> Iterator[ToolCall]:
        for name, arguments in found:
            if self._reading.is_single and self.calls:
                return
            made = blake2b(f"{self._answer_id} {self.calls}".encode()).hexdigest()[:_ID_DIGITS]
            yield ToolCall(self.calls, made, name, arguments)
            self.calls += 1


def _is_object(text: str) -> bool:
    return text.lstrip()[:1] == "{"


def calls_apart(
    text: str, reading: CallReading, answer_id: str
) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls of a whole answer."""
    stream = CallStream(reading, answer_id)
    (content, calls), (rest, more) = stream.add(text), stream.finish()
    return content + rest, calls + more


def calls_reason(reason: str | None, has_calls: bool) -> str | None:
    """Why an answer ended, where it may have ended for its calls; one that was cut is cut."""
    return "tool_calls" if has_calls and reason == "stop" else reason
