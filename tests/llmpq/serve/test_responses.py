"""`/v1/responses` as OpenAI's own client reads it, whole and streamed, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from llmpq.rows.row import Row
from llmpq.serve.engine import EngineLimits, GenerationError
from llmpq.tokenizing.reasoning import Markers
from tests.llmpq.serve.asking import CHAT, RESPONSES, ask, chat, error_of, run, serving, url
from tests.llmpq.serve.pretend_engine import PretendEngine

CALL = '<tool_call>{"name": "look", "arguments": {"town": "Ulm"}}</tool_call>'
LOOK: dict[str, Any] = {"type": "function", "name": "look", "strict": True, "parameters": {}}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def engine(answer: str, **more: Any) -> PretendEngine:
    return PretendEngine(
        answer=lambda request: answer.encode(),
        markers=Markers("<think>", "</think>"),
        limits=EngineLimits(500, 500, 1000, 500, 257),
        **more,
    )


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "pretend", "input": "Hello", **fields}


def streamed(body: dict[str, Any], served: PretendEngine) -> list[Any]:
    """The events of a stream, each of the types of OpenAI's package and in its order."""
    frames = ask(RESPONSES, {**body, "stream": True}, served).text.split("\n\n")
    assert frames.pop() == ""
    found = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        made = EVENT.validate_json(data.removeprefix("data: "))
        assert (made.sequence_number, f"event: {made.type}") == (number, name)
        found.append(made)
    return found


@pytest.mark.parametrize(
    ("answer", "fields", "kinds", "text", "status"),
    [
        ("Hi é.", {}, ["message"], "Hi é.", "completed"),
        ("", {}, ["message"], "", "completed"),
        ("<think>hm</think>Hi", {}, ["reasoning", "message"], "Hi", "completed"),
        (f"I look. {CALL}{CALL}", {"tools": [LOOK]}, ["message", "function_call", "function_call"],
         "I look.", "completed"),
        ('{"town": "Ulm"}', {"tools": [LOOK], "tool_choice": {"type": "function", "name": "look"}},
         ["function_call"], "", "completed"),
        ("Hi there", {"max_output_tokens": 4}, ["message"], "Hi t", "incomplete"),
    ],
)  # fmt: skip
def test_items_whole_and_streamed(
    answer: str, fields: dict[str, Any], kinds: list[str], text: str, status: str
) -> None:
    body = asked(**fields, instructions="Be brief.", metadata={"a": "b"})
    whole = Response.model_validate(ask(RESPONSES, body, engine(answer)).json())
    assert [item.type for item in whole.output] == kinds
    assert (whole.output_text, whole.status) == (text, status)
    assert (whole.instructions, whole.metadata) == ("Be brief.", {"a": "b"})
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    calls = [(item.name, item.arguments) for item in whole.output if item.type == "function_call"]
    assert calls == [("look", '{"town": "Ulm"}')] * kinds.count("function_call")
    events = streamed(body, engine(answer))
    assert [event.type for event in (events[0], events[-1])] == [
        "response.created", f"response.{status}",
    ]  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text
    last = events[-1].response
    ended = [event.item for event in events if event.type == "response.output_item.done"]
    assert last.output == ended
    drop = {"id": True, "call_id": True}
    for one, other in zip(last.output, whole.output, strict=True):
        assert one.model_dump(exclude=drop) == other.model_dump(exclude=drop)
    assert last.usage == whole.usage


