"""`/v1/completions`, whole and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from actors.messages import Sampling
from llmpq.rows.answers import CompletionForm, TextPiece, TokenText
from llmpq.serve.options import ServeOptions
from quant.common.text import text_after
from tests.llmpq.serve.asking import COMPLETIONS, NOW_S, ask, completion, events
from tests.llmpq.serve.pretend_engine import LIMITS, PretendEngine
from tests.llmpq.small_tokenizers import ids_of, piece_tokenizer, strip_decoder


def texts(content: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in content["choices"]] == [*range(len(content["choices"]))]
    return [choice["text"] for choice in content["choices"]]


def streamed_texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice; every one must end once, with a reason, and after its text."""
    found: dict[int, str] = {}
    ended: set[int] = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in ended
            found[index] = found.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                assert choice["text"] == ""
                ended.add(index)
    assert ended == set(found)
    return found


def test_a_whole_answer() -> None:
    response = ask(COMPLETIONS, completion())
    assert response.status_code == 200
    content = response.json()
    assert content.pop("id").startswith("cmpl-")
    assert content == {
        "object": "text_completion",
        "created": NOW_S,
        "model": "pretend",
        "choices": [{"text": "Hello", "index": 0, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11},
    }


def test_the_frames_of_a_stream() -> None:
    response = ask(COMPLETIONS, completion(prompt="Hé", stream=True))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in response.headers
    name = events(response.text)[0]["id"]
    head = (
        f'data: {{"id":"{name}","object":"text_completion","created":{NOW_S},"model":"pretend",'
        '"choices":[{"text":"'
    )
    tail = '","index":0,"logprobs":null,"finish_reason":'
    assert response.text == (
        f"{head}H{tail}null}}]}}\n\n{head}é{tail}null}}]}}\n\n"
        f'{head}{tail}"stop"}}]}}\n\ndata: [DONE]\n\n'
    )


def test_usage_comes_last_and_is_null_before() -> None:
    body = completion(stream=True, stream_options={"include_usage": True})
    *before, last = events(ask(COMPLETIONS, body).text)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in before)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
        (["a", [98]], ["a", "b"]),
    ],
)
def test_every_form_of_a_prompt(prompt: object, wanted: list[str], is_streamed: bool) -> None:
    response = ask(COMPLETIONS, completion(prompt=prompt, stream=is_streamed))
    if is_streamed:
        assert streamed_texts(events(response.text)) == dict(enumerate(wanted))
    else:
        assert texts(response.json()) == wanted


@pytest.mark.parametrize("is_streamed", [False, True])
def test_several_answers_to_each_prompt_which_share_a_head(is_streamed: bool) -> None:
    body = completion(prompt=["a", "b"], n=3, temperature=1, seed=7)
    engine = PretendEngine(shared_tokens=64)
    if is_streamed:
        options = {"include_usage": True}
        response = ask(COMPLETIONS, body | {"stream": True, "stream_options": options}, engine)
        chunks = events(response.text)
        found, usage = [*streamed_texts(chunks).values()], chunks[-1]["usage"]
    else:
        content = ask(COMPLETIONS, body, engine).json()
        found, usage = texts(content), content["usage"]
    assert sorted(found) == [f"<7 {number}>" for number in range(6)]
    assert usage == {
        "prompt_tokens": 2,
        "completion_tokens": 36,
        "total_tokens": 38,
        "prompt_tokens_details": {"cached_tokens": 128},
    }


def test_a_seed_repeats_an_answer_and_no_seed_does_not() -> None:
    with_seed = [texts(ask(COMPLETIONS, completion(temperature=1, seed=3)).json()) for _ in "ab"]
    without = [texts(ask(COMPLETIONS, completion(temperature=1)).json()) for _ in "ab"]
    assert with_seed[0] == with_seed[1]
    assert without[0] != without[1]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("stop", "wanted", "reason"),
    [
        ("€c", "aé", "stop"),
        (["zz", "€"], "aé", "stop"),
        ("d€", "aé€cd", "stop"),
        ([], "aé€cd", "stop"),
        (None, "aé€cd", "stop"),
    ],
)
def test_stop_strings_across_tokens(
    stop: object, wanted: str, reason: str, is_streamed: bool
) -> None:
    engine = PretendEngine()
    body = completion(prompt="aé€cd", stop=stop, stream=is_streamed)
    response = ask(COMPLETIONS, body, engine)
    if is_streamed:
        chunks = events(response.text)
        assert streamed_texts(chunks) == {0: wanted}
        assert chunks[-1]["choices"][0]["finish_reason"] == reason
    else:
        assert texts(response.json()) == [wanted]
    assert not engine.live


