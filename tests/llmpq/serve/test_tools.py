"""Calls of tools over HTTP: plain, streamed, and by OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from llmpq.serve.engine import EngineLimits
from llmpq.tokenizing.reasoning import Markers
from tests.llmpq.serve.asking import CHAT, ask, chat, events, run, serving, url
from tests.llmpq.serve.pretend_engine import PretendEngine


class Look(BaseModel):
    town: str


LOOK = openai.pydantic_function_tool(Look)
TOOLS = [LOOK, {"type": "function", "function": {"name": "now"}}]
CALL = '<tool_call>\n{"name": "Look", "arguments": {"town": "Ulm é"}}\n</tool_call>'
CALLED = ("Look", '{"town": "Ulm é"}')
MANY = f"<think>hm</think>I look.\n{CALL}\n{CALL}"


TAGGED = "<tool_call>{}</tool_call>"
QWEN = TAGGED.format("<function=Look>\n<parameter=town>\nUlm é\n</parameter>\n</function>\n")
GLM = TAGGED.format("Look\n<arg_key>town</arg_key>\n<arg_value>Ulm é</arg_value>\n")


def engine(answer: str, tool_parser: str = "hermes") -> PretendEngine:
    return PretendEngine(
        tool_parser=tool_parser,
        answer=lambda request: answer.encode(),
        markers=Markers("<think>", "</think>"),
        limits=EngineLimits(1000, 1000, 2000, 1000, 257),
    )


@pytest.mark.parametrize(
    ("answer", "fields", "content", "calls", "reason"),
    [
        (MANY, {}, "I look.", [CALLED] * 2, "tool_calls"),
        (MANY, {"parallel_tool_calls": False}, "I look.", [CALLED], "tool_calls"),
        (CALL, {}, None, [CALLED], "tool_calls"),
        ("4", {}, "4", [], "stop"),
        (CALL, {"max_tokens": 20}, CALL[:20], [], "length"),
        ("<tool_call>{</tool_call>", {}, "<tool_call>{</tool_call>", [], "stop"),
        (CALL, {"tool_choice": "none"}, CALL, [], "stop"),
        ('{"town": "Ulm é"}', {"tool_choice": {"type": "function", "function": {"name": "Look"}}},
         None, [CALLED], "tool_calls"),
        ('[{"name": "now", "parameters": {}}, {"name": "now", "parameters": {}}]',
         {"tool_choice": "required"}, None, [("now", "{}")] * 2, "tool_calls"),
        ('[{"name": "now", "parameters": {}}]', {"tool_choice": "required", "max_tokens": 30},
         '[{"name": "now", "parameters":', [], "length"),
    ],
)  # fmt: skip
def test_calls_come_apart(
    answer: str, fields: dict[str, Any], content: str | None, calls: list[Any], reason: str
) -> None:
    body = chat(tools=TOOLS, **fields)
    (choice,) = ask(CHAT, body, engine(answer)).json()["choices"]
    message = choice["message"]
    made = message.get("tool_calls", [])
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in made] == calls
    assert (message["content"], choice["finish_reason"]) == (content, reason)
    found: dict[int, dict[str, Any]] = {}
    text = ""
    for chunk in events(ask(CHAT, {**body, "stream": True}, engine(answer)).text):
        delta = chunk["choices"][0]["delta"]
        text += delta.get("content") or ""
        for each in delta.get("tool_calls", ()):
            assert found.setdefault(each["index"], each) is each  # whole in one delta
    assert chunk["choices"][0]["finish_reason"] == reason
    assert text == (content or "")
    told = [found[index] for index in range(len(calls))]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in told] == calls
    assert len({each["id"] for each in told}) == len(told)


@pytest.mark.parametrize(
    ("tool_parser", "call"), [("hermes", CALL), ("qwen3_coder", QWEN), ("glm45", GLM)]
)
def test_the_client_of_openai_reads_calls_and_sends_their_results_back(
    tool_parser: str, call: str
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is it warm?"}]

    async def scenario() -> None:
        served = engine(MANY.replace(CALL, call), tool_parser)
        async with serving(served) as server:
            given = {"base_url": f"{url(server)}/v1", "api_key": "-", "max_retries": 0}
            async with openai.AsyncOpenAI(**given) as client:
                asked: dict[str, Any] = {"model": "pretend", "messages": messages, "tools": [LOOK]}
                parsed = await client.chat.completions.parse(**asked)
                (first, _) = parsed.choices[0].message.tool_calls or ()
                assert first.function.parsed_arguments == Look(town="Ulm é")
                async with client.chat.completions.stream(**asked) as stream:
                    async for _ in stream:
                        pass
                    streamed = (await stream.get_final_completion()).choices[0]
                assert streamed.finish_reason == "tool_calls"
                assert streamed.message.content == "I look."
                functions = [each.function for each in streamed.message.tool_calls or ()]
                assert [(f.name, f.arguments) for f in functions] == [CALLED] * 2
                assert functions[0].parsed_arguments == Look(town="Ulm é")
                answer = {"role": "tool", "tool_call_id": first.id, "content": "20 degrees"}
                messages.extend([parsed.choices[0].message.model_dump(), answer])
                served.answer = lambda request: b"Yes."
                again = await client.chat.completions.create(**asked)
                assert again.choices[0].message.content == "Yes."

    run(scenario)
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == {"town": "Ulm é"}
