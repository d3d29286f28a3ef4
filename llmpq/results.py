"""What comes out of a run, and the JSONL file that keeps it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from contextlib import suppress
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

    An output that may be overwritten is only emptied when the first new result is there. Raises
    `InputError` when `path` cannot be written, is one of `inputs`, or holds results already and
    `overwrite` is off.
    """

    def __init__(self, path: Path, overwrite: bool = False, inputs: Sequence[Path] = ()) -> None:
        self._path = path
        self._is_empty = False
        try:
            if path.is_dir():
                raise InputError(f"output {path} is a folder; name a file in it")
            if path.exists() and any(path.samefile(source) for source in inputs):
                raise InputError(f"output {path} is the input too; name another file")
            if not overwrite and path.exists() and path.stat().st_size > 0:
                raise InputError(f"output {path} exists already; name another or pass --overwrite")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error

    def write(self, result: Result) -> None:
        """Append one line and hand it to the operating system."""
        try:
            if not self._is_empty:
                if os.fstat(self._file.fileno()).st_size:
                    self._file.truncate(0)
                self._is_empty = True
            self._file.write(result.to_json() + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(f"cannot write output {self._path}: {error.strerror}")

    def __enter__(self) -> ResultFile:
        """The open file."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Bring everything to disk, where the output is something that lies on one."""
        with suppress(OSError):
            os.fsync(self._file.fileno())
        with suppress(OSError):  # a full disk was reported by the write that met it
            self._file.close()
