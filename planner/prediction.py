"""How well a predictor of output lengths predicts: what planning reads of its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PREDICTOR_FILE = "predictor.json"
"""Its name in the folder of a predictor, beside the weights."""

Count = Annotated[int, Field(ge=0)]


class PredictorFile(BaseModel):
    """What `llmpq-lengths train` writes of a predictor.

    `buckets` `[buckets]`: the most new tokens of each, ascending; an answer is in the first one
    that has room for it. `confusion` `[buckets][buckets]`: how many of the rows that were held out
    were of a bucket (row) and were predicted to be of a bucket (column). `tokenizer`: the digest of
    the tokenizer whose ids it reads, None where it reads no ids.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    kind: Literal["classifier", "boosting"]
    buckets: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    trained_rows: Count
    confusion: tuple[tuple[Count, ...], ...]
    tokenizer: str | None = None


def predictor_file(folder: Path) -> PredictorFile:
    """Read the file of `folder`; SpecError names what is wrong with it."""
    raise NotImplementedError