def test_a_stop_string_ends_the_generation() -> None:
    engine = PretendEngine(answer=lambda request: b"ab" + b"x" * 90)
    ask(COMPLETIONS, completion(stop="b"), engine)
    assert engine.tokens < 10


def test_limits_of_the_answer() -> None:
    content = ask(COMPLETIONS, completion(max_tokens=3)).json()
    assert texts(content) == ["Hel"]
    assert content["choices"][0]["finish_reason"] == "length"
    assert content["usage"]["completion_tokens"] == 3
    engine = PretendEngine()
    ask(COMPLETIONS, completion(), engine)
    ask(COMPLETIONS, completion(prompt="x" * 180, max_tokens=70), engine)
    assert [request.max_new_tokens for request in engine.seen] == [50, 70]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_limit_within_a_character(is_streamed: bool) -> None:
    response = ask(COMPLETIONS, completion(prompt="aé", max_tokens=2, stream=is_streamed))
    if is_streamed:
        assert streamed_texts(events(response.text)) == {0: "a\ufffd"}
    else:
        assert texts(response.json()) == ["a\ufffd"]


def test_the_default_limit_gives_way_to_a_long_prompt() -> None:
    engine = PretendEngine()
    engine.limits = type(engine.limits)(200, 100, 210, 50, 257)
    ask(COMPLETIONS, completion(prompt="x" * 200), engine)
    assert engine.seen[0].max_new_tokens == 10


def test_sampling_reaches_the_engine() -> None:
    engine = PretendEngine()
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "seed": -5,
        "ignore_eos": True,
    }
    ask(COMPLETIONS, completion(**given, logit_bias={"97": -100}, stop=["a", "b"]), engine)
    sampling = engine.seen[0].sampling
    assert {name: getattr(sampling, name) for name in given} == given
    assert sampling.logit_bias == {97: -100.0}
    assert sampling.stop == ("a", "b")


def test_names_of_other_tools_reach_the_engine() -> None:
    engine = PretendEngine()
    given = {
        "options": {"num_predict": 7, "repeat_penalty": 1.2, "num_ctx": 4096},
        "sampling_params": {"top_k": -1, "stop_token_ids": [97]},
        "min_new_tokens": 2,
        "do_sample": True,
        "stop_sequences": ["x"],
    }
    ask(COMPLETIONS, completion(**given), engine)
    assert engine.seen[0].max_new_tokens == 7
    assert engine.seen[0].sampling == Sampling(
        1.0, repetition_penalty=1.2, stop=("x",), stop_token_ids=(97,), min_tokens=2
    )


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop_token_ids": [98]}, "a"),
        ({"stop": "b"}, "a"),
        ({"stop": "b", "min_tokens": 2}, "abca"),
        ({"stop": ["ca", "b"], "min_tokens": 3}, "ab"),
        ({"stop": ["bca", "c"], "min_tokens": 5}, "abcab"),
    ],
)
def test_what_ends_a_text(fields: dict[str, Any], text: str, is_streamed: bool) -> None:
    """Stop tokens are not shown, and stop strings within the least tokens are passed over."""
    response = ask(COMPLETIONS, completion(prompt="abcabc", stream=is_streamed, **fields))
    if is_streamed:
        assert streamed_texts(events(response.text)) == {0: text}
    else:
        assert texts(response.json()) == [text]


def test_log_probabilities() -> None:
    body = completion(prompt="aé", logprobs=1, max_tokens=9)
    wanted = {
        "text_offset": [0, 1, 1],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "tokens": ["a", "\ufffd", "\ufffd"],
        "top_logprobs": [{"a": -0.5}, {"\ufffd": -0.5}, {"\ufffd": -0.5}],
    }
    assert ask(COMPLETIONS, body).json()["choices"][0]["logprobs"] == wanted
    chunks = [
        chunk["choices"][0] for chunk in events(ask(COMPLETIONS, body | {"stream": True}).text)
    ]
    found = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    assert {name: [x for each in found for x in each[name]] for name in wanted} == wanted
    assert [chunk["text"] for chunk in chunks] == ["a", "é", ""]


