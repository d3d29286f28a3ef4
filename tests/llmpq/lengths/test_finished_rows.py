"""Prompts with the lengths of their answers, from each kind of file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmpq.lengths.finished_rows import as_prompts, read_finished
from quant.common.errors import InputError, SpecError
from tests.llmpq.small_tokenizers import TEMPLATE, write_tokenizer


def lines(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def result(custom_id: str, tokens: int, error: str | None = None) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "text": None if error else "x",
        "token_ids": [7] * tokens,
        "finish_reason": None if error else "stop",
        "error": error,
        "fingerprint": "0" * 16,
    }


def answer(custom_id: str, tokens: int, status: int = 200) -> dict[str, Any]:
    body = {"usage": {"completion_tokens": tokens}} if status == 200 else {"error": {}}
    return {"custom_id": custom_id, "response": {"status_code": status, "body": body}}


def test_lengths_are_joined_by_id(tmp_path: Path) -> None:
    """Of llmpq's results and of a batch's answers; errors, and rows of no prompt, are left out."""
    prompts = lines(
        tmp_path / "in.jsonl", *({"custom_id": name, "prompt": f"is {name}"} for name in "abcdef")
    )
    ours = lines(tmp_path / "out.jsonl", result("a", 3), result("b", 2, "x"), result("zz", 4))
    theirs = lines(tmp_path / "batch.jsonl", answer("c", 9), answer("d", 1, 400), answer("f", 0))
    found = read_finished([prompts], [ours, theirs])
    assert [(row.custom_id, tokens) for row, tokens in found] == [("a", 3), ("c", 9)]
    assert found[0][0].text == "is a"


def test_rows_may_bring_their_lengths(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "in.jsonl",
        {"custom_id": "a", "prompt": "x", "output_tokens": 3},
        {"prompt": [1, 2], "output_tokens": 4},
    )
    table = tmp_path / "in.csv"
    table.write_text("prompt,output_tokens\nx y,5\n")
    found = read_finished([path, table])
    assert [tokens for _, tokens in found] == [3, 4, 5]
    assert found[1][0].token_ids == (1, 2)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "x"}, r"in\.jsonl:2: no output_tokens"),
        ({"prompt": "x", "output_tokens": -1}, r"in\.jsonl:2: output_tokens is -1"),
        ({"prompt": "x", "output_tokens": float("nan")}, "output_tokens is nan"),
        ({"prompt": "x", "output_tokens": 2.5}, "output_tokens is 2.5"),
        ({"prompt": 5, "output_tokens": 2}, r"in\.jsonl:2: prompt must be"),
    ],
)
def test_a_length_that_is_none_is_named(tmp_path: Path, row: dict[str, Any], named: str) -> None:
    path = lines(tmp_path / "in.jsonl", {"prompt": "x", "output_tokens": 1}, row)
    with pytest.raises(SpecError, match=named):
        read_finished([path])


def test_an_empty_set_is_refused(tmp_path: Path) -> None:
    empty = lines(tmp_path / "in.jsonl")
    with pytest.raises(InputError, match="has no rows"):
        read_finished([empty])
    prompts = lines(tmp_path / "other.jsonl", {"custom_id": "a", "prompt": "x"})
    with pytest.raises(InputError, match=r"no row of .*other\.jsonl has a result"):
        read_finished([prompts], [lines(tmp_path / "out.jsonl", result("b", 3))])
    with pytest.raises(InputError, match="no finished row without an error"):
        read_finished([prompts], [lines(tmp_path / "bad.jsonl", result("a", 0, "x"))])


def test_a_run_sees_ids_and_their_text(tmp_path: Path) -> None:
    """Chat messages as the template writes them, rows that cannot be tokenized not at all."""
    model = write_tokenizer(tmp_path / "m", TEMPLATE)
    path = lines(
        tmp_path / "in.jsonl",
        {"prompt": "hello  world", "output_tokens": 3},
        {"messages": [{"role": "user", "content": "hello"}], "output_tokens": 4},
        {"prompt": [1, 2], "output_tokens": 5},
        {"prompt": "", "output_tokens": 6},
    )
    learnt = as_prompts(read_finished([path]), model)
    assert [each.tokens for each in learnt] == [3, 4, 5]
    assert [each.prompt.text for each in learnt] == ["hello world", "[ user ] hello", "a b"]
    assert [len(each.prompt.token_ids) for each in learnt] == [2, 4, 2]


def test_texts_need_no_model_and_ids_do(tmp_path: Path) -> None:
    path = lines(tmp_path / "in.jsonl", {"prompt": "x y", "output_tokens": 3})
    assert as_prompts(read_finished([path]), None)[0].prompt.text == "x y"
    ids = lines(tmp_path / "ids.jsonl", {"custom_id": "q", "prompt": [1], "output_tokens": 3})
    with pytest.raises(SpecError, match="row 'q' has token ids; name the model"):
        as_prompts(read_finished([ids]), None)
    (tmp_path / "bare").mkdir()
    learnt = as_prompts(read_finished([ids]), tmp_path / "bare")
    assert (learnt[0].prompt.token_ids, learnt[0].prompt.text) == ((1,), "")
    with pytest.raises(SpecError, match="can read none of 1 prompts"):
        as_prompts(read_finished([path]), tmp_path / "bare")
