"""The rows of a profile: measured times of a decoder layer, in a CSV file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from planner.cluster.accelerators import Accelerator, find_accelerator
from planner.cluster.device import Device
from planner.model.finding import ModelShape
from planner.phases import Phase
from planner.profiles.csv_table import Line, read_lines, write_lines
from quant.common.errors import SpecError
from quant.scheme import BITWIDTHS, DTYPE_BYTES

REQUIRED_COLUMNS = (
    "device",
    "model",
    "h1",
    "h2",
    "prompt_length",
    "context_length",
    "phase",
    "bits",
    "batch_size",
    "ms_per_layer",
)
OPTIONAL_COLUMNS = (
    "backend",
    "backend_version",
    "dtype",
    "threads",
    "linear_parameters",
    "query_width",
    "kv_width",
    "attention_ms_per_layer",
    "spread",
    "repetitions",
    "lengths",
)
UNLIKE = "unlike"
"""The word in the column `lengths` for requests of unlike lengths, with the mean in the row."""


_MOST_DIGITS = 15
"""Most digits of a whole number: such numbers are exact in floating point."""


@dataclass(frozen=True)
class LayerTerms:
    """The sizes of a layer, in elements, with which its time scales."""

    hidden_size: int
    linear_parameters: int
    query_width: int
    kv_width: int

    @classmethod
    def of(cls, shape: ModelShape) -> LayerTerms:
        return cls(
            shape.hidden_size, shape.layer_linear_parameters, shape.query_width, shape.kv_width
        )


@dataclass(frozen=True)
class ProfileRow:
    """A measured layer time: `prompt_length` tokens of each request enter (1 in decode) after
    `context_length` others, in the mean where requests are `unlike`. `backend`, `dtype` and
    `threads` match any where None. `spread` is the interquartile range over `seconds`, the median
    of `repetitions`.
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
    columns = (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS)
    write_lines(Path(path), columns, ([_values(row)[name] for name in columns] for row in rows))


def _values(row: ProfileRow) -> dict[str, object]:
    return {
        "device": row.device,
        "model": row.model,
        "h1": row.layer.hidden_size,
        "h2": row.intermediate_size,
        "prompt_length": row.prompt_length,
        "context_length": row.context_length,
        "phase": row.phase,
        "bits": row.bits,
        "batch_size": row.batch_size,
        "ms_per_layer": row.seconds * 1e3,
        "backend": row.backend,
        "backend_version": row.backend_version,
        "dtype": row.dtype,
        "threads": row.threads,
        "linear_parameters": row.layer.linear_parameters,
        "query_width": row.layer.query_width,
        "kv_width": row.layer.kv_width,
        "attention_ms_per_layer": None if row.attention_s is None else row.attention_s * 1e3,
        "spread": row.spread,
        "repetitions": row.repetitions,
        "lengths": UNLIKE if row.unlike else None,
    }


def _check_columns(found: Sequence[str], path: Path) -> None:
    missing = [name for name in REQUIRED_COLUMNS if name not in found]
    if missing:
        raise SpecError(f"{path}:1: profile lacks the columns {', '.join(missing)}")
    known = {*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS}
    unknown = [name for name in found if name not in known]
    if unknown:
        raise SpecError(f"{path}:1: profile has unknown columns {', '.join(unknown)}")


def _row(line: Line, source: str, own: Iterable[Accelerator]) -> ProfileRow:
    fields = _Fields(line.fields(), line.place)
    return ProfileRow(
        device=fields.device(own),
        model=fields.text("model") or "",
        layer=fields.layer(),
        intermediate_size=fields.integer("h2"),
        phase=fields.phase(),
        bits=fields.bits(),
        batch_size=fields.integer("batch_size"),
        prompt_length=fields.integer("prompt_length"),
        context_length=fields.integer("context_length", least=0),
        seconds=fields.seconds("ms_per_layer"),
        backend=fields.text("backend"),
        backend_version=fields.text("backend_version"),
        dtype=fields.dtype(),
        threads=fields.integer("threads") if fields.text("threads") else None,
        attention_s=fields.attention_s(),
        spread=fields.real("spread", least=0.0) if fields.text("spread") else None,
        repetitions=fields.integer("repetitions") if fields.text("repetitions") else None,
        unlike=fields.unlike(),
        source=source,
    )


@dataclass(frozen=True)
class _Fields:
    values: dict[str, str]
    place: str

    def error(self, problem: str) -> SpecError:
        return SpecError(f"{self.place}: profile row {problem}")

    def text(self, name: str) -> str | None:
        return (self.values.get(name) or "").strip() or None

    def integer(self, name: str, least: int = 1) -> int:
        text = self.text(name) or ""
        if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < least:
            raise self.error(
                f"has {name} {text!r}; a whole number of at least {least} belongs there"
            )
        return int(text)

    def unlike(self) -> bool:
        text = self.text("lengths")
        if text not in (None, UNLIKE):
            raise self.error(f"has lengths {text!r}; {UNLIKE!r} or nothing belongs there")
        return text is not None

    def device(self, own: Iterable[Accelerator]) -> str:
        try:
            return find_accelerator(self.text("device") or "", own).name
        except SpecError as error:
            raise self.error(f"names an {error}") from error

    def phase(self) -> Phase:
        text = self.text("phase")
        if text == "prefill":
            return "prefill"
        if text == "decode":
            return "decode"
        raise self.error(f"has phase {text!r}; prefill or decode belongs there")

    def bits(self) -> int:
        bits = self.integer("bits")
        if bits not in BITWIDTHS:
            raise self.error(
                f"has bits {bits}; one of {', '.join(map(str, BITWIDTHS))} belongs there"
            )
        return bits

    def dtype(self) -> str | None:
        text = self.text("dtype")
        if text is not None and text not in DTYPE_BYTES:
            raise self.error(f"has dtype {text!r}; one of {', '.join(DTYPE_BYTES)} belongs there")
        return text

    def seconds(self, name: str) -> float:
        """Read positive milliseconds as seconds."""
        seconds = self.real(name) / 1e3
        if seconds <= 0:  # the smallest numbers underflow
            raise self.error(f"has {name} {self.text(name)}; a positive number belongs there")
        return seconds

    def attention_s(self) -> float | None:
        """Read the seconds of attention, which are fewer than those of the layer."""
        if not self.text("attention_ms_per_layer"):
            return None
        attention_s = self.seconds("attention_ms_per_layer")
        if attention_s >= self.seconds("ms_per_layer"):
            raise self.error(
                f"has attention_ms_per_layer {self.text('attention_ms_per_layer')}; less than its "
                f"ms_per_layer, {self.text('ms_per_layer')}, belongs there"
            )
        return attention_s

    def real(self, name: str, least: float | None = None) -> float:
        text = self.text(name) or ""
        try:
            value = float(text)
        except ValueError as error:
            raise self.error(f"has {name} {text!r}; a number belongs there") from error
        if not isfinite(value) or (least is not None and value < least):
            wanted = "a positive number" if least is None else f"a number of at least {least:g}"
            raise self.error(f"has {name} {text}; {wanted} belongs there")
        return value

    def layer(self) -> LayerTerms:
        """Read the sizes; those not given are of a layer without grouped heads or a gated MLP."""
        hidden, wide = self.integer("h1"), self.integer("h2")
        given = {
            name: self.integer(name) if self.text(name) else default
            for name, default in (
                ("linear_parameters", 4 * hidden * hidden + 2 * hidden * wide),
                ("query_width", hidden),
                ("kv_width", hidden),
            )
        }
        return LayerTerms(hidden_size=hidden, **given)
