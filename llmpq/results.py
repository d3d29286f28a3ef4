"""What comes out of a run, and the JSONL file that keeps it."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

from quant.errors import InputError


@dataclass(frozen=True)
class Result:
    """One row's outcome: generated tokens (EOS included) and their text, or `error`.

    `text` is None where the model has no tokenizer.
    """

    custom_id: str
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error: str | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


class ResultFile:
    """Writes results line by line; every finished line is in the file even if the run is stopped.

    Raises `InputError` when `path` cannot be written, or holds results already and `overwrite` is
    off.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        if path.is_dir():
            raise InputError(f"output {path} is a folder; name a file in it")
        if path.exists() and path.stat().st_size > 0 and not overwrite:
            raise InputError(f"output {path} exists already; name another file or pass --overwrite")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write output {path}: {error.strerror}") from error

    def write(self, result: Result) -> None:
        """Append one line and hand it to the operating system."""
        self._file.write(result.to_json() + "\n")
        self._file.flush()

    def __enter__(self) -> ResultFile:
        """The open file."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Bring everything to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
