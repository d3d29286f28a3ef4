"""The output of a response: its items, and the events that tell of them while an answer comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmpq.rows.answers import Json, TextPiece, ToolCall

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
