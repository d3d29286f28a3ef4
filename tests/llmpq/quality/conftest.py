"""A machine whose speed is not measured for long."""

from __future__ import annotations

import pytest


@pytest.fixture
def short_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands tell expected seconds after one product."""
    monkeypatch.setattr("llmpq.quality.effort.MEASURE_S", 0.0)
