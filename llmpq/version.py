"""The version of llmpq, which is written into files."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def llmpq_version() -> str:
    """The version of the installed package, or "unknown" without one."""
    try:
        return version("llmpq")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
