"""`/v1/chat/completions`, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from llmpq.rows.row import Row
from llmpq.tokenizing.reasoning import Markers
from tests.llmpq.serve.asking import CHAT, COMPLETIONS, NOW_S, ask, chat, completion, events
from tests.llmpq.serve.pretend_engine import PretendEngine

PROMPT = "user: Hello\n"


def test_how_messages_become_tokens_reaches_the_engine() -> None:
    rows: list[Row] = []

    class Noting(PretendEngine):
        async def encode(self, row: Row) -> tuple[int, ...]:
            rows.append(row)
            return await super().encode(row)

    tools = [{"type": "function", "function": {"name": "f"}}]
    given = {"tools": tools, "tool_choice": "auto", "enable_thinking": False}
    assert ask(CHAT, chat(**given, add_generation_prompt=True), Noting()).status_code == 200
    assert ask(CHAT, chat(extra_body={"documents": [{"text": "t"}]}), Noting()).status_code == 200
    for prompt in ("Hi", [72]):
        body = completion(prompt=prompt, add_special_tokens=False)
        assert ask(COMPLETIONS, body, Noting()).status_code == 200
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    assert [row.prompt_options for row in rows] == [
        {"add_generation_prompt": True, "tools": tools, **thinking},
        {"documents": [{"text": "t"}]},
        {"add_special_tokens": False},
        {},
    ]


def test_a_whole_answer() -> None:
    content = ask(CHAT, chat()).json()
    assert content.pop("id").startswith("chatcmpl-")
    assert content == {
        "object": "chat.completion",
        "created": NOW_S,
        "model": "pretend",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": PROMPT, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 12, "completion_tokens": 13, "total_tokens": 25},
    }


def test_the_chunks_of_a_stream() -> None:
    engine = PretendEngine(answer=lambda request: "aé".encode())
    body = chat(stream=True, stream_options={"include_usage": True})
    chunks = events(ask(CHAT, body, engine).text)
    (name,) = {chunk["id"] for chunk in chunks}
    head = {"id": name, "object": "chat.completion.chunk", "created": NOW_S, "model": "pretend"}

    def wanted(delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**head, "choices": [choice], "usage": None}

    usage = {"prompt_tokens": 12, "completion_tokens": 4, "total_tokens": 16}
    assert chunks == [
        wanted({"role": "assistant", "content": ""}),
        wanted({"content": "a"}),
        wanted({"content": "é"}),
        wanted({}, "stop"),
        {**head, "choices": [], "usage": usage},
    ]


def test_an_empty_answer_opens_and_closes() -> None:
    engine = PretendEngine(answer=lambda request: b"")
    chunks = events(ask(CHAT, chat(stream=True), engine).text)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {},
    ]
    assert ask(CHAT, chat(), engine).json()["choices"][0]["message"]["content"] == ""


def test_several_answers_stream_side_by_side() -> None:
    """A choice does not wait until the one before has ended."""
    chunks = events(ask(CHAT, chat(stream=True, n=3)).text)
    found = {index: "" for index in range(3)}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        found[choice["index"]] += choice["delta"].get("content", "")
    assert found == dict.fromkeys(range(3), PROMPT)
    ends = [at for at, chunk in enumerate(chunks) if chunk["choices"][0]["finish_reason"]]
    begins = [at for at, chunk in enumerate(chunks) if "role" in chunk["choices"][0]["delta"]]
    assert len(ends) == len(begins) == 3
    assert max(begins) < min(ends)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(field: str) -> None:
    choice = ask(CHAT, chat(**{field: 4})).json()["choices"][0]
    assert choice["message"]["content"] == PROMPT[:4]
    assert choice["finish_reason"] == "length"


def test_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer = ask(CHAT, chat(messages=[{"role": "user", "content": parts}])).json()
    assert answer["choices"][0]["message"]["content"] == "user: one\ntwo\n"


def test_log_probabilities() -> None:
    engine = PretendEngine(answer=lambda request: b"a\xff")
    body = chat(logprobs=True, top_logprobs=2)
    choice = ask(CHAT, body, engine).json()["choices"][0]
    first = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert choice["logprobs"]["content"] == [
        {**first, "top_logprobs": [first, {"token": "b", "logprob": -1.5, "bytes": [98]}]},
        {
            "token": "\ufffd",
            "logprob": -0.5,
            "bytes": None,
            "top_logprobs": [
                {"token": "\ufffd", "logprob": -0.5, "bytes": None},
                {"token": "\0", "logprob": -1.5, "bytes": [0]},
            ],
        },
    ]
    chunks = events(ask(CHAT, body | {"stream": True}, engine).text)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token for each in streamed if each for token in each["content"]] == (
        choice["logprobs"]["content"]
    )


def test_log_probabilities_without_alternatives() -> None:
    content = ask(CHAT, chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == PROMPT
    assert all(token["top_logprobs"] == [] for token in content)


THINK = Markers("<think>", "</think>")


def thinks(answer: str) -> PretendEngine:
    """A model that reasons between markers, and whose prompts end as the last message does."""
    return PretendEngine(answer=lambda request: answer.encode(), markers=THINK)


@pytest.mark.parametrize(
    ("answer", "reasoning", "content"),
    [
        ("<think>a é\n</think>\n4", "a é\n", "\n4"),
        ("<think>a", "a", ""),
        ("4 < 5 <think>", None, "4 < 5 <think>"),
    ],
)
def test_reasoning_comes_apart(answer: str, reasoning: str | None, content: str) -> None:
    message = ask(CHAT, chat(), thinks(answer)).json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    assert ("reasoning_content" in message) == (reasoning is not None)
    chunks = events(ask(CHAT, chat(stream=True, n=2, logprobs=True), thinks(answer)).text)
    for index in range(2):
        of_one = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == index]
        deltas = [choice["delta"] for choice in of_one]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (reasoning or "")
        assert "".join(delta.get("content", "") for delta in deltas) == content
        tokens = [token for each in of_one for token in (each["logprobs"] or {}).get("content", ())]
        assert len(tokens) == len(answer.encode())


def test_reasoning_that_the_prompt_opens() -> None:
    body = chat(messages=[{"role": "user", "content": "<think>"}])
    message = ask(CHAT, body, thinks("a</think>4")).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a", "4")
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in events(ask(CHAT, body | {"stream": True}, thinks("a</think>4")).text)
    ]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "a"},
        {"content": "4"},
        {},
    ]


def test_an_answer_with_a_form_reasons_before_it() -> None:
    """What the prompt begins is told to what compiles the form; in JSON a marker is none."""
    form = {"response_format": {"type": "json_object"}}
    for prompt, answer, reasoning, content in (
        ("<think>", "a</think>{}", "a", "{}"),
        ("hi", '{"a": "</think>"}', None, '{"a": "</think>"}'),
        ("</think>", "{}", None, "{}"),
    ):
        body = chat(messages=[{"role": "user", "content": prompt}], **form)
        served = thinks(answer)
        message = ask(CHAT, body, served).json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
        has_begun = {"<think>": True, "hi": False, "</think>": None}[prompt]
        assert served.forms == [None, has_begun]
        chunks = events(ask(CHAT, {**body, "stream": True}, thinks(answer)).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content", "") for delta in deltas) == content


def test_texts_are_not_divided() -> None:
    choice = ask(COMPLETIONS, completion(), thinks("<think>a</think>4")).json()["choices"][0]
    assert choice["text"] == "<think>a</think>4"
