"""Writing a picture or a page to a file."""

from __future__ import annotations

from pathlib import Path

from quant.common.errors import InputError, SpecError
from quant.common.files import write_whole


def write_picture(path: Path, text: str) -> None:
    """Write `text` whole or not at all; SpecError where it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from error


def write_page(path: Path, text: str) -> None:
    """Write a page whole or not at all; InputError where it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"cannot write the report to {path}: {error.strerror}") from error
