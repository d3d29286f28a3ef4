"""Requests made of rows: chat templates, limits of a row, and text cut at stop strings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.messages import Request, Sampling
from llmpq.rows.row import BadRow, Row
from llmpq.tokenizing.requests import AHEAD_ROWS, RequestMaker, load_tokenizer
from llmpq.tokenizing.tokenizer_process import RowLimits
from planner.workload import Workload
from tests.llmpq.small_tokenizers import (
    BY_CONTENT,
    GIVES_UP,
    MANY_X,
    TEMPLATE,
    ids_of,
    piece_tokenizer,
    strip_decoder,
    write_tokenizer,
)
from tests.paths import DEMO_MODEL

MODEL = DEMO_MODEL
PLANNED = Workload(4, 64, 16)


def maker_of(folder: Path, row_s: float = 30.0) -> RequestMaker:
    limits = RowLimits(row_s, row_bytes=1 << 29, most_tokens=PLANNED.prompt_length)
    return RequestMaker(PLANNED, 2048, Sampling(), load_tokenizer(folder, limits))


def request_of(maker: RequestMaker, row: Row) -> Request | BadRow:
    return next(maker.requests((row,)))


@pytest.fixture(scope="module")
def maker() -> RequestMaker:
    return maker_of(MODEL)


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template and its tokenizer do what a row says."""
    return write_tokenizer(tmp_path_factory.mktemp("hostile"), BY_CONTENT, GIVES_UP)


@pytest.fixture(scope="module")
def hostile(hostile_folder: Path) -> RequestMaker:
    return maker_of(hostile_folder)


def chat(content: str, custom_id: str = "a") -> Row:
    return Row(custom_id, messages=({"role": "user", "content": content},))


@pytest.mark.parametrize("folder", ["demo", "small"])
def test_tokens_are_those_of_transformers(folder: str, maker: RequestMaker, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = MODEL if folder == "demo" else write_tokenizer(tmp_path / "small", TEMPLATE)
    made = maker if folder == "demo" else maker_of(path)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    rows = [Row(str(i), text="hello world " + "a\n" * i) for i in range(2 * AHEAD_ROWS)]
    for row, request in zip(rows, made.requests(rows), strict=True):
        ids = tuple(tokenizer(row.text)["input_ids"])
        assert getattr(request, "prompt_ids", None) == (ids if len(ids) <= 64 else None)
    if folder == "small":
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "b"}]
        expected = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        request = request_of(made, Row("c", messages=tuple(messages)))
        assert isinstance(request, Request)
        assert list(request.prompt_ids) == expected["input_ids"]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("recursion", "RecursionError"),
        ("wrong type", "AttributeError"),
        ("memory", "more memory than a row may take"),
        ("long", "the prompt has 20000009 characters, the plan has room for 64 tokens"),
        ("division", "ZeroDivisionError"),
        ("refused", "chat template: roles must alternate"),
        ("missing", "UndefinedError"),
        ("half a pair", "chat template: \\ud800"),
        ("half a pair shown", "tokenizer: TypeError"),
        (MANY_X, "tokenizer: PanicException: Onig: Regex search error"),
    ],
)
def test_what_a_row_does_to_the_template_makes_an_error_row(
    content: str, cause: str, hostile: RequestMaker
) -> None:
    before, bad, after = hostile.requests([chat("a", "1"), chat(content, "2"), chat("b", "3")])
    assert isinstance(before, Request)
    assert isinstance(bad, BadRow)
    assert bad.custom_id == "2"
    assert cause in bad.error
    assert bad.error.isprintable()
    assert isinstance(after, Request)


def test_a_template_that_does_not_end_is_an_error_row(hostile_folder: Path) -> None:
    bad = request_of(maker_of(hostile_folder, row_s=1.0), chat("loop"))
    assert isinstance(bad, BadRow)
    assert "chat template or tokenizer: took more than 1 s" in bad.error


def test_no_template_is_an_error_row(maker: RequestMaker) -> None:
    bad = request_of(maker, chat("a"))
    assert isinstance(bad, BadRow)
    assert "the model has none; give a prompt instead of messages, or a template" in bad.error


def test_a_text_at_which_the_tokenizer_panics(hostile: RequestMaker) -> None:
    bad, good = hostile.requests([Row("1", text=MANY_X), Row("2", text="hello")])
    assert isinstance(bad, BadRow)
    assert "PanicException" in bad.error
    assert isinstance(good, Request)


def test_a_text_far_longer_than_planned_is_not_tokenized(maker: RequestMaker) -> None:
    submitted: list[Any] = []
    assert maker.tokenizer is not None
    submit = maker.tokenizer.submit

    def watched(task: Any) -> int:
        submitted.append(task)
        return submit(task)

    maker.tokenizer.submit = watched  # type: ignore[method-assign]
    try:
        bad, long = maker.requests([Row("a", text="x " * 10**7), Row("b", text="x " * 70)])
    finally:
        maker.tokenizer.submit = submit  # type: ignore[method-assign]
    assert isinstance(bad, BadRow)
    assert "20000000 characters, the plan has room for 64 tokens" in bad.error
    assert len(submitted) == 1
    assert isinstance(long, BadRow)
    assert "the prompt has 72 tokens, the plan has room for 64" in long.error


