"""Measured times of decoder layers, the rows of a profile, and CSV files of any measurements."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from planner.cluster.accelerators import Accelerator, find_accelerator
from planner.cluster.device import Device
from planner.profiles.layer_terms import STATE, LayerTerms
from planner.scheduling import PHASES, Phase
from quant.common.errors import SpecError
from quant.common.files import write_text
from quant.common.versions import other_version
from quant.scheme import BITWIDTHS, DTYPE_BYTES

VERSION = 1
"""The version in the first column of every row of a table; other versions are refused."""

_Row = TypeVar("_Row")


@dataclasses.dataclass(frozen=True)
class TableLine:
    """A row as text by column; `place` is its file and line, for messages."""

    values: dict[str, str | None]
    place: str

    def fields(self) -> dict[str, str]:
        """The text of every column; SpecError where there are more or fewer fields than columns."""
        found = {
            name: text
            for name, text in self.values.items()
            if name is not None and text is not None
        }
        if len(found) != len(self.values):
            raise SpecError(f"{self.place}: the row has not as many fields as the header")
        return found


def read_lines(
    path: Path, check_columns: Callable[[Sequence[str]], None], kind: str = "table"
) -> list[TableLine]:
    """Read a CSV file's rows; SpecError where it is unreadable, or from `check_columns`."""
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            check_columns(reader.fieldnames or ())
            return [TableLine(values, f"{path}:{reader.line_num}") for values in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{kind} {path} cannot be read: {error}") from error


def write_lines(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file atomically; InputError where it cannot be written."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(columns)
    writer.writerows(rows)
    write_text(path, stream.getvalue())


def table_beside(profile: str | Path, name: str) -> Path:
    """The path of a table beside a profile: `times.links.csv` for `times.csv`."""
    path = Path(profile)
    return path.with_name(f"{path.stem}.{name}.csv")


def read_table(path: Path, kind: type[_Row]) -> tuple[_Row, ...]:
    """Read every row as a `kind`, a pydantic dataclass; SpecError names the line of a bad row."""
    names = _columns(kind)

    def check_columns(found: Sequence[str]) -> None:
        if tuple(found) != names:
            raise SpecError(f"{path}:1: the columns must be {','.join(names)}")

    return tuple(_validated(line, kind) for line in read_lines(path, check_columns))


def write_table(path: Path, kind: type[_Row], rows: Iterable[_Row]) -> None:
    """Write rows so that `read_table` gives them back; errors as in `write_lines`."""
    names = _columns(kind)
    write_lines(path, names, ((VERSION, *(getattr(row, n) for n in names[1:])) for row in rows))


def _columns(kind: type[_Row]) -> tuple[str, ...]:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # any of pydantic's are
    return ("version", *(field.name for field in fields))


def _validated(line: TableLine, kind: type[_Row]) -> _Row:
    values = line.fields()
    version = values.pop("version")
    if version != str(VERSION):
        wrong = other_version(version, VERSION, "measure again with llmpq profile")
        raise SpecError(f"{line.place}: the row is of {wrong}")
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise SpecError(f"{line.place}: {name} is {first['input']!r}: {first['msg']}") from error


UNLIKE = "unlike"
"""The word in the column `lengths` for requests of unlike lengths, with the mean in the row."""


_MOST_DIGITS = 15
"""Most digits of a whole number: such numbers are exact in floating point."""


@dataclass(frozen=True)
class ProfileRow:
    """A measured layer time: `prompt_length` tokens of each request enter (1 in decode) after
    `context_length` others, in the mean where requests are `unlike`. `backend`, `dtype` and
    `threads` match any where None. `attention_s` and `experts_s` are of `seconds`. `spread` is the
    interquartile range over these, the median of `repetitions`. So many other processes of the node
    did the same meanwhile as stand `beside`.
    """

    device: str
    model: str
    layer: LayerTerms
    intermediate_size: int
    phase: Phase
    bits: int
    batch_size: int
    prompt_length: int
    context_length: int
    seconds: float
    backend: str | None = None
    backend_version: str | None = None
    dtype: str | None = None
    threads: int | None = None
    attention_s: float | None = None
    spread: float | None = None
    repetitions: int | None = None
    unlike: bool = False
    experts_s: float | None = None
    beside: int | None = None
    source: str = field(default="", compare=False)

    @staticmethod
    def timed_dtype(device: Device, dtype: str) -> str:
        return device.accelerator.default_dtype if device.emulated and dtype != "float32" else dtype


def read_profiles(
    path: str | Path, torn_end: bool = False, own: Iterable[Accelerator] = ()
) -> tuple[ProfileRow, ...]:
    """Read every row; SpecError names file and line of the first bad one. With `torn_end` a last
    row that was cut off is left out. Rows may name `own` accelerators of the cluster file.
    """
    path = Path(path)
    lines = read_lines(path, lambda found: _check_columns(found, path), "profile")
    rows = [_row(line, path.name, own) for line in lines[:-1]]
    try:
        rows += [_row(line, path.name, own) for line in lines[-1:]]
    except SpecError:
        if not torn_end:
            raise
    return tuple(rows)


def write_profiles(path: str | Path, rows: Iterable[ProfileRow]) -> None:
    """Write rows so that `read_profiles` gives them back; InputError where that is not possible."""
    rows = tuple(rows)
    columns = {
        name: of
        for name, (of, _, _) in _COLUMNS.items()
        if name not in _WHERE_TOLD or any(of(row) for row in rows)
    }
    write_lines(Path(path), [*columns], ([of(row) for of in columns.values()] for row in rows))


def _check_columns(found: Sequence[str], path: Path) -> None:
    required = [name for name, (_, _, needed) in _COLUMNS.items() if needed]
    missing = [name for name in required if name not in found]
    if missing:
        raise SpecError(f"{path}:1: profile lacks the columns {', '.join(missing)}")
    unknown = [name for name in found if name not in _COLUMNS]
    if unknown:
        raise SpecError(f"{path}:1: profile has unknown columns {', '.join(unknown)}")


def _row(line: TableLine, source: str, own: Iterable[Accelerator]) -> ProfileRow:
    def error(problem: str) -> SpecError:
        return SpecError(f"{line.place}: profile row {problem}")

    texts = {name: text.strip() for name, text in line.fields().items()}
    found: dict[str, Any] = {}
    for name, (_, read, needed) in _COLUMNS.items():
        text = texts.get(name, "")
        try:
            found[name] = read(text) if needed or text else None
        except ValueError as wrong:
            raise error(f"has {name} {wrong}") from wrong
    try:
        device = find_accelerator(found.pop("device"), own).name
    except SpecError as unknown:
        raise error(f"names an {unknown}") from unknown
    seconds, attention_s = found.pop("ms_per_layer"), found.pop("attention_ms_per_layer")
    experts_s = found.pop("experts_ms_per_layer")
    for part, most in (("attention", seconds), ("experts", seconds - (attention_s or 0.0))):
        part_s = attention_s if part == "attention" else experts_s
        if part_s is not None and part_s >= most:
            raise error(
                f"has {part}_ms_per_layer {texts[f'{part}_ms_per_layer']}; less than its "
                f"ms_per_layer, {texts['ms_per_layer']}, belongs there"
                + (", without attention's" if part == "experts" and attention_s else "")
            )
    hidden, wide, kind = found.pop("h1"), found.pop("h2"), found.pop("kind") or ""
    kv_width = found.pop("kv_width")
    if kv_width == 0 and not kind.startswith(STATE):
        raise error("has kv_width 0; a whole number of at least 1 belongs there")
    layer = LayerTerms(  # unless told, without grouped heads or a gated MLP
        hidden,
        found.pop("linear_parameters") or 4 * hidden * hidden + 2 * hidden * wide,
        found.pop("query_width") or hidden,
        hidden if kv_width is None else kv_width,
        kind,
    )
    return ProfileRow(
        device=device,
        layer=layer,
        intermediate_size=wide,
        seconds=seconds,
        attention_s=attention_s,
        experts_s=experts_s,
        unlike=found.pop("lengths") is not None,
        source=source,
        **found,
    )


# Readers of a field's text raise ValueError with the text and what belongs there.
_Reader = Callable[[str], Any]


def _integer(least: int = 1) -> _Reader:
    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < least:
            raise ValueError(f"{text!r}; a whole number of at least {least} belongs there")
        return int(text)

    return read


def _one_of(values: Sequence[str], wanted: str) -> _Reader:
    def read(text: str) -> str:
        if text not in values:
            raise ValueError(f"{text!r}; {wanted} belongs there")
        return text

    return read


def _bits(text: str) -> int:
    bits = _COUNT(text)
    if bits not in BITWIDTHS:
        raise ValueError(f"{bits}; one of {', '.join(map(str, BITWIDTHS))} belongs there")
    return int(bits)


def _real(text: str, least: float | None = None) -> float:
    wanted = "a positive number" if least is None else f"a number of at least {least:g}"
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError(f"{text!r}; a number belongs there") from error
    if not isfinite(value) or (least is not None and value < least):
        raise ValueError(f"{text}; {wanted} belongs there")
    return value


def _seconds(text: str) -> float:
    """Read positive milliseconds as seconds."""
    seconds = _real(text) / 1e3
    if seconds <= 0:  # the smallest numbers underflow
        raise ValueError(f"{text}; a positive number belongs there")
    return seconds


_COUNT = _integer()

_COLUMNS: dict[str, tuple[Callable[[ProfileRow], object], _Reader, bool]] = {
    "device": (lambda row: row.device, str, True),
    "model": (lambda row: row.model, str, True),
    "h1": (lambda row: row.layer.hidden_size, _COUNT, True),
    "h2": (lambda row: row.intermediate_size, _COUNT, True),
    "prompt_length": (lambda row: row.prompt_length, _COUNT, True),
    "context_length": (lambda row: row.context_length, _integer(least=0), True),
    "phase": (lambda row: row.phase, _one_of(PHASES, "prefill or decode"), True),
    "bits": (lambda row: row.bits, _bits, True),
    "batch_size": (lambda row: row.batch_size, _COUNT, True),
    "ms_per_layer": (lambda row: row.seconds * 1e3, _seconds, True),
    "backend": (lambda row: row.backend, str, False),
    "backend_version": (lambda row: row.backend_version, str, False),
    "dtype": (
        lambda row: row.dtype,
        _one_of([*DTYPE_BYTES], f"one of {', '.join(DTYPE_BYTES)}"),
        False,
    ),
    "threads": (lambda row: row.threads, _COUNT, False),
    "linear_parameters": (lambda row: row.layer.linear_parameters, _COUNT, False),
    "query_width": (lambda row: row.layer.query_width, _COUNT, False),
    "kv_width": (lambda row: row.layer.kv_width, _integer(least=0), False),
    "attention_ms_per_layer": (
        lambda row: None if row.attention_s is None else row.attention_s * 1e3,
        _seconds,
        False,
    ),
    "spread": (lambda row: row.spread, lambda text: _real(text, least=0.0), False),
    "repetitions": (lambda row: row.repetitions, _COUNT, False),
    "lengths": (
        lambda row: UNLIKE if row.unlike else None,
        _one_of([UNLIKE], f"{UNLIKE!r} or nothing"),
        False,
    ),
    "kind": (lambda row: row.layer.kind or None, str, False),
    "experts_ms_per_layer": (
        lambda row: None if row.experts_s is None else row.experts_s * 1e3,
        _seconds,
        False,
    ),
    "beside": (lambda row: row.beside, _COUNT, False),
}
"""By column: its value of a row, how its text is read, and whether a file must have it."""

_WHERE_TOLD = ("kind", "experts_ms_per_layer", "beside")
"""Columns of files in which a row has something to tell there: a kind of layers that are not alike,
experts, LM heads, busy neighbours."""
