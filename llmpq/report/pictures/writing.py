"""Writing a picture to a file."""

from __future__ import annotations

from pathlib import Path

from quant.common.errors import SpecError
from quant.common.whole_file import write_whole


def write_picture(path: Path, text: str) -> None:
    """Write `text` whole or not at all; SpecError where it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from error
