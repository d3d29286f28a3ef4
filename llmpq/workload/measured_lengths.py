"""Lengths that were measured: a CSV of them, or the finished rows of a job."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmpq.jobs.file_format import (
    COMPRESSIONS,
    READ_ERRORS,
    SUFFIXES,
    contradiction,
    json_value,
    output_format,
    reason,
)
from llmpq.jobs.job_files import Disk
from llmpq.jobs.result_lines import error_of, finished_rows, is_openai_line
from llmpq.jobs.store import JobStore
from planner.lengths import Lengths, RequestLengths
from planner.profiles.rows import TableLine, read_lines
from planner.workload import MAX_TOKENS
from quant.common.errors import InputError, SpecError
from quant.common.url_files import is_url
from quant.common.url_mirror import fetched

IdNumbers = npt.NDArray[np.uint64]

COLUMNS = ("prompt_tokens", "output_tokens")
MOST_FINISHED = 10_000
"""Finished rows whose output lengths are kept; of more, some that are chosen by their ids."""

_KEYS = ("custom_id", "error", "token_ids")
_REMEDY = (
    f"give a CSV with the columns {','.join(COLUMNS)}, or the output of llmpq run, or of a batch, "
    "over this input"
)


@dataclass(frozen=True)
class MeasuredLengths:
    """The lengths in the file `source`: of a CSV a sample, `rows`, and the distributions of all its
    rows, `requests`; or of finished rows `outputs` by id.

    `done`: of a job that is not finished, `id_number` of every row that has a result, errors too.
    """

    source: str
    rows: Lengths | None = None
    requests: RequestLengths | None = None
    outputs: Mapping[str, int] | None = None
    done: IdNumbers | None = None


def read_measured(path: str | Path) -> MeasuredLengths:
    """The lengths at `path`: a CSV of `COLUMNS`, or an output of `llmpq run`, finished or not.

    Error rows are left out. Raises SpecError or `InputError` naming file and line.
    """
    try:
        found = fetched(str(path)) if is_url(str(path)) else Path(path).expanduser()
        folder = found if found.is_dir() else found.with_name(found.name + ".job")
        if not found.exists() and not folder.is_dir():
            raise InputError(f"cannot read lengths {path}: no such file; {_REMEDY}")
        if found.suffix.lower() == ".csv" and found.is_file() and not _holds_results(found):
            return _table(found)
        done = array("Q")
        outputs = _bounded(_noted(_finished(found, folder), done))
        unfinished = _is_unfinished(folder)
    except READ_ERRORS as error:
        raise InputError(f"cannot read lengths {path}: {reason(error)}") from error
    if not outputs:
        raise InputError(f"lengths {path}: no finished row without an error; {_REMEDY}")
    numbers = np.array(done, dtype=np.uint64) if unfinished else None
    return MeasuredLengths(found.name, outputs=outputs, done=numbers)


def id_number(custom_id: str) -> int:
    """A number of 64 bits that stands for an id: a million of them take 8 MB."""
    name = custom_id.encode("utf-8", "backslashreplace")
    return int.from_bytes(blake2b(name, digest_size=8).digest())


def _is_unfinished(folder: Path) -> bool:
    """Whether `folder` is that of a job with rows that are left."""
    manifest = JobStore(folder, Disk()).manifest() if folder.is_dir() else None
    return manifest is not None and not manifest.complete


def _noted(found: Iterable[tuple[str, int]], done: array[int]) -> Iterator[tuple[str, int]]:
    """The rows of `found` without those in error, after all have been added to `done`."""
    for custom_id, tokens in found:
        done.append(id_number(custom_id))
        if tokens:
            yield custom_id, tokens


def _holds_results(path: Path) -> bool:
    with path.open("rb") as file:
        return b"token_ids" in file.readline(2**12)


def _table(path: Path) -> MeasuredLengths:
    def check_columns(found: Sequence[str]) -> None:
        if tuple(found) != COLUMNS:
            raise SpecError(
                f"{path}:1: the columns are {','.join(found)!r:.200}; they must be "
                f"{','.join(COLUMNS)}"
            )

    rows = [_pair(line) for line in read_lines(path, check_columns, "lengths file")]
    if not rows:
        raise SpecError(f"{path}: no rows; give one line of {','.join(COLUMNS)} for each row")
    prompts, outputs = zip(*rows, strict=True)
    requests = RequestLengths.of_pairs(prompts, outputs)
    return MeasuredLengths(path.name, Lengths.of(rows, path.name), requests)


def _pair(line: TableLine) -> tuple[int, int]:
    values = line.fields()
    prompt, output = (whole_tokens(values[name], name, line.place) for name in COLUMNS)
    return prompt, output


def whole_tokens(value: object, name: str, place: str) -> int:
    """The number of tokens that `value` is, also as text; SpecError naming `place` otherwise."""
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if type(number) is not int or not 1 <= number <= MAX_TOKENS:
        raise SpecError(
            f"{place}: {name} is {value!r:.80}; it must be a whole number of 1 to {MAX_TOKENS}"
        )
    return number


def _finished(path: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """Id and output tokens of each row that is done; none of a row in error."""
    if folder.is_dir():
        job = JobStore(folder, Disk())
        manifest = job.manifest()
        shards = job.shards(manifest.generation) if manifest is not None else []
        if manifest is None and path == folder:
            raise InputError(f"lengths {path}: no folder of a job of llmpq run; {_REMEDY}")
        for shard in shards:
            yield from _outputs(shard.lines(), shard.path)
        if manifest is not None and manifest.replaces:
            return
    if path.is_file():
        if not path.name.lower().endswith((*SUFFIXES, *COMPRESSIONS)) and path.suffix:
            raise InputError(f"lengths {path}: {path.suffix} is no ending of results; {_REMEDY}")
        named = output_format(path)
        wrong = contradiction(path, named)
        if wrong is not None:
            raise InputError(f"cannot read lengths {path}: {wrong}")
        yield from _outputs(finished_rows(path, named, _KEYS), path)


def _outputs(rows: Iterable[object], path: Path) -> Iterator[tuple[str, int]]:
    for number, row in enumerate(rows, start=1):
        if isinstance(row, bytes):
            row = json_value(row)
        place = f"lengths {path}: row {number}"
        if isinstance(row, Mapping) and is_openai_line(row):
            yield str(row.get("custom_id")), _answered_tokens(row, place)
            continue
        if not isinstance(row, Mapping) or any(key not in row for key in _KEYS):
            raise InputError(f"{place} is no result of llmpq; {_REMEDY}")
        custom_id, error, tokens = (row[key] for key in _KEYS)
        if isinstance(custom_id, str):
            good = error is None and isinstance(tokens, list)
            yield custom_id, len(tokens) if good else 0


def _answered_tokens(line: Mapping[str, Any], place: str) -> int:
    """Tokens of the answer of a line of OpenAI's batches, 0 where it is none; of several answers
    the mean.
    """
    if error_of(line) is not None:
        return 0
    try:
        body = line["response"]["body"]
        tokens, answers = body["usage"]["completion_tokens"], len(body.get("choices") or (0,))
    except (AttributeError, KeyError, TypeError):
        tokens, answers = None, 1
    if type(tokens) is not int or tokens < 0:
        raise InputError(f"{place}: usage.completion_tokens is {tokens!r:.80}; {_REMEDY}")
    return tokens // answers


def _bounded(found: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Output tokens by id; whether a row is among the kept ones depends on its id alone."""
    kept: dict[str, int] = {}
    one_in = 1
    for custom_id, tokens in found:
        if _number(custom_id) % one_in == 0:
            kept[custom_id] = tokens
        if len(kept) > MOST_FINISHED:
            one_in *= 2
            kept = {each: n for each, n in kept.items() if _number(each) % one_in == 0}
    return kept


def _number(custom_id: str) -> int:
    return zlib.crc32(custom_id.encode("utf-8", "backslashreplace"))
