"""Records in place of damaged or lost ones, made of what is left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from llmpq.serve.batches.storage.records import KEPT_S, WINDOW_S, Batch, Problem, StoredFile

_BATCH = TypeAdapter(Batch)


def remade_file(content: Path, number: int, why: str) -> StoredFile:
    """The record of the file with this `content`, as far as that tells."""
    found = content.stat()
    arrived_s = int(found.st_mtime)
    return StoredFile(
        id=content.stem,
        number=number,
        bytes=found.st_size,
        created_at=arrived_s,
        filename=content.name,
        purpose="batch",
        expires_at=arrived_s + KEPT_S,
        problem=f"{why}; its content is here",
    )


def remade_batch(name: str, number: int, why: str, left: Path) -> Batch:
    """A batch that is to fail, with what can be read of its record in the path that is `left`."""
    begun_s = int(left.stat().st_mtime)
    base = Batch(name, number, "/v1/chat/completions", "", begun_s, begun_s + WINDOW_S)
    found = _readable(left, base)
    told = f"{why}; what was answered is in the files of output and errors: send the rest again"
    problem = Problem("damaged_record", told)
    return replace(found, status="in_progress", problems=(problem,))


def _readable(record: Path, base: Batch) -> Batch:
    """`base` with those fields of a record that are as they should be."""
    try:
        given = json.loads(record.read_bytes())
    except (OSError, ValueError, RecursionError):
        return base
    if not isinstance(given, Mapping) or given.get("id") != base.id:
        return base
    try:
        return _BATCH.validate_python({**asdict(base), **given})
    except ValidationError as error:
        wrong = {each["loc"][0] for each in error.errors()}
        kept = {name: value for name, value in given.items() if name not in wrong}
        return _BATCH.validate_python({**asdict(base), **kept})
