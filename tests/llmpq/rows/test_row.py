"""Reading prompts: every accepted form, every refused one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.messages import Sampling
from llmpq.jobs.python_rows import rows_of
from llmpq.rows.row import BadRow, Row, row_from_line
from llmpq.rows.sampling import merge_sampling
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import read_rows


def read(tmp_path: Path, *lines: Any) -> tuple[Row | BadRow, ...]:
    path = tmp_path / "prompts.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text)
    return read_rows(path)


def test_accepted_forms(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    rows = read(
        tmp_path,
        {"custom_id": "a", "prompt": "text"},
        "",
        {"prompt": [1, 2, 3], "max_new_tokens": 4, "stop": "x"},
        {"custom_id": "c", "messages": chat, "sampling": {"temperature": 1, "seed": 7}},
        {
            "custom_id": "batch",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": "p", "max_tokens": 9, "top_p": 0.5},
        },
        {
            "custom_id": "penalised",
            "body": {"prompt": "p", "presence_penalty": 1, "logit_bias": {"50": -100, "7": 0.5}},
        },
        {"custom_id": "f", "prompt": "p", "repetition_penalty": 1.1, "min_p": 0.1},
    )
    assert rows[1].custom_id.startswith("p-")
    assert rows == (
        Row("a", text="text"),
        Row(rows[1].custom_id, token_ids=(1, 2, 3), sampling={"max_new_tokens": 4, "stop": "x"}),
        Row("c", messages=tuple(chat), sampling={"temperature": 1, "seed": 7}),
        Row("batch", text="p", sampling={"max_new_tokens": 9, "top_p": 0.5}),
        Row(
            "penalised",
            text="p",
            sampling={"presence_penalty": 1, "logit_bias": {"50": -100, "7": 0.5}},
        ),
        Row("f", text="p", sampling={"repetition_penalty": 1.1, "min_p": 0.1}),
    )
    settled = merge_sampling(Sampling(), rows[4].sampling)
    assert settled == Sampling(presence_penalty=1.0, logit_bias={7: 0.5, 50: -100.0})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"custom_id": "x"}', "exactly one of prompt and messages"),
        ('{"prompt": "a", "messages": []}', "exactly one of"),
        ('{"prompt": 3}', "text or a list of token ids"),
        ('{"prompt": [1, -2]}', "text or a list of token ids"),
        ('{"prompt": [1, 2.5]}', "text or a list of token ids"),
        ('{"prompt": [true]}', "text or a list of token ids"),
        ('{"messages": []}', "non-empty list"),
        ('{"prompt": "a", "temprature": 1}', "temprature"),
        ('{"prompt": "a", "temperature": "hot"}', "a number"),
        ('{"prompt": "a", "temperature": -1}', "0 (greedy) or more"),
        ('{"prompt": "a", "top_k": 1.5}', "a whole number"),
        ('{"prompt": "a", "max_new_tokens": true}', "a whole number"),
        ('{"prompt": "a", "stop": [3]}', "list of strings"),
        ('{"prompt": "a", "ignore_eos": 1}', "true or false"),
        ('{"prompt": "a", "sampling": 3}', "must be an object"),
        ('{"custom_id": 5, "prompt": "a"}', "non-empty string"),
        ('{"prompt": [' + "9" * 5000 + "]}", "not JSON"),
        ('{"prompt": "a", "temperature": 1' + "0" * 400 + "}", "a number"),
        ('{"prompt": "a", "top_k": 99999999999999999999}', "a whole number"),
        ('{"prompt": "a \\ud800"}', "surrogate"),
        ('{"custom_id": "\\ud800", "prompt": "a"}', "surrogate"),
        ('{"prompt": "a", "stop": "\\udfff"}', "list of strings"),
        ('{"prompt": "a", "n": 0}', "n is 0; it must be"),
        ('{"prompt": "a", "repetition_penalty": 0}', "from 0.01 to 100; 1 is none"),
        ('{"prompt": "a", "repetition_penalty": 1e999}', "a number of at most"),
        ('{"prompt": "a", "presence_penalty": 2.5}', "presence_penalty is 2.5"),
        ('{"prompt": "a", "frequency_penalty": "1"}', "a number"),
        ('{"prompt": "a", "min_p": 1.5}', "from 0 (off) to 1"),
        ('{"prompt": "a", "logit_bias": {"5": 101}}', "token '5' is 101"),
        ('{"prompt": "a", "logit_bias": {"five": 1}}', "'five', which is no token id"),
        ('{"prompt": "a", "logit_bias": [5]}', "must map token ids to numbers"),
        ("[" * 100000, "not JSON"),
    ],
)
def test_a_bad_line_becomes_an_error_row_and_leaves_the_others(
    line: str, message: str, tmp_path: Path
) -> None:
    bad, good = read(tmp_path, line, {"custom_id": "good", "prompt": "p"})
    assert isinstance(bad, BadRow)
    assert message in bad.error
    assert good == Row("good", text="p")


def test_line_separators_within_a_prompt_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    text = "one\u2028two\x85three"
    lines = [{"custom_id": "a", "prompt": text}, {"custom_id": "b", "prompt": "c", "stop": None}]
    body = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_bytes(b"\xef\xbb\xbf" + body.encode())
    assert read_rows(path) == (Row("a", text=text), Row("b", text="c"))


def test_an_id_twice_is_refused_with_both_rows() -> None:
    twice = {"custom_id": "same", "prompt": "p"}
    rows = [twice, "other", twice]
    with pytest.raises(InputError, match=r"'same' of row 2 stands in row 0"):
        rows_of(rows)
    lazily = rows_of(iter(rows))
    assert [next(lazily).custom_id, next(lazily).custom_id] == ["same", "row-1"]
    with pytest.raises(InputError, match=r"'same' of row 2 stands in row 0"):
        next(lazily)
    with pytest.raises(InputError, match="no prompts"):
        rows_of([])


def test_an_unreadable_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read input"):
        read_rows(tmp_path / "missing.jsonl")


def test_rows_from_python() -> None:
    assert tuple(rows_of(["a", [1, 2], {"custom_id": "c", "prompt": "d"}])) == (
        Row("row-0", text="a"),
        Row("row-1", token_ids=(1, 2)),
        Row("c", text="d"),
    )


@pytest.mark.parametrize("rows", ["one prompt", b"bytes"])
def test_a_single_string_is_no_list_of_prompts(rows: Any) -> None:
    with pytest.raises(InputError, match="one string"):
        rows_of(rows)


def test_row_sampling_overrides_only_its_own_fields() -> None:
    base = Sampling(temperature=0.5, seed=3, stop=("x",))
    assert merge_sampling(base, {"temperature": 2, "stop": ["y", "z"]}) == Sampling(
        temperature=2.0, seed=3, stop=("y", "z")
    )


def test_a_row_without_options_costs_no_check_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(self: Sampling) -> None:
        raise AssertionError("a sampling was made, which takes as long as reading the row")

    monkeypatch.setattr(Sampling, "__post_init__", checked)
    row = row_from_line(b'{"custom_id": "a", "prompt": "x", "source": "web"}', "1")
    assert row == Row("a", "x", columns={"source": "web"})
