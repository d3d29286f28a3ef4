"""How well a predictor of output lengths predicts: what planning reads of its folder."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quant.common.errors import SpecError
from quant.common.files import read_json_object

PREDICTOR_FILE = "predictor.json"
"""Its name in the folder of a predictor, beside the weights."""

Count = Annotated[int, Field(ge=0)]

_REMEDY = "make the predictor again: llmpq lengths train"


class PredictorFile(BaseModel):
    """What `llmpq lengths train` writes. `buckets`: the most new tokens of each, ascending.
    `confusion` [buckets][buckets]: held-out rows of a bucket (row) predicted as another (column).
    `tokenizer`: its digest, None where no ids are read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
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
    try:
        return PredictorFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        what = f"field {field}: {first['msg']}" if field else first["msg"]
        raise SpecError(f"{path}: {what.replace('Value error, ', '')}; {_REMEDY}") from error
