"""OpenAI's Responses: requests as chats, and answers as items, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from llmpq.rows.answers import Json, TextPiece, ToolCall, joined
from llmpq.serve.access import ApiError, bad_request
from llmpq.serve.bodies import ChatBody, chat_body
from llmpq.serve.engine import Engine
from llmpq.serve.requests import AnswerStreams, Asked
from llmpq.serve.service import Job, Service

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ItemStream:
    """Makes items and events of the pieces of an answer; `done` are the items that have ended.

    Texts that follow each other are one item, and every call is one. `name` is the response's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0
        self._open: dict[str, Any] | None = None
        self._text = ""
        self.done: list[Json] = []

    def event(self, kind: str, **fields: object) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def add(self, piece: TextPiece) -> Iterator[Json]:
        """The events of a piece, of which the last one ends all items."""
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.text)):
            if text:
                yield from self._add_text(kind, text)
        for call in piece.calls:
            yield from self._close()
            yield from self._add_call(call)
        if piece.finish_reason is not None:
            if not self.done and self._open is None:
                yield from self._begin("message")
            yield from self._close("incomplete" if piece.finish_reason == "length" else "completed")

    def _item(self, kind: str, status: str, **fields: object) -> dict[str, Any]:
        name = f"{_PREFIXES[kind]}_{self._name.partition('-')[2]}_{len(self.done)}"
        return {"id": name, "type": kind, "status": status, **fields}

    def _part(self, kind: str, text: str) -> Json:
        more: Json = {"annotations": ()} if kind == "message" else {}
        return {"type": _PARTS[kind], "text": text, **more, **_logprobs(kind)}

    def _begin(self, kind: str) -> Iterator[Json]:
        yield from self._close()
        own: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        self._open = self._item(kind, "in_progress", content=[], **own)
        yield self._of_item("response.output_item.added", item=self._open)
        yield self._of_text("response.content_part.added", part=self._part(kind, ""))

    def _add_text(self, kind: str, text: str) -> Iterator[Json]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin(kind)
        self._text += text
        yield self._of_text(f"response.{_PARTS[kind]}.delta", delta=text, **_logprobs(kind))

    def _close(self, status: str = "completed") -> Iterator[Json]:
        if self._open is None:
            return
        kind, text = self._open["type"], self._text
        part = self._part(kind, text)
        yield self._of_text(f"response.{_PARTS[kind]}.done", text=text, **_logprobs(kind))
        yield self._of_text("response.content_part.done", part=part)
        item = {**self._open, "status": status, "content": [part]}
        yield self._of_item("response.output_item.done", item=item)
        self._open, self._text = None, ""
        self.done.append(item)

    def _add_call(self, call: ToolCall) -> Iterator[Json]:
        item = self._item(
            "function_call", "completed", call_id=call.id, name=call.name, arguments=call.arguments
        )
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._of_item("response.output_item.added", item=begun)
        kind, place = "response.function_call_arguments", {"item_id": item["id"]}
        yield self._of_item(f"{kind}.delta", delta=call.arguments, **place)
        yield self._of_item(f"{kind}.done", arguments=call.arguments, name=call.name, **place)
        yield self._of_item("response.output_item.done", item=item)
        self.done.append(item)

    def _of_item(self, kind: str, **fields: object) -> Json:
        return self.event(kind, output_index=len(self.done), **fields)

    def _of_text(self, kind: str, **fields: object) -> Json:
        assert self._open is not None
        return self._of_item(kind, item_id=self._open["id"], content_index=0, **fields)


def _logprobs(kind: str) -> Json:
    """What OpenAI's types ask for beside a text; log-probabilities are not told here."""
    return {"logprobs": ()} if kind == "message" else {}


