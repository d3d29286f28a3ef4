"""Loops that numba compiled in one process of a run of tests, for its other processes.

A loop takes seconds to compile, and which tests a process runs does not say which loops it needs.
Ours are closures, whose identity numba's own cache takes for another one in each process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

USERS = ("actors.attention.cpu", "quant.backends.rotation", "quant.rounding.weighted_loop")
LONGEST_S = 60.0
"""After which a loop is compiled here, whatever another process does with it."""

CALLED = {"decode", "rotate_rows", "round_tokens", "fit_rows"}
"""Loops that Python calls; all others are compiled as parts of these."""


def loops_beside(address: Path) -> Path:
    """The folder of loops of the processes that fork workers by the socket at `address`."""
    return address.with_name("loops")


def share(folder: Path) -> None:
    """Have the modules that are imported take compiled loops from `folder`, and put them there."""
    folder.mkdir(exist_ok=True)
    for name in USERS:
        if name in sys.modules:
            module: Any = sys.modules[name]
            module.compiled_loop = _shared(module.compiled_loop, folder)


def _shared(compiled_loop: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    def loop(function: Any, *options: Any, **named: Any) -> Any:
        dispatcher = compiled_loop(function, *options, **named)
        if function.__name__ in CALLED:
            dispatcher._cache = _cache_of(dispatcher, folder)
        return dispatcher

    return loop


def _cache_of(dispatcher: Any, folder: Path) -> Any:
    from numba.core.caching import CompileResultCacheImpl, NullCache
    from numba.core.serialize import dumps

    identity = described(dispatcher)
    compiling: dict[Path, Any] = {}

    def done(path: Path) -> None:
        if path in compiling:
            compiling.pop(path).close()

    class SharedLoops(NullCache):  # type: ignore[misc]
        """A file for each loop and signature, and a lock of whoever compiles it."""

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            target_context.refresh()
            path = self._path(sig, target_context.codegen())
            if not path.exists():
                compiling[path] = _turn_to_make(path)
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                return None
            done(path)
            return CompileResultCacheImpl.rebuild(None, target_context, pickle.loads(content))

        def save_overload(self, sig: Any, data: Any) -> None:
            content = dumps(CompileResultCacheImpl.reduce(None, data))
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.write(content)
            path = self._path(sig, data.codegen)
            os.replace(file.name, path)
            done(path)

        def _path(self, sig: Any, codegen: Any) -> Path:
            key = repr((identity, sig, codegen.magic_tuple()))
            return folder / hashlib.sha256(key.encode()).hexdigest()

    return SharedLoops()


def _turn_to_make(path: Path) -> Any:
    """A lock that is held where nobody else makes the file; waits until somebody has made it."""
    lock = path.with_suffix(".lock").open("w")
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline and not path.exists():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        else:
            break
    return lock


def described(what: Any) -> Any:
    """What a loop is made of: its code, and that of all that it calls."""
    if hasattr(what, "py_func"):  # a loop that is called
        options = [(name, described(value)) for name, value in what.targetoptions.items()]
        return described(what.py_func), options
    if hasattr(what, "_defn"):  # an intrinsic
        return described(what._defn)
    if isinstance(what, FunctionType):
        cells = [described(cell.cell_contents) for cell in what.__closure__ or ()]
        return what.__module__, what.__qualname__, described(what.__code__), cells
    if isinstance(what, CodeType):
        constants = [described(constant) for constant in what.co_consts]
        return what.co_code, what.co_names, constants
    if isinstance(what, set | frozenset):
        return sorted(map(repr, what))
    return repr(what)
