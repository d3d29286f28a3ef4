"""Rows to requests: chat templates, tokenizers that fail, and text cut at stop strings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.messages import Request, Sampling
from llmpq.rows import BadRow, Row
from llmpq.tokenize import RequestMaker, load_tokenizer
from planner.workload import Workload
from quant.errors import CheckpointError

MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
CHAT = ({"role": "user", "content": "What is a list?"},)
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\\n{% endfor %}"
REFUSING = "{{ raise_exception('roles must alternate') }}"


def maker(template: str | None = None) -> RequestMaker:
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = template
    return RequestMaker(Workload(4, 64, 16), 2048, Sampling(), tokenizer)


def test_messages_go_through_the_chat_template() -> None:
    made = maker(TEMPLATE)
    request = made.request(Row("a", messages=CHAT))
    assert isinstance(request, Request)
    text = made.tokenizer.decode(request.prompt_ids, skip_special_tokens=True)
    assert text.startswith("[user] What is a list?")


@pytest.mark.parametrize("template", [None, REFUSING, "{{ 1 // 0 }}", "{{ messages[7].role.x }}"])
def test_a_template_that_fails_makes_an_error_row(template: str | None) -> None:
    bad = maker(template).request(Row("a", messages=CHAT))
    assert isinstance(bad, BadRow)
    assert "cannot be tokenized" in bad.error


def test_stop_strings_without_a_tokenizer() -> None:
    made = RequestMaker(Workload(4, 64, 16), 2048, Sampling(stop=("x",)), None)
    bad = made.request(Row("a", token_ids=(5, 6)))
    assert isinstance(bad, BadRow)
    assert "tokenizer" in bad.error


def test_bias_of_tokens_that_the_model_has_not() -> None:
    row = Row("a", token_ids=(5, 6), sampling={"logit_bias": {"2047": 1.0, "3": 1.0}})
    assert isinstance(maker().request(row), Request)
    bad = maker().request(Row("a", token_ids=(5, 6), sampling={"logit_bias": {"2048": 1.0}}))
    assert isinstance(bad, BadRow)
    assert "token id 2048, the model's vocabulary ends at 2047" in bad.error


def test_text_is_cut_before_the_first_stop_string() -> None:
    made = maker()
    ids = tuple(made.tokenizer("return the list of values")["input_ids"])
    whole = made.text(ids, ())
    assert whole is not None
    cut = made.text(ids, ("values", "list"))
    assert cut == whole[: whole.index("list")]


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", {}), ("tokenizer.json", []), ("tokenizer_config.json", [])],
)
def test_a_broken_tokenizer_is_named(name: str, content: Any, tmp_path: Path) -> None:
    for file in MODEL.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="tokenizer in"):
        load_tokenizer(tmp_path)