def test_a_prompt_of_a_million_characters_passes_where_it_is_planned(tmp_path: Path) -> None:
    planned = Workload(1, 300_000, 1)
    limits = RowLimits(most_tokens=planned.prompt_length)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "m"), limits)
    made = RequestMaker(planned, 2048, Sampling(), tokenizer)
    request = request_of(made, Row("a", text="hello " * 200_000))
    assert isinstance(request, Request)
    assert len(request.prompt_ids) == 200_000


def test_messages_that_are_no_json(maker: RequestMaker) -> None:
    bad = request_of(maker, Row("a", messages=({"role": "user", "content": "a", "x": {1, 2}},)))
    assert isinstance(bad, BadRow)
    assert "not JSON serializable" in bad.error


def test_bad_rows_and_token_ids_keep_their_place(maker: RequestMaker) -> None:
    rows = [BadRow("0", "bad"), Row("1", text="a"), Row("2", token_ids=(5,)), Row("3", text="b")]
    assert [made.custom_id for made in maker.requests(rows)] == ["0", "1", "2", "3"]


def test_rows_are_taken_as_they_are_needed(maker: RequestMaker) -> None:
    taken: list[int] = []

    def rows() -> Iterator[Row]:
        for number in range(10 * AHEAD_ROWS):
            taken.append(number)
            yield Row(str(number), text="a")

    next(maker.requests(rows()))
    assert len(taken) == AHEAD_ROWS


def test_stop_strings_without_a_tokenizer() -> None:
    made = RequestMaker(PLANNED, 2048, Sampling(stop=("x",)), None)
    bad = request_of(made, Row("a", token_ids=(5, 6)))
    assert isinstance(bad, BadRow)
    assert "tokenizer" in bad.error


def test_bias_of_tokens_that_the_model_has_not(maker: RequestMaker) -> None:
    row = Row("a", token_ids=(5, 6), sampling={"logit_bias": {"2047": 1.0, "3": 1.0}})
    assert isinstance(request_of(maker, row), Request)
    bad = request_of(maker, Row("a", token_ids=(5, 6), sampling={"logit_bias": {"2048": 1.0}}))
    assert isinstance(bad, BadRow)
    assert "token id 2048, the model's vocabulary ends at 2047" in bad.error


def test_text_is_cut_before_the_first_stop_string(maker: RequestMaker) -> None:
    request = request_of(maker, Row("a", text="return the list of values"))
    assert isinstance(request, Request)
    ids = request.prompt_ids
    stopped = replace(request, sampling=Sampling(stop=("values", "list")))
    whole, cut = maker.texts([(request, ids), (stopped, ids)])
    assert whole.text == "return the list of values"
    assert cut.text == "return the "


def test_texts_follow_those_of_their_prompts(tmp_path: Path) -> None:
    """Of pieces as SentencePiece has them, whose decoder leaves out the first space of a text."""
    pieces = piece_tokenizer(strip_decoder())
    pieces.save_pretrained(tmp_path)
    (bos,), (hello,), (world,) = (ids_of(pieces, each) for each in ("<s>", "▁Hello", "▁world"))
    asked = Request("a", (bos, hello), 16, Sampling())
    generated = [
        (asked, (world, world)),
        (replace(asked, sampling=Sampling(stop=(" world",))), (world,)),
        (replace(asked, prompt_ids=(hello, bos)), (world,)),
        (replace(asked, prompt_ids=(bos,)), (world, world)),
    ]
    texts = [answer.text for answer in maker_of(tmp_path).texts(generated)]
    assert texts == [" world world", "", " world", "world world"]


def test_text_ends_before_a_stop_token_and_not_within_the_least_tokens(maker: RequestMaker) -> None:
    request = request_of(maker, Row("a", text="a list, a list"))
    assert isinstance(request, Request)
    ids = request.prompt_ids
    least = Sampling(stop=("list",), min_tokens=len(ids) - 1)
    stopping = Sampling(stop_token_ids=(ids[-1],))
    asked = [(replace(request, sampling=sampling), ids) for sampling in (least, stopping)]
    later, ended, without = maker.texts([*asked, (request, ids[:-1])])
    assert later.text == "a list, a "
    assert ended.text == without.text


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"min_tokens": 17}, "min_tokens is 17, but at most 16 tokens may be generated"),
        ({"min_tokens": 5, "max_new_tokens": 4}, "but at most 4 tokens"),
        ({"stop_token_ids": [2048]}, "stop_token_ids has token id 2048, the model's vocabulary"),
    ],
)
def test_ends_that_cannot_be(maker: RequestMaker, sampling: dict[str, Any], told: str) -> None:
    bad = request_of(maker, Row("a", token_ids=(5, 6), sampling=sampling))
    assert isinstance(bad, BadRow)
    assert told in bad.error


def test_tokens_that_cannot_be_turned_into_text(maker: RequestMaker) -> None:
    request = Request("a", (5,), 16, Sampling())
    bad, good = maker.texts([(request, (2**40,)), (request, (5,))])
    assert bad.text is None
    assert "OverflowError" in str(bad.error)
    assert good.text is not None