_KEPT_NOWHERE = "nothing is kept from one request to the next: give all messages in input"
_NOT_SERVED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "background": (
        "answers are given at once; POST /v1/batches takes requests for later",
        (False,),
    ),
    "context_management": ("a prompt is not cut: leave it out", ([],)),
    "conversation": (_KEPT_NOWHERE, ()),
    "include": ("answers have nothing that could be included: leave it out", ([],)),
    "max_tool_calls": ("clients run the tools, not the server: leave it out", ()),
    "messages": ("give input", ()),
    "previous_response_id": (_KEPT_NOWHERE, ()),
    "prompt": ("there are no stored prompts: give input", ()),
    "reasoning": ("give the template's own argument in chat_template_kwargs", ({},)),
    "store": ("no response is stored: give false, or leave it out", (False,)),
    "top_logprobs": ("ask /v1/chat/completions for log-probabilities", (0,)),
    "truncation": ("a prompt is not cut: shorten it", ("disabled",)),
}
"""Fields that are refused, with what to do instead and the values that ask for nothing."""

_NAMES = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
"""Fields of chats, and what they are called here."""

_ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "text", "tool_choice",
           "tools", "top_p")  # fmt: skip
_DEFAULTS: Json = {"metadata": {}, "tool_choice": "auto", "tools": []}


def response_body(content: Mapping[str, Any]) -> ChatBody:
    """The chat that a request for a response asks for; 400 names the field that is not served."""
    given = {name: value for name, value in content.items() if value is not None}
    for name, (remedy, neutral) in _NOT_SERVED.items():
        value = given.pop(name, None)
        if value is not None and value not in neutral:
            raise bad_request(f"{name} is {value!r:.80}, which is not served; {remedy}", name)
    if "input" not in given:
        raise bad_request("input is missing", "input")
    messages = _messages(given.pop("input"))
    if (said := given.pop("instructions", None)) is not None:
        if not isinstance(said, str):
            raise bad_request(f"instructions are {said!r:.80}; give a text", "instructions")
        messages.insert(0, {"role": "system", "content": said})
    given |= _of_text(given.pop("text", {}))
    if "tools" in given:
        given["tools"] = _tools(given["tools"])
    try:
        body = chat_body({**given, "messages": messages})
    except ApiError as error:
        raise _renamed(error) from error
    if body.answers > 1:  # under whichever name
        raise bad_request(
            f"n is {body.answers}, which is not served; a response is one answer: ask "
            "/v1/chat/completions",
            "n",
        )
    return body


def _renamed(error: ApiError) -> ApiError:
    """An error about a field of a chat, as one about that of a response."""
    name = _NAMES.get(error.param or "")
    if name is None:
        return error
    return replace(error, message=error.message.replace(str(error.param), name), param=name)


def _objects(value: object, name: str) -> list[Mapping[str, Any]]:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(each, dict) for each in value)
    ):
        raise bad_request(f"{name} is {value!r:.80}; give a list of objects, not empty", name)
    return value


