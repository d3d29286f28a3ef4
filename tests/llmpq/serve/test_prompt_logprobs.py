"""What is told of prompts over HTTP: `echo`, with `logprobs` as OpenAI has it, and vLLM's
`prompt_logprobs`; the byte at place n of a prompt has the log-probability -n here.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.llmpq.serve.asking import CHAT, COMPLETIONS, ask, events
from tests.llmpq.serve.pretend_engine import PretendEngine
from tests.llmpq.serve.test_chat import chat
from tests.llmpq.serve.test_completions import completion

ECHOED = {"echo": True, "logprobs": 1}
OF_PROMPT = {
    "tokens": ["a", "b", "c"],
    "token_logprobs": [None, -1.0, -2.0],
    "top_logprobs": [
        None,
        {"c": pytest.approx(-0.1), "b": -1.0},
        {"d": pytest.approx(-0.1), "c": -2.0},
    ],
    "text_offset": [0, 1, 2],
}


def one_choice(engine: PretendEngine | None = None, **fields: Any) -> dict[str, Any]:
    (choice,) = ask(COMPLETIONS, completion(**fields), engine).json()["choices"]
    found: dict[str, Any] = choice
    return found


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
def test_the_prompt_comes_before_the_answer(prompt: str | list[int]) -> None:
    engine = PretendEngine(lambda _: b"xy")
    choice = one_choice(engine, prompt=prompt, **ECHOED)
    assert choice["text"] == "abcxy"
    assert choice["logprobs"] == {
        "tokens": [*OF_PROMPT["tokens"], "x", "y"],
        "token_logprobs": [*OF_PROMPT["token_logprobs"], -0.5, -0.5],
        "top_logprobs": [*OF_PROMPT["top_logprobs"], {"x": -0.5}, {"y": -0.5}],
        "text_offset": [0, 1, 2, 3, 4],
    }
    assert [each.prompt_logprobs for each in engine.seen] == [1]


@pytest.mark.parametrize("most", [0, 1])
def test_no_or_one_token_as_evaluations_ask_for(most: int) -> None:
    engine = PretendEngine(lambda _: b"xy")
    answer = ask(COMPLETIONS, completion(prompt="abc", max_tokens=most, **ECHOED), engine).json()
    (choice,), usage = answer["choices"], answer["usage"]
    assert choice["text"] == "abcx"[: 3 + most]
    assert {name: told[:3] for name, told in choice["logprobs"].items()} == OF_PROMPT
    assert [len(told) for told in choice["logprobs"].values()] == [3 + most] * 4
    assert choice["finish_reason"] == "length"
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, most)
    assert not engine.live


def test_echo_alone_asks_nothing_of_the_stages() -> None:
    engine = PretendEngine(lambda _: b"xy")
    choice = one_choice(engine, prompt="é", echo=True)
    assert (choice["text"], choice["logprobs"]) == ("éxy", None)
    assert [each.prompt_logprobs for each in engine.seen] == [None]
    assert one_choice(engine, prompt="é", echo=True, max_tokens=0)["text"] == "é"


def test_streams_begin_with_the_prompt() -> None:
    body = completion(prompt="abc", stream=True, n=2, **ECHOED)
    engine = PretendEngine(lambda _: b"xy")
    chunks = [each["choices"][0] for each in events(ask(COMPLETIONS, body, engine).text)]
    for index in range(2):
        first, *others = [each for each in chunks if each["index"] == index]
        assert (first["text"], first["logprobs"]) == ("abc", OF_PROMPT)
        assert "".join(each["text"] for each in others) == "xy"
        offsets = [each["logprobs"]["text_offset"] for each in others if each["logprobs"]]
        assert offsets == [[3], [4]]


def test_stop_strings_are_looked_for_in_the_answer_alone() -> None:
    engine = PretendEngine(lambda _: b"xbz")
    choice = one_choice(engine, prompt="abc", stop="b", **ECHOED)
    assert choice["text"] == "abcx"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "x"]
    assert choice["finish_reason"] == "stop"


def test_characters_of_several_tokens() -> None:
    told = one_choice(prompt="aé!", max_tokens=0, **ECHOED)["logprobs"]
    assert told["tokens"] == ["a", "\ufffd", "\ufffd", "!"]
    assert told["text_offset"] == [0, 1, 1, 2]


def of_vllm(most: int) -> list[Any]:
    """What vLLM tells of the prompt "abc"."""

    def one(token: int, value: float, rank: int) -> dict[str, Any]:
        text = chr(token)
        return {"logprob": pytest.approx(value), "rank": rank, "decoded_token": text}

    found: list[Any] = [None]
    for place, token in ((1, 98), (2, 99)):
        others = {str(token + n): one(token + n, -n / 10, n) for n in range(1, most + 1)}
        found.append({str(token): one(token, -place, place + 1), **others})
    return found


@pytest.mark.parametrize("most", [0, 2])
def test_prompt_logprobs_of_completions(most: int) -> None:
    """Of every prompt, in each of its choices; more are asked for where echo has more."""
    engine = PretendEngine()
    body = completion(prompt=["abc", "a"], n=2, prompt_logprobs=most)
    choices = ask(COMPLETIONS, body, engine).json()["choices"]
    assert [each["prompt_logprobs"] for each in choices] == [of_vllm(most)] * 2 + [[None]] * 2
    assert [each["logprobs"] for each in choices] == [None] * 4
    both = one_choice(engine, prompt="abc", prompt_logprobs=most, **ECHOED)
    assert both["prompt_logprobs"] == of_vllm(most)
    assert both["logprobs"]["top_logprobs"][1] == OF_PROMPT["top_logprobs"][1]
    assert engine.seen[-1].prompt_logprobs == max(1, most)


def test_prompt_logprobs_of_a_chat_stand_beside_its_choices() -> None:
    engine = PretendEngine()
    answer = ask(CHAT, chat(n=2, prompt_logprobs=1), engine).json()
    prompt = engine.seen[0].prompt_ids
    told = answer["prompt_logprobs"]
    assert told[0] is None
    assert [next(iter(each)) for each in told[1:]] == [str(token) for token in prompt[1:]]
    assert [each.prompt_logprobs for each in engine.seen] == [1, None]
    assert all("prompt_logprobs" not in each for each in answer["choices"])
    assert "prompt_logprobs" not in ask(CHAT, chat()).json()
