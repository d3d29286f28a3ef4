"""What cannot be served is refused in OpenAI's form, with the field and the remedy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from llmpq.serve.options import ServeOptions
from tests.llmpq.serve.asking import (
    CHAT,
    COMPLETIONS,
    JSON,
    ask,
    chat,
    completion,
    error_of,
)


def shortly(value: object) -> str:
    return ascii(value)[:40]


WRONG_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": 5}, "prompt", "a text, a list of token ids"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": ["a", 5]}, "prompt", "its entry [1]"),
    ({"prompt": [1, "a"]}, "prompt", "token ids are whole numbers"),
    ({"prompt": [1, -1]}, "prompt", "-1 at 1"),
    ({"prompt": [[2**40]]}, "prompt", "token ids"),
    ({"prompt": [300]}, "prompt", "token id 300, the model's vocabulary ends at 256"),
    ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ({"prompt": "\0"}, "prompt", "takes no NUL"),
    ({"prompt": ["a", ""]}, "prompt", "no tokens"),
    ({"model": None}, "model", "it must be a text"),
    ({"temperature": "hot"}, "temperature", "'hot': it must be a number"),
    ({"temperature": -1}, "temperature", "0 (greedy) or more"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_k": 1.5}, "top_k", "whole number"),
    ({"top_k": True}, "top_k", "whole number"),
    ({"min_p": 2}, "min_p", "from 0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0.01"),
    ({"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2 to 2"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "no token id"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "vocabulary ends at 256"),
    ({"logit_bias": {"3": "x"}}, "logit_bias.3", "it must be a number"),
    ({"seed": 10**30}, "seed", "at most"),
    ({"stop": ["a"] * 5}, "stop", "5 texts, at most 4"),
    ({"stop": [""]}, "stop", "1 to 1000 characters"),
    ({"stop": [1]}, "stop", "a list of texts"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"num_return_sequences": 0}, "num_return_sequences", "greater than or equal to 1"),
    ({"n": 129}, "n", "128"),
    ({"max_tokens": 0}, "max_tokens", "at least 1, unless echo is true"),
    ({"max_tokens": -1, "echo": True}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": 101}, "max_tokens", "room for 100 new tokens"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {}}, "stream_options", "unless stream is true"),
    ({"stream": True, "stream_options": 1}, "stream_options", "an object"),
    (
        {"stream": True, "stream_options": {"include_usag": True}},
        "stream_options.include_usag",
        "the nearest is include_usage",
    ),
    ({"logprobs": 6}, "logprobs", "less than or equal to 5"),
    ({"logprobs": True}, "logprobs", "whole number"),
    ({"echo": 1}, "echo", "true or false"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "whole number"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "leave stream out"),
    ({"best_of": 3}, "best_of", "n is 1"),
    ({"suffix": "x"}, "suffix", "only continued"),
    ({"response_format": {"type": "json"}}, "response_format", "its type must be one of"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "has no schema"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "with one of"),
    ({"extra_body": {"guided_regex": 5}}, "extra_body.guided_regex", "must be a text"),
    ({"guided_choice": ["impossible"]}, "guided_choice", "cannot be kept: no text has this form"),
    ({"temprature": 1}, "temprature", "the nearest is temperature"),
    ({"zzz": 1}, "zzz", "known are"),
    ({"guided_json": [5]}, "guided_json", "the schema [5]; it must be an object"),
    ({"num_predict": 0}, "num_predict", "at least 1, unless echo is true"),
    ({"options": {"num_predict": 101}}, "max_tokens", "room for 100 new tokens"),
    ({"options": {"temperature": "hot"}}, "options.temperature", "it must be a number"),
    ({"sampling_params": 5}, "sampling_params", "an object"),
    ({"max_tokens": 5, "max_new_tokens": 6}, "max_new_tokens", "and max_tokens are given"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "at most 5 tokens"),
    ({"min_new_tokens": -1}, "min_new_tokens", "greater than or equal to 0"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "vocabulary ends at 256"),
    ({"stop_token_ids": 5}, "stop_token_ids", "a list"),
    ({"do_sample": True, "temperature": 0}, "do_sample", "give one above 0"),
    ({"tools": [{"type": "function"}]}, "tools", "is for messages"),
    ({"system": "Be brief."}, "system", "a message of role"),
]


NOW = {"type": "function", "function": {"name": "now"}}
NEVER = {"type": "function", "function": {"name": "f", "parameters": {"title": "impossible"}}}


@pytest.mark.parametrize(("fields", "param", "words"), WRONG_FIELDS, ids=shortly)
def test_wrong_fields_of_a_completion(fields: dict[str, Any], param: str, words: str) -> None:
    response = ask(COMPLETIONS, completion(**fields))
    error = error_of(response)
    assert response.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert param.partition(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hi"}, "messages", "a list"),
        ({"messages": [5]}, "messages[0]", "an object"),
        ({"messages": [{"content": "x"}]}, "messages", "message 1 has no role"),
        ({"messages": [{"role": "user"}]}, "messages", "no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text"),
        ({"prompt": "x"}, "prompt", "unknown field"),
        ({"tools": ["f"]}, "tools[0]", "an object"),
        ({"tool_choice": "any"}, "tool_choice", '"none", "auto", "required"'),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "no function with a name"),
        ({"tools": [NOW], "tool_choice": {"function": {"name": "x"}}}, "tool_choice", "none of"),
        ({"tools": [NOW], "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "beside"),
        ({"tools": [NEVER], "tool_choice": "required"}, "tools", "cannot be kept"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"enable_thinking": 1}, "enable_thinking", "true or false"),
        ({"chat_template_kwargs": {"tools": 5}}, "chat_template_kwargs.tools", "list of objects"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "both true",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "unless logprobs is true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"logprobs": 1}, "logprobs", "true or false"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"echo": True}, "echo", "does not repeat the prompt"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "one of them"),
        ({"max_completion_tokens": 101}, "max_completion_tokens", "room for 100"),
    ],
    ids=shortly,
)
def test_wrong_fields_of_a_chat(fields: dict[str, Any], param: str, words: str) -> None:
    response = ask(CHAT, chat(**fields))
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_prompt_that_is_too_long_says_limit_and_length(is_streamed: bool) -> None:
    for prompt, size in (("x" * 201, "201 tokens"), ("x" * 3000, "3000 characters")):
        response = ask(COMPLETIONS, completion(prompt=prompt, stream=is_streamed))
        error = error_of(response)
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert size in error["message"]
        assert "200" in error["message"]


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field(missing: str) -> None:
    body = completion()
    del body[missing]
    error = error_of(ask(COMPLETIONS, body))
    assert (error["param"], error["message"]) == (missing, f"{missing} is missing")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'"a"', b"\xff{}", b'{"a": NaN}', b"[" * 100_000, b"1" * 5000, b"{'a': 1}"],
    ids=lambda each: str(each[:10]),
)
def test_bodies_that_are_no_json_object(content: bytes) -> None:
    response = ask(COMPLETIONS, content=content, headers=JSON)
    assert response.status_code == 400
    assert "the body" in error_of(response)["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_other_media_types(headers: dict[str, str]) -> None:
    response = ask(COMPLETIONS, content=json.dumps(completion()).encode(), headers=headers)
    assert response.status_code == 415
    error_of(response)


def test_a_charset_is_no_other_media_type() -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    content = json.dumps(completion()).encode()
    assert ask(COMPLETIONS, content=content, headers=headers).status_code == 200


@pytest.mark.parametrize("says_length", [True, False])
def test_bodies_beyond_the_bound(says_length: bool) -> None:
    read = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 1
            yield b" " * 100

    options = ServeOptions(body_limit_bytes=1000)
    headers = JSON | ({"content-length": "100000"} if says_length else {})
    response = ask(COMPLETIONS, content=parts(), headers=headers, options=options)
    assert response.status_code == 413
    assert "1000 bytes" in error_of(response)["message"]
    assert read == (0 if says_length else 11)


def test_a_body_that_does_not_come() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    options = ServeOptions(body_s=0.01)
    response = ask(COMPLETIONS, content=parts(), headers=JSON, options=options)
    assert response.status_code == 408
    error_of(response)


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, completion(model="gpt-4")), (CHAT, chat(model="gpt-4")), ("/v1/models/x", None)],
)
def test_another_model(path: str, body: object) -> None:
    response = ask(path, body)
    error = error_of(response)
    assert response.status_code == 404
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'pretend'" in error["message"]


def test_other_addresses_and_methods() -> None:
    for path, status in (("/v1/embeddings", 404), ("/docs", 404), (COMPLETIONS, 405)):
        response = ask(path)
        assert response.status_code == status
        error_of(response)


def test_whole_numbers_may_be_written_as_tables_write_them() -> None:
    own = {"prompt": [1, 2], "max_tokens": 3, "seed": 5, "top_k": 2, "n": 2, "min_tokens": 1}
    written = {name: float(value) for name, value in own.items() if isinstance(value, int)}
    said = ask(COMPLETIONS, completion(**own)).json()
    same = ask(COMPLETIONS, completion(**{**own, **written, "prompt": [1.0, 2.0]})).json()
    assert same["choices"] == said["choices"]
    assert same["usage"] == said["usage"]
