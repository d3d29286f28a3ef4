"""What planning assumes of a predictor of output lengths (S3, section 3): how often it is right,
and the token slots that requests hold by its predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from planner.lengths import FloatArray, IntArray, Lengths
from quant.common.errors import SpecError
from quant.common.files import read_json_object
from quant.common.versions import other_version, unknown_fields, unknown_in

PREDICTOR_FILE = "predictor.json"
"""Its name in the folder of a predictor, beside the weights."""

Count = Annotated[int, Field(ge=0)]

PREDICTOR_VERSION = 1
_REMEDY = "make the predictor again: llmpq lengths train"


class PredictorFile(BaseModel):
    """What `llmpq lengths train` writes. `buckets`: the most new tokens of each, ascending.
    `confusion` [buckets][buckets]: held-out rows of a bucket (row) predicted as another (column).
    `tokenizer`: its digest, None where no ids are read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = PREDICTOR_VERSION
    kind: Literal["classifier", "boosting"]
    buckets: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    trained_rows: Count
    confusion: tuple[tuple[Count, ...], ...]
    tokenizer: str | None = None

    @model_validator(mode="after")
    def _check(self) -> PredictorFile:
        for lower, upper in pairwise(self.buckets):
            if upper <= lower:
                raise ValueError(f"buckets: {upper} follows {lower}; each must be larger")
        count = len(self.buckets)
        shape = {len(row) for row in self.confusion}
        if len(self.confusion) != count or shape != {count}:
            raise ValueError(f"confusion: it must have {count} rows and columns, as buckets has")
        if not any(map(sum, self.confusion)):
            raise ValueError("confusion: it counts no row; at least 1 must be held out")
        return self


def predictor_file(folder: Path) -> PredictorFile:
    """Read the file of `folder`; SpecError names what is wrong with it."""
    path = folder / PREDICTOR_FILE
    content = read_json_object(path, _REMEDY, SpecError)
    version = content.get("version", PREDICTOR_VERSION)
    if version != PREDICTOR_VERSION:
        raise SpecError(f"{path}: {other_version(version, PREDICTOR_VERSION, _REMEDY)}")
    try:
        return PredictorFile.model_validate(content)
    except ValidationError as error:
        unknown = unknown_in(error)
        if unknown:
            raise SpecError(f"{path}: {unknown_fields(unknown, _REMEDY)}") from error
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        what = f"field {field}: {first['msg']}" if field else first["msg"]
        raise SpecError(f"{path}: {what.replace('Value error, ', '')}; {_REMEDY}") from error


ORACLE, LONGEST = "oracle", "longest"
STUDIES = (ORACLE, LONGEST)
"""Predictors that need no file: one that is always right, and one that expects the most of all."""

BUCKETS = 10
"""Lengths that the oracle tells apart, each of as many rows (S3, section 3, has as many)."""

GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, are spread ever more evenly over 0 to 1."""


@dataclass(frozen=True)
class AssumedPredictor:
    """A predictor by how often it takes an answer for another. `source`: one of `STUDIES`, or a
    folder. `buckets`: the most new tokens of each, ascending, the last for longer ones. `confusion`
    [buckets][buckets]: answers of a bucket (row) predicted as another (column); an empty row is
    predicted as all others. SpecError for other shapes, or no counts.
    """

    source: str
    buckets: tuple[int, ...]
    confusion: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        count = len(self.buckets)
        ascending = all(a < b for a, b in zip((0, *self.buckets), self.buckets, strict=False))
        if not count or not ascending:
            raise SpecError(
                f"predictor {self.source}: buckets are {list(self.buckets)}; give the most new "
                "tokens of each, at least 1 and ascending"
            )
        if [len(row) for row in self.confusion] != [count] * count:
            raise SpecError(
                f"predictor {self.source}: confusion has {len(self.confusion)} rows of "
                f"{sorted({len(row) for row in self.confusion})} counts; give {count} of {count}, "
                "as many as there are buckets"
            )
        least = min(map(min, self.confusion))
        if least < 0 or not any(map(any, self.confusion)):
            raise SpecError(
                f"predictor {self.source}: confusion has {'counts below 0' if least < 0 else 'no'}"
                f"{'' if least < 0 else ' row that was held out'}; train it again, with rows held "
                "out to be predicted"
            )

    @classmethod
    def named(cls, name: str | Path, lengths: Lengths) -> AssumedPredictor:
        """One of `STUDIES` or a folder, for such a job; SpecError without the predictor's file."""
        longest = lengths.longest_output
        if name == LONGEST:
            return cls(LONGEST, (longest,), ((1,),))
        if name == ORACLE:
            shares = np.arange(1, BUCKETS) / BUCKETS
            ends = np.quantile(lengths.output_tokens, shares, method="inverted_cdf")
            parts = sorted({*ends.astype(np.int64).tolist(), longest})
            right = tuple(tuple(int(a == b) for a in parts) for b in parts)
            return cls(ORACLE, tuple(parts), right)
        found = predictor_file(Path(name).expanduser())
        return cls(str(name), found.buckets, found.confusion)

    @cached_property
    def accuracy(self) -> float:
        counts = np.array(self.confusion)
        return float(np.trace(counts) / counts.sum())

    @cached_property
    def _shares(self) -> FloatArray:
        counts = np.array(self.confusion, dtype=np.float64)
        counts[counts.sum(axis=1) == 0] = counts.sum(axis=0)
        return np.asarray(counts / counts.sum(axis=1, keepdims=True))

    def _true_buckets(self, outputs: IntArray) -> IntArray:
        found = np.searchsorted(self.buckets, outputs)
        return np.asarray(np.minimum(found, len(self.buckets) - 1), dtype=np.int64)

    def predicted(self, outputs: Sequence[int] | IntArray) -> list[int]:
        """New tokens expected of answers [rows]: for each bucket in its shares, spread evenly."""
        true = self._true_buckets(np.asarray(outputs, dtype=np.int64))
        ends = self._shares.cumsum(axis=1)
        expected = np.empty(len(true), dtype=np.int64)
        for bucket in np.unique(true).tolist():
            rows = np.flatnonzero(true == bucket)
            drawn = (0.5 + GOLDEN * np.arange(len(rows))) % 1.0
            chosen = np.searchsorted(ends[bucket], drawn, "right")
            expected[rows] = np.array(self.buckets)[np.minimum(chosen, len(self.buckets) - 1)]
        found: list[int] = expected.tolist()
        return found

    def mean_reserved(self, lengths: Lengths) -> float:
        """As `Lengths.mean_reserved`, but slots follow the prediction, and double when outgrown."""
        prompts = np.array(lengths.prompt_tokens)[:, None]
        outputs = np.array(lengths.output_tokens)[:, None]
        most = lengths.reserved(prompts, outputs)
        shares = self._shares[self._true_buckets(outputs[:, 0])]
        size = first_reservation(prompts, np.array(self.buckets)[None, :], most)
        held = np.zeros(size.shape)
        begun = np.zeros(size.shape, dtype=np.int64)
        while (begun < outputs).any():
            # the last token needs no room, as it is not computed with
            until = np.clip(size - prompts + 1, begun, outputs)
            held += (until - begun) * size
            begun, size = until, np.minimum(2 * size, most)
        return float((shares * held).sum() / outputs.sum())


def first_reservation(prompts: IntArray, expected: IntArray, most: IntArray) -> IntArray:
    """Token slots of requests [rows] by what is `expected`, at most the `most` they may need."""
    return np.asarray(np.minimum(prompts + expected, most), dtype=np.int64)
