"""Seeds of random cases."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(usual: int, most: int) -> list[Any]:
    """The first `usual` ones, and up to `most` where rare tests run too."""
    rare = (pytest.param(seed, marks=pytest.mark.rare) for seed in range(usual, most))
    return [*range(usual), *rare]
