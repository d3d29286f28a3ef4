"""The folder of caches: of the home, by a variable, or temporary where there is no home."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from quant.common import files
from quant.common.files import user_cache_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files, of a user whose home cannot be written."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files._temporary_cache.cache_clear()
    yield tmp_path
    files._temporary_cache.cache_clear()


def test_a_home_that_can_be_written_has_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / ".cache" / "llmpq"
    assert list(tmp_path.iterdir()) == []


def test_without_such_a_home_it_is_temporary_and_the_users_own(temporary: Path) -> None:
    with pytest.warns(UserWarning, match="XDG_CACHE_HOME"):
        found = user_cache_folder()
    assert found == temporary / f"llmpq-cache-{os.geteuid()}"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    with warnings.catch_warnings(action="error"):  # told once
        assert user_cache_folder() == found
    files._temporary_cache.cache_clear()
    with pytest.warns(UserWarning, match="home"):
        assert user_cache_folder() == found  # as another process has it


@pytest.mark.parametrize("trap", ["open", "link"])
def test_a_folder_that_others_may_have_made_is_not_taken(trap: str, temporary: Path) -> None:
    waiting = temporary / f"llmpq-cache-{os.geteuid()}"
    if trap == "open":
        waiting.mkdir()
        waiting.chmod(0o777)
    else:
        (temporary / "elsewhere").mkdir(mode=0o700)
        waiting.symlink_to(temporary / "elsewhere")
    with pytest.warns(UserWarning, match="home"):
        found = user_cache_folder()
    assert found != waiting
    assert found.parent == temporary
    assert stat.S_IMODE(found.stat().st_mode) == 0o700


def test_a_folder_that_is_named_is_taken_as_it_is(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert user_cache_folder() == Path("/dev/null/llmpq")
