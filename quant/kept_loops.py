"""Compiled loops that are kept on disk, for processes that need them later.

A loop takes seconds to compile, and each stage is a process. Our loops are closures, whose identity
numba's own cache takes for another one in each process; here it is what they are made of: their
code and that of all that they call, constants, and the versions of what compiles.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import itertools
import os
import secrets
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from quant.common.files import user_cache_folder

LONGEST_S = 60.0
"""After which a loop is compiled here, whatever another process does with it."""

_LOOK_S = 0.05

_NAMING = 2
"""Of the functions in what is kept; where it changes nothing older is taken."""

_PACKAGES = ("quant", "actors")
"""Those whose classes write instructions for loops, and change from version to version."""

_UNREADABLE = (OSError, RuntimeError, AttributeError, EOFError, ImportError, IndexError)
"""What reading a file raises that is gone, or was not written here."""


def keep_compiled(dispatcher: Any) -> Any:
    """Have numba take what it compiles of `dispatcher` from disk where it is there, and put it
    there; a loop whose folder cannot be used is compiled in each process.
    """
    is_compiled = hasattr(dispatcher, "targetoptions")  # not where NUMBA_DISABLE_JIT is set
    if is_compiled and _names_are_unique():
        dispatcher._cache = _cache_of(dispatcher)
    return dispatcher


@functools.cache
def _names_are_unique() -> bool:
    """Number numba's functions from a random number on in each process, and whether that is how
    this numba names them.

    It counts from 1, and two processes may give one name to different closures. Of weak functions
    of one name the linker takes the first that a process loads, whatever the caller was made with:
    results are wrong, or memory is written that is not the loop's.
    """
    identity: Any = importlib.import_module("numba.core.bytecode").FunctionIdentity
    if not hasattr(identity, "_unique_ids"):
        return False

    def count() -> None:
        identity._unique_ids = itertools.count(secrets.randbits(62))

    count()
    os.register_at_fork(after_in_child=count)
    return True


def loops_folder() -> Path:
    """That of `NUMBA_CACHE_DIR`, else one in the user's cache folder."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    return Path(named) if named else user_cache_folder() / "loops"


def own_folder(folder: Path) -> bool:
    """Make `folder` where it is missing; whether nobody else may write there: what lies in it is
    run.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid == os.geteuid() and not found.st_mode & others


def _cache_of(dispatcher: Any) -> Any:
    numbas: Any = importlib.import_module("numba.core.caching")  # without annotations
    results = numbas.CompileResultCacheImpl
    unreadable = (*_UNREADABLE, numbas.pickle.UnpicklingError)

    class KeptLoops(numbas.NullCache):  # type: ignore[misc]
        """numba's files for each loop and signature, and a lock of whoever compiles it."""

        def __init__(self) -> None:
            self._turns: dict[Path, Any] = {}

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            target_context.refresh()
            with suppress(*unreadable):
                path = self._path(sig, target_context.codegen())
                if path is None:
                    return None
                if not _is_kept(path):
                    self._turns[path] = _turn_to_make(path)
                kept = _files_of(path).load(sig)
                if kept is not None:
                    self._end_turn(path)
                    return results.rebuild(None, target_context, kept)
            return None

        def save_overload(self, sig: Any, data: Any) -> None:
            path = self._path(sig, data.codegen)
            if path is None:
                return
            with suppress(*unreadable):
                _files_of(path).save(sig, results.reduce(None, data))
            self._end_turn(path)

        def _path(self, sig: Any, codegen: Any) -> Path | None:
            folder = loops_folder()
            if not own_folder(folder):
                return None
            key = repr((_compilers(), described(dispatcher), sig, codegen.magic_tuple()))
            return folder / f"{dispatcher.__name__}-{hashlib.sha256(key.encode()).hexdigest()}"

        def _end_turn(self, path: Path) -> None:
            if path in self._turns:
                self._turns.pop(path).close()
                with suppress(OSError):
                    _lock_of(path).unlink()

    return KeptLoops()


def _files_of(path: Path) -> Any:
    """An index and one file of code, whose names begin with `path`."""
    numbas: Any = importlib.import_module("numba.core.caching")
    return numbas.IndexDataCacheFile(str(path.parent), path.name, source_stamp=None)


def _is_kept(path: Path) -> bool:
    return path.with_name(f"{path.name}.1.nbc").exists()


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _turn_to_make(path: Path) -> Any:
    """A lock that is held where nobody else makes the files; waits until somebody has made them."""
    lock = _lock_of(path).open("w")
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline and not _is_kept(path):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_S)
        else:
            break
    return lock


def _compilers() -> tuple[object, ...]:
    import llvmlite
    import numba
    import numpy

    return _NAMING, sys.version, numba.__version__, llvmlite.__version__, numpy.__version__


def described(what: Any, seen: tuple[int, ...] = ()) -> object:
    """What a loop is made of: its code, what it closes over, and the globals that it names."""
    if id(what) in seen:
        return "itself"
    seen = (*seen, id(what))
    if hasattr(what, "py_func"):  # a loop that is called
        options = sorted((k, described(v, seen)) for k, v in what.targetoptions.items())
        return described(what.py_func, seen), options
    if hasattr(what, "_defn"):  # an intrinsic
        return described(what._defn, seen)
    if isinstance(what, FunctionType):
        cells = [described(cell.cell_contents, seen) for cell in what.__closure__ or ()]
        named = sorted(_names(what.__code__) & what.__globals__.keys())
        around = [(name, described(what.__globals__[name], seen)) for name in named]
        return what.__module__, what.__qualname__, described(what.__code__, seen), cells, around
    if isinstance(what, CodeType):
        constants = [described(constant, seen) for constant in what.co_consts]
        return what.co_code, what.co_names, constants
    if isinstance(what, ModuleType):
        return what.__name__
    if isinstance(what, type) and what.__module__.partition(".")[0] in _PACKAGES:
        members = [getattr(v, "__func__", getattr(v, "fget", v)) for v in vars(what).values()]
        methods = [each for each in members if isinstance(each, FunctionType)]
        return what.__qualname__, [described(method, seen) for method in methods]
    if isinstance(what, set | frozenset):
        return sorted(map(repr, what))
    return repr(what)


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))