def _messages(value: object) -> list[dict[str, Any]]:
    """The messages of `input`: items of earlier responses become those of an assistant."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    found: list[dict[str, Any]] = []
    thought = ""
    for number, item in enumerate(_objects(value, "input")):
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought = _thought(item)
            continue
        message = _message(item, kind, f"input[{number}]")
        if message["role"] == "assistant":
            message |= {"reasoning_content": thought} if thought else {}
            thought = ""
        before = found[-1] if found else {}
        if "tool_calls" in message and before.get("role") == "assistant":
            before.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            found.append(message)
    return found


def _thought(item: Mapping[str, Any]) -> str:
    """What a model has reasoned before; how templates write that is theirs to decide."""
    parts = item.get("content")
    texts = (
        [part.get("text") for part in parts if isinstance(part, dict)]
        if isinstance(parts, list)
        else []
    )
    return "".join(text for text in texts if isinstance(text, str))


def _message(item: Mapping[str, Any], kind: object, place: str) -> dict[str, Any]:
    if kind == "message":
        content = item.get("content")
        role = "system" if item.get("role") == "developer" else item.get("role")
        return {"role": role, "content": _content(content)}
    if kind == "function_call":
        function = {name: item.get(name) for name in ("name", "arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(output)}
    raise bad_request(
        f"{place} is of type {kind!r:.80}; give messages, function_call and function_call_output",
        place,
    )


def _content(value: object) -> object:
    """The content of a message as chats have it; what is no text is refused there."""
    if not isinstance(value, list):
        return value
    kinds = ("input_text", "output_text")
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in kinds
        else part
        for part in value
    ]


def _of_text(value: object) -> dict[str, Any]:
    """The fields of a chat for those of `text`."""
    if not isinstance(value, dict) or value.keys() - {"format", "verbosity"}:
        raise bad_request(f"text is {value!r:.80}; give an object with a format", "text")
    found = {"verbosity": value["verbosity"]} if value.get("verbosity") else {}
    form = value.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    return found if form is None else {**found, "response_format": form}


def _tools(value: object) -> list[dict[str, Any]]:
    made = []
    for number, tool in enumerate(_objects(value, "tools") if value else ()):
        if tool.get("type") != "function":
            raise bad_request(
                f"tools[{number}] is of type {tool.get('type')!r:.80}; the server has no tools of "
                "its own: give functions, which the client runs",
                f"tools[{number}]",
            )
        function = {
            name: tool[name] for name in ("name", "description", "parameters") if tool.get(name)
        }
        made.append({"type": "function", "function": function})
    return made


class ResponseJob(Job):
    """A request for a response, of which `given` is told again with the answer."""

    prefix = "resp"
    ending = b""

    def __init__(
        self, given: Json, service: Service, body: ChatBody, engine: Engine, arrived_s: float
    ) -> None:
        super().__init__(service, body, engine, arrived_s)
        told = {name: given.get(name) for name in _ECHOED}
        self._told = {name: _DEFAULTS.get(name) if v is None else v for name, v in told.items()}
        self._told["parallel_tool_calls"] = given.get("parallel_tool_calls") is not False
        self._items = ItemStream(self.head.id)

    async def content(self) -> Json:
        wanted, (answer,) = await self.answers()
        list(self._items.add(wanted.whole(answer)))
        return self._response(wanted, answer)

    async def chunks(self) -> AsyncGenerator[Json, None]:
        items, wanted = self._items, await self.asked()
        streams: dict[int, AnswerStreams] = {}
        parts = []
        for kind in ("response.created", "response.in_progress"):
            yield items.event(kind, response=self._response(wanted, None))
        async with aclosing(self.pieces(wanted)) as made:
            async for each in made:
                parts.append(each)
                for event in items.add(wanted.divide(each, streams)):
                    yield event
        response = self._response(wanted, joined(parts))
        yield items.event(f"response.{response['status']}", response=response)

    def framed(self, chunk: Json) -> bytes:
        return f"event: {chunk['type']}\n".encode() + super().framed(chunk)

    def told(self, error: ApiError) -> Json:
        content: Any = error.content
        del content["error"]["type"]
        return self._items.event("error", **content["error"])

    async def asked(self) -> Asked:
        try:
            return await super().asked()
        except ApiError as error:
            raise _renamed(error) from error

    def _response(self, wanted: Asked, answer: TextPiece | None) -> Json:
        """The response with its `answer`, None before that has begun."""
        reason = None if answer is None else answer.finish_reason
        is_cut = reason == "length"
        status = "in_progress" if answer is None else "incomplete" if is_cut else "completed"
        return {
            **self._told,
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created_s,
            "status": status,
            "model": self.head.model,
            "output": self._items.done,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if answer is None else _usage(wanted, answer),
        }


def _usage(wanted: Asked, answer: TextPiece) -> Json:
    """Tokens of reasoning are not counted apart."""
    return {
        "input_tokens": wanted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.shared_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.new_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": wanted.prompt_tokens + answer.new_tokens,
    }
