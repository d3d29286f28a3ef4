"""Seeds and parsers of tables and compressed files: prompts and finished results."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

from llmpq.jobs.inputs import JobInput
from llmpq.jobs.result_lines import result_identities
from llmpq.jobs.text_files import csv_lines
from llmpq.rows.row import BadRow, Row
from tests.properties.seeds import line_seeds


def prompt_csv_seeds() -> tuple[bytes, ...]:
    """Every kind of cell; quotes, line ends within a text, a byte order mark."""
    text = (
        "custom_id,prompt,messages,temperature,stop,max_new_tokens,logit_bias\r\n"
        'a,"two\nlines, ""quoted""",,0.5,END,8,"{""5"": -1}"\r\n'
        'b,,"[{""role"": ""user"", ""content"": ""hi""}]",,"[""x""]",40.0,\r\n'
    )
    return (text.encode(), b"\xef\xbb\xbfprompt\nx\n\ny\n")


def result_csv_seeds() -> tuple[bytes, ...]:
    """A finished output with a text and an error."""
    fingerprint = f"{'0' * 12}-{'1' * 20}"
    good = {"custom_id": "a", "text": "two\nlines", "token_ids": [1, 2], "finish_reason": "stop"}
    bad = {"custom_id": "b", "text": None, "token_ids": [], "finish_reason": None}
    rows = (
        good | {"error": None, "fingerprint": fingerprint},
        bad | {"error": "why", "fingerprint": fingerprint},
    )
    return (b"".join(csv_lines(rows)),)


@cache
def packed_seeds() -> tuple[bytes, ...]:
    """Lines of prompts as gzip and as Zstandard."""
    import pyarrow as pa

    data = b"\n".join(line_seeds())
    return (gzip.compress(data, mtime=0), bytes(pa.compress(data, "zstd", asbytes=True)))


def prompt_csv(data: bytes, folder: Path) -> bool:
    """Whether a row can run."""
    path = folder / "prompts.csv"
    path.write_bytes(data)
    return read_prompts(path)


def packed_prompts(data: bytes, folder: Path) -> bool:
    """The same, of a file that begins as one of the seeds."""
    path = folder / f"p.jsonl{'.gz' if data[:2] == bytes((0x1F, 0x8B)) else '.zst'}"
    path.write_bytes(data)
    return read_prompts(path)


def result_csv(data: bytes, folder: Path) -> bool:
    """Whether there is a row."""
    (folder / "out.csv").write_bytes(data)
    found = [each.custom_id for each in result_identities(folder / "out.csv")]
    json.dumps(found)
    return bool(found)


def read_prompts(path: Path) -> bool:
    """Whether a row can run; ids and errors are text that can be written."""
    rows = [placed.row for placed in JobInput.find([path]).rows()]
    for row in rows:
        row.custom_id.encode()
        if isinstance(row, BadRow):
            row.error.encode()
    return any(isinstance(row, Row) for row in rows)
