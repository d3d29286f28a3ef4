"""Documents and the windows they are cut into."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmpq.quality.text_windows import as_documents, read_documents, token_windows
from llmpq.tokenizing.requests import load_tokenizer
from quant.common.errors import InputError
from tests.llmpq.small_tokenizers import GIVES_UP, MANY_X, write_tokenizer


def test_windows_hold_every_token_once_in_order() -> None:
    for total in range(2, 40):
        for length in (2, 3, 7, 64):
            windows = token_windows([list(range(5, 5 + total))], None, length)
            flat = np.concatenate(
                [row[:n] for row, n in zip(windows.token_ids, windows.counts, strict=True)]
            )
            lost = total - len(flat)
            assert lost == (1 if total > length and total % length == 1 else 0)
            assert flat.tolist() == list(range(5, 5 + len(flat)))
            assert windows.scored == len(flat) - len(windows.counts)
            assert (windows.counts[:-1] == windows.token_ids.shape[1]).all()


def test_max_tokens_cuts_the_text() -> None:
    windows = token_windows([[1] * 10, [2] * 10, [3] * 10], None, 6, max_tokens=12)
    assert windows.token_ids.tolist() == [[1] * 6, [1] * 4 + [2] * 2]


def test_documents_of_files(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one\ntwo\n", encoding="utf-8-sig")
    rows = [{"prompt": "three"}, {"text": [4, 5], "custom_id": "x"}]
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_documents([plain, lines]) == ("one\ntwo\n", "three", [4, 5])


def test_what_python_users_pass() -> None:
    assert as_documents("text") == ("text",)
    assert as_documents([3, 4]) == ((3, 4),)
    assert as_documents(np.array([3, 4])) == ((3, 4),)
    assert as_documents(["text", [3]]) == ("text", [3])
    with pytest.raises(InputError, match="float"):
        as_documents([1.5])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "2: not JSON"),
        ("[1, 2]", "exactly one of prompt and text"),
        ('{"prompt": "a", "text": "b"}', "exactly one"),
        ('{"prompt": 3}', "text or a list of token ids"),
        ('{"prompt": [1, true]}', "text or a list of token ids"),
    ],
)
def test_lines_that_are_no_documents(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(InputError, match=message):
        read_documents([path])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for name, message in (("none", "cannot read"), ("latin", "not UTF-8"), ("a\0b", "cannot read")):
        with pytest.raises(InputError, match=message):
            read_documents([tmp_path / name])


@pytest.mark.parametrize(
    ("documents", "length", "message"),
    [
        ([], 8, "0 tokens"),
        ([[7]], 8, "1 token;"),
        ([[7, 8]], 1, "sequence_length is 1"),
        ([[7, -8]], 8, "whole numbers"),
        (["words"], 8, "no tokenizer"),
    ],
)
def test_texts_that_cannot_be_scored(
    documents: list[str | list[int]], length: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        token_windows(documents, None, length)


def test_a_document_at_which_the_tokenizer_panics_is_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "model", pattern=GIVES_UP))
    documents = ("hello world", MANY_X + "\x1b")
    with pytest.raises(InputError) as caught:
        token_windows(documents, tokenizer, 8)
    text = str(caught.value)
    assert text.startswith("document 2 ('xxxx")
    assert "cannot be tokenized: tokenizer: PanicException: Onig" in text
    assert token_windows(documents[:1], tokenizer, 8).token_ids.tolist() == [[10, 11]]