def test_the_chosen_token_is_told_beside_the_most_probable_ones() -> None:
    """As OpenAI does; of tokens with one text the best counts."""
    token = TokenText("c", 0, -3.0, (("a", -0.5), ("\ufffd", -1.0), ("\ufffd", -2.0)))
    same = TokenText("\ufffd", 1, -2.0, token.top)
    choice = CompletionForm(True).whole(TextPiece(0, "c\ufffd", 2, (token, same), "length"))
    assert choice["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-3.0, -2.0],
        "tokens": ["c", "\ufffd"],
        "top_logprobs": [{"a": -0.5, "\ufffd": -1.0, "c": -3.0}, {"a": -0.5, "\ufffd": -1.0}],
    }


def test_impossible_tokens_have_a_log_probability_that_json_can_write() -> None:
    engine = PretendEngine(logprob=float("-inf"))
    choice = ask(COMPLETIONS, completion(prompt="a", logprobs=1), engine).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -9999.0}]


class SentencePieces(PretendEngine):
    """Answers prompts of token ids; its tokens are those of a tokenizer like LLaMA's."""

    pieces = piece_tokenizer(strip_decoder())

    async def decode(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        return text_after(self.pieces, before, token_ids)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        (["<s>", "▁Hello"], [" world", "\ufffd", "\ufffd", " the"]),
        (["<s>", "▁Hello", "</s>"], [" world", "\ufffd", "\ufffd", " the"]),
        (["<s>"], ["world", "\ufffd", "\ufffd", " the"]),
    ],
)
@pytest.mark.parametrize("stop", [None, " the"])
def test_texts_begin_with_the_space_that_they_have_after_the_prompt(
    prompt: list[str], tokens: list[str], stop: str | None
) -> None:
    ids = {word: ids_of(SentencePieces.pieces, word) for word in ("▁world", "ñ", "▁the", *prompt)}
    answer = [*ids["▁world"], *ids["ñ"], *ids["▁the"]]
    limits = replace(LIMITS, vocab_size=SentencePieces.pieces.vocab_size)
    engine = SentencePieces(lambda _: answer, limits)
    body = completion(prompt=[each for word in prompt for each in ids[word]], logprobs=0, stop=stop)
    choice = ask(COMPLETIONS, body | {"max_tokens": 4}, engine).json()["choices"][0]
    first = tokens[0]
    wanted = first + "ñ" if stop else first + "ñ the"
    assert choice["text"] == wanted
    assert choice["finish_reason"] == ("stop" if stop else "length")
    assert choice["logprobs"]["tokens"] == (tokens[:3] if stop else tokens)
    offsets = [0, len(first), len(first), len(first) + 1]
    assert choice["logprobs"]["text_offset"] == (offsets[:3] if stop else offsets)
    streamed = events(ask(COMPLETIONS, body | {"max_tokens": 4, "stream": True}, engine).text)
    assert streamed_texts(streamed) == {0: wanted}


def test_no_log_probabilities_beyond_a_stop_string() -> None:
    choice = ask(COMPLETIONS, completion(prompt="abcd", stop="cd", logprobs=0)).json()["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "b"]


def test_fields_without_effect_are_taken() -> None:
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    neutral = {"echo": False, "best_of": 2, "suffix": None, "n": 2, "logprobs": None}
    assert ask(COMPLETIONS, completion(**ignored, **neutral)).status_code == 200


def test_names_of_the_model() -> None:
    options = ServeOptions(served_model_names=("org/a", "b"))
    listed = ask("/v1/models", options=options).json()
    assert listed["object"] == "list"
    assert [each["id"] for each in listed["data"]] == ["org/a", "b"]
    one = ask("/v1/models/org/a", options=options).json()
    assert one == listed["data"][0]
    assert one == {"id": "org/a", "object": "model", "created": 1_700_000_000, "owned_by": "llmpq"}
    assert ask(COMPLETIONS, completion(model="b"), options=options).json()["model"] == "b"