def test_what_came_before_becomes_messages() -> None:
    rows: list[Row] = []

    class Noting(PretendEngine):
        async def encode(self, row: Row) -> tuple[int, ...]:
            rows.append(row)
            return (65,)

    call = {"name": "look", "arguments": '{"town": "Ulm"}'}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Warm?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", **call},
        {"type": "function_call", "call_id": "c2", **call},
        {"type": "function_call_output", "call_id": "c1", "output": "20 degrees"},
    ]  # fmt: skip
    made = [{"id": name, "type": "function", "function": call} for name in ("c1", "c2")]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": made},
        {"role": "tool", "tool_call_id": "c1", "content": "20 degrees"},
    ]
    assert ask(RESPONSES, asked(input=items, tools=[LOOK]), Noting()).status_code == 200
    framed = {"type": "function", "function": {"name": "look"}}
    assert ask(CHAT, chat(messages=messages, tools=[framed]), Noting()).status_code == 200
    assert rows[0].messages == rows[1].messages
    assert rows[0].prompt_options == rows[1].prompt_options


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "give all messages in input"),
        ({"store": True}, "store", "no response is stored"),
        ({"background": True}, "background", "/v1/batches"),
        ({"conversation": "c"}, "conversation", "nothing is kept"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "chat_template_kwargs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "no tools of its own"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "no function with a name"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"input": None}, "input", "is missing"),
        ({"input": 5}, "input", "a list of objects"),
        ({"input": [{"role": "user"}]}, "input", "no content"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0]", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "text"),
        ({"input": "x" * 501}, "input", "room for 500 tokens"),
        ({"instructions": 5}, "instructions", "give a text"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "its type must be one of"),
        ({"text": {"format": {"type": "json_schema", "schema": {"title": "impossible"}}}},
         "text.format", "cannot be kept"),
        ({"text": []}, "text", "an object with a format"),
        ({"max_output_tokens": 501}, "max_output_tokens", "room for 500 new"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"temprature": 1}, "temprature", "the nearest is temperature"),
        ({"num_return_sequences": 2}, "n", "one answer"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], param: str, words: str) -> None:
    response = ask(RESPONSES, asked(**fields), engine("Hi"))
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]


@pytest.mark.parametrize("path", ["embeddings", "rerank", "audio/speech"])
def test_what_llmpq_has_not_is_said(path: str) -> None:
    response = ask(f"/v1/{path}", {"model": "pretend", "input": "a"})
    assert response.status_code == 404
    assert error_of(response)["code"] == "not_served"


def test_a_fault_ends_a_stream_by_its_event() -> None:
    fault = GenerationError("a stage died")
    events = streamed(asked(), engine("Hi there", fault=fault, fault_after=3))
    assert events[-1].type == "error"
    assert "a stage died" in events[-1].message


class Pet(BaseModel):
    kind: str


class Look(BaseModel):
    town: str


def test_the_client_of_openai() -> None:
    async def scenario() -> None:
        served = engine('{"kind": "cat"}')
        async with serving(served) as server:
            given = {"base_url": f"{url(server)}/v1", "api_key": "-", "max_retries": 0}
            async with openai.AsyncOpenAI(**given) as client:
                await talk(client, served)
        forms = [request.sampling.structured_outputs for request in served.seen]
        assert any(forms)
        assert not all(forms)  # plain answers and calls have none

    run(scenario)


async def talk(client: openai.AsyncOpenAI, served: PretendEngine) -> None:
    parsed = await client.responses.parse(model="pretend", input="A pet?", text_format=Pet)
    assert parsed.output_parsed == Pet(kind="cat")
    form = json.loads(served.seen[-1].sampling.structured_outputs)["json"]
    assert form["properties"] == Pet.model_json_schema()["properties"]
    text = f"I look. {CALL.replace('look', 'Look')}"
    served.answer = lambda request: text.encode()
    tools: Any = [openai.pydantic_function_tool(Look)["function"] | {"type": "function"}]
    async with client.responses.stream(model="pretend", input="Warm?", tools=tools) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == "I look."
    (call,) = (item for item in final.output if item.type == "function_call")
    assert (call.name, call.parsed_arguments) == ("Look", {"town": "Ulm"})
    served.answer = lambda request: b"Yes."
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    again = await client.responses.create(
        model="pretend", input=[*final.output, result], tools=tools
    )
    assert again.output_text == "Yes."
    with pytest.raises(openai.NotFoundError, match="no embeddings"):
        await client.embeddings.create(model="pretend", input="a")
