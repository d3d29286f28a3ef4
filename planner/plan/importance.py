"""The importance that a plan's weights are rounded by, where it was measured before."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from planner.plan.field_types import STRICT
from quant.importance.header import FINGERPRINT_HEX


@dataclass(frozen=True, config=STRICT)
class PlannedImportance:
    """The `fingerprint` of the numbers, and the `file` that held them when the plan was made."""

    fingerprint: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{FINGERPRINT_HEX}}}$")]
    file: Annotated[str, Field(min_length=1)]
