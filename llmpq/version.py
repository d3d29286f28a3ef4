"""Which llmpq this is, for what it leaves in files."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def llmpq_version() -> str:
    """Return the version of the installed package."""
    try:
        return version("llmpq")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
