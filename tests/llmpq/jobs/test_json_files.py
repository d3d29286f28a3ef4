"""Rows of JSON that are not one a line: arrays, pretty-printed objects, single ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from llmpq.jobs import file_format, text_files
from llmpq.jobs.inputs import JobInput
from llmpq.rows.row import BadRow, Row
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import write_prompts

CHAT = [{"role": "user", "content": 'a "quoted" }{ ][ \\ line\nand 模型 \u2028'}]
ROWS: list[dict[str, Any]] = [
    {"custom_id": "a", "prompt": "text", "temperature": 0.5, "meta": {"n": [1, -2.5e3, None]}},
    {"prompt": "no id", "stop": ["x", "y"]},
    {"custom_id": "c", "messages": CHAT, "max_new_tokens": 3},
    {"custom_id": "d", "prompt": [1, 2, 3], "ignore_eos": True},
]
FORMS = {
    "array": json.dumps(ROWS),
    "pretty array": json.dumps(ROWS, indent=2, ensure_ascii=False),
    "array of lines": "[\r\n" + ",\r\n".join(map(json.dumps, ROWS)) + "\r\n]\r\n",
    "pretty objects": "\n".join(json.dumps(row, indent=4) for row in ROWS),
    "after blank lines": "\n \n" + json.dumps(ROWS, indent="\t"),
}


def rows_of(path: Path) -> list[Row | BadRow]:
    return [placed.row for placed in JobInput.find([path]).rows()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("read_characters", [1, 7, 2**16])
def test_rows_are_those_of_lines(
    form: str, read_characters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if read_characters > 1 or form != "array":  # beyond the first bytes nothing tells an array
        monkeypatch.setattr(text_files, "READ_CHARACTERS", read_characters)
    expected = rows_of(write_prompts(tmp_path / "lines.jsonl", *ROWS))
    assert all(isinstance(row, Row) for row in expected)
    content = FORMS[form].encode()
    for name, packed in (
        ("rows.json", content),
        ("rows.jsonl", b"\xef\xbb\xbf" + content),
        ("rows.json.gz", gzip.compress(content)),
        ("rows.jsonl.zst", pa.compress(content, "zstd", asbytes=True)),
    ):
        (tmp_path / name).write_bytes(packed)
        assert rows_of(tmp_path / name) == expected


def test_an_empty_array_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text("[ ]\n")
    assert rows_of(tmp_path / "in.json") == []


def test_a_single_object_is_a_row(tmp_path: Path) -> None:
    for number, indent in enumerate((None, 1)):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(ROWS[0], indent=indent))
        (row,) = rows_of(path)
        assert row.custom_id == "a"


def test_bad_rows_are_named_by_their_number(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_text(json.dumps([ROWS[0], {"prompt": 1}, "x", None, ROWS[2]], indent=1))
    good, wrong, text, nothing, last = rows_of(path)
    assert (good.custom_id, last.custom_id) == ("a", "c")
    for number, row in enumerate((wrong, text, nothing), start=2):
        assert isinstance(row, BadRow)
        assert row.custom_id == f"in.json:{number}"
    assert isinstance(text, BadRow)
    assert text.error == "not a JSON object"
    path.write_bytes(b'[{"custom_id": "a", "prompt": "x\xff"}, {"custom_id": "b", "prompt": "y"}]')
    latin, good = rows_of(path)
    assert isinstance(latin, BadRow)
    assert isinstance(good, Row)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"prompt": "a"},\n {"prompt": "b" "c"}]', "line 2, column 17: Expecting ',' delimiter"),
        ('[\n{"prompt": "a"}\n{"prompt": "b"}]', "line 3, column 1: there is no ',' or ']'"),
        ('[\n{"prompt": "a"},\n{"prompt": "b', "line 3, column 12: Unterminated string"),
        ('[\n{"prompt": "a"},\n', "line 3, column 1: Expecting value"),
        ('[{"prompt": "a"}', "there is no ',' or ']'"),
        ('[{"prompt": "a"},]', "column 18: Expecting value"),
        ('[{"prompt": "a"}]\n[]', "line 2, column 1: there is more after the end"),
        ('{\n"prompt": "a"\n},\n{\n"prompt": "b"\n}', "line 3, column 2: Expecting value"),
        ('[\n"a",\n"b"\n]', "its rows must be objects"),
        ('["a", "b"]', "its rows must be objects"),
        ('[["a"], ["b"]]\n', "its rows must be objects"),
        ('[5, {"prompt": "a"}]', "its rows must be objects"),
        ("[ \nno JSON\nat all\n", "line 2, column 1: Expecting value"),
        ('{\n  "prompt": "a",\n}\n', "line 3, column 1: Expecting property name"),
        ('\n{\r\n\t"prompt" "a"\r\n}', "line 3, column 11: Expecting ':'"),
        ('[{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}]", "nests too deeply"),
        ('[{"prompt": [' + "9" * 5000 + "]}]", "line 1, column 2: Exceeds the limit"),
    ],
)
def test_an_array_that_breaks_off_is_refused_as_a_file(
    content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "in.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        rows_of(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "give one JSON object per line" in str(caught.value)


def test_a_row_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_format, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(text_files, "READ_CHARACTERS", 100)
    path = tmp_path / "in.json"
    path.write_text(json.dumps([{"prompt": "x" * 900}] * 50))
    assert len(rows_of(path)) == 50
    path.write_text(json.dumps([{"prompt": "x" * 900}, {"prompt": "x" * 3000}]))
    with pytest.raises(InputError, match="line 1, column 918: a row has more than 1000"):
        rows_of(path)


@pytest.mark.parametrize(
    "first", ["[1]", "{", '{"prompt": "a"', '{"prompt": "a"} {"prompt": "b"}', '["a"]', "[]", "x"]
)
def test_a_first_line_that_is_bad_leaves_the_other_lines_rows(first: str, tmp_path: Path) -> None:
    bad, good = rows_of(write_prompts(tmp_path / "in.jsonl", first, ROWS[0]))
    assert isinstance(bad, BadRow)
    assert bad.custom_id == "in.jsonl:1"
    assert good.custom_id == "a"
