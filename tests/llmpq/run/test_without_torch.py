"""Runs say what is missing where torch is not installed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from llmpq.errors import DeviceError
from llmpq.run.engine import RunResources
from llmpq.run.options import RunOptions
from quant.common import errors


def test_stages_without_torch_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda _: None)
    with pytest.raises(DeviceError, match=r"torch is not installed.*llmpq doctor"):
        RunResources(cast(Any, None), RunOptions())
