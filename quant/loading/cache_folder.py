"""The cache: a folder of packed layers, embeddings and heads, one safetensors file each, for all
stages of a node.

A stage that starts again finds its packed layers and neither reads nor quantizes weights. A file's
name has a hash of its key (`quant.loading.cached_layer`), its text is inside. Files are written
atomically. Those that a live stage uses or writes carry its shared lock and stay; of the others the
least recently used are deleted where room is needed, and unfinished ones in any case. The cache
leaves files of other names alone. Whatever is wrong with the folder, a stage loads without it and
warns once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch

from quant.checkpoint.read_ahead import FileRange, ReadAhead
from quant.checkpoint.stored_tensors import DamagedFileError, Header, read_header
from quant.checkpoint.tensor_files import TensorWriter, checksums, read_tensor, reserved_bytes
from quant.loading.cache_settings import DEFAULT_LIMIT_BYTES, CacheSettings

_LOCK_FILE = ".lock"
_SUFFIX = ".safetensors"
_LAYER_NAME = re.compile(r"[A-Za-z0-9._-]*-[0-9a-f]{32}\.safetensors")
"""Names of files of a `CacheKey`; other weights may have the same suffix."""

_PART_PREFIX = ".llmpq-shard-"
_PART_SUFFIX = ".part"

Built = TypeVar("Built")


@dataclass(frozen=True)
class CacheKey:
    label: str
    text: str

    @property
    def file_name(self) -> str:
        label = re.sub(r"[^A-Za-z0-9._-]", "_", self.label).strip(".")[:80]
        return f"{label}-{hashlib.sha256(self.text.encode()).hexdigest()[:32]}{_SUFFIX}"


@dataclass(frozen=True)
class CachedTensors:
    """The tensors of one file, which are read one by one; `notes` were stored with them."""

    file: BinaryIO
    header: Header
    crc32: Mapping[str, int]

    @property
    def notes(self) -> Mapping[str, str]:
        return self.header.metadata

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.header.places)

    def read(self, name: str) -> torch.Tensor:
        if name not in self.header.places:
            raise DamagedFileError(f"it lacks {name}")
        return read_tensor(self.file, self.header.places[name], self.crc32[name])


@dataclass(frozen=True)
class NewEntry:
    key: CacheKey
    tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    notes: Mapping[str, str]
    nbytes: int


class ShardCache:
    """The cache in `folder`; `limit_bytes` is for all files. As a context manager it writes in a
    thread of its own and waits for it on leaving; else `store` writes before it returns.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self.folder = folder
        self.ahead: ReadAhead | None = None
        self._limit_bytes = limit_bytes
        self._held: dict[Path, BinaryIO] = {}
        weakref.finalize(self, _close_all, self._held)
        self._warned: set[str] = set()
        self._is_writable = True
        self._writer: ThreadPoolExecutor | None = None
        self._pending: list[Future[str | None]] = []

    def __enter__(self) -> ShardCache:
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="shard-cache")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish writing; after an error only the layer that is being written."""
        assert self._writer is not None, "left without having been entered"
        self._writer.shutdown(wait=True, cancel_futures=kind is not None)
        self._writer = self.ahead = None
        self._report(future for future in self._pending if not future.cancelled())
        self._pending = []

    def path_of(self, key: CacheKey) -> Path:
        return self.folder / key.file_name

    def restore(self, key: CacheKey, build: Callable[[CachedTensors], Built]) -> Built | None:
        """Read an entry, pass it to `build`; None if not there. A damaged file is removed."""
        path = self.path_of(key)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", f"cannot read {path} ({error})")
            return None
        with contextlib.ExitStack() as opened:
            opened.callback(file.close)
            if not _lock_shared(file):
                return None  # it is being removed
            try:
                if self.ahead is not None:
                    self.ahead.wait_for(file_range(path))
                built = build(_checked(file, key))
            except DamagedFileError as error:
                _remove(path, file)
                self._warn("damaged", f"{path} is damaged ({error}) and was removed")
                return None
            except OSError as error:
                self._warn("read", f"cannot read {path} ({error})")
                return None
            self._hold(path, file)
            opened.pop_all()
        return built

    def store(self, entry: NewEntry) -> None:
        if not self._is_writable:
            return
        if self._writer is None:
            self._complain(self._write(entry))
            return
        # The queue has no limit: its tensors are the stage's weights, which stay in memory anyway.
        self._pending.append(self._writer.submit(self._write, entry))
        self._report(future for future in self._pending if future.done())
        self._pending = [future for future in self._pending if not future.done()]

    def _report(self, written: Iterable[Future[str | None]]) -> None:
        for future in list(written):
            self._complain(future.result())

    def _complain(self, complaint: str | None) -> None:
        if complaint is not None:
            self._warn("write", complaint)

    def _warn(self, kind: str, problem: str) -> None:
        if kind in self._warned:
            return
        self._warned.add(kind)
        remedy = "weights are quantized anew; give another cache_dir or no_cache to be rid of this"
        warnings.warn(f"packed-shard cache: {problem}; {remedy}", RuntimeWarning, stacklevel=4)

    def _write(self, entry: NewEntry) -> str | None:
        if not self._is_writable:
            return None
        path = self.path_of(entry.key)
        try:
            if not self._write_file(path, entry):
                self._is_writable = False
                return (
                    f"{entry.key.label} of {entry.nbytes} bytes has no room beside those in use, "
                    f"with a limit of {self._limit()} bytes for {self.folder}"
                )
        except OSError as error:
            self._is_writable = False
            return f"cannot write to {self.folder} ({error})"
        return None

    def _write_file(self, path: Path, entry: NewEntry) -> bool:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as unfinished:
            with self._locked():
                size = reserved_bytes(entry.nbytes)
                if not self._make_room(size):
                    return False
                descriptor, name = tempfile.mkstemp(_PART_SUFFIX, _PART_PREFIX, self.folder)
                file = unfinished.enter_context(os.fdopen(descriptor, "w+b"))
                unfinished.callback(os.unlink, name)  # before its lock is released
                _lock_shared(file)
                file.truncate(size)  # so that other writers count its bytes
            writer = TensorWriter(file)
            for tensor_name, tensor in entry.tensors():
                writer.add(tensor_name, tensor)
            writer.finish({**entry.notes, "key": entry.key.text})
            with self._locked():
                if path.exists():  # another writer was faster, with the same content
                    self._hold(path, path.open("rb"))
                    return True
                os.rename(name, path)
                unfinished.pop_all()
                self._hold(path, file)
        return True

    def _hold(self, path: Path, file: BinaryIO) -> None:
        _lock_shared(file)
        with contextlib.suppress(OSError):  # a folder that may only be read
            os.utime(file.fileno())
        if path in self._held:
            file.close()
        else:
            self._held[path] = file

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / _LOCK_FILE).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_room(self, size: int) -> bool:
        self._sweep()
        files = self._files()
        excess = sum(found.st_size for found in files.values()) + size - self._limit()
        with contextlib.ExitStack() as locks:
            unneeded = []
            for path, found in sorted(files.items(), key=lambda each: each[1].st_mtime_ns):
                if excess > 0 and not _is_part(path.name) and _is_unused(path, locks):
                    unneeded.append(path)
                    excess -= found.st_size
            if excess > 0:
                return False
            for path in unneeded:
                path.unlink(missing_ok=True)
        return True

    def _sweep(self) -> None:
        for path in self._files():
            with contextlib.ExitStack() as locks:
                if _is_part(path.name) and _is_unused(path, locks):
                    path.unlink(missing_ok=True)

    def _files(self) -> dict[Path, os.stat_result]:
        files = {}
        for item in os.scandir(self.folder):
            if _is_part(item.name) or _LAYER_NAME.fullmatch(item.name):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    files[Path(item.path)] = item.stat(follow_symlinks=False)
        return files

    def _limit(self) -> int:
        if self._limit_bytes is not None:
            return self._limit_bytes
        used = sum(found.st_size for found in self._files().values())
        return min(DEFAULT_LIMIT_BYTES, (shutil.disk_usage(self.folder).free + used) // 2)


def open_cache(settings: CacheSettings) -> ShardCache | None:
    return ShardCache(settings.path, settings.limit_bytes) if settings.enabled else None


def _close_all(files: Mapping[Path, BinaryIO]) -> None:
    for file in files.values():
        file.close()


def file_range(path: Path) -> FileRange:
    return FileRange(path, 0, path.stat().st_size)


def _checked(file: BinaryIO, key: CacheKey) -> CachedTensors:
    header = read_header(file)
    if header.metadata.get("key") != key.text:
        raise DamagedFileError("it is of another layer or version than its name says")
    return CachedTensors(file, header, checksums(header))


def _lock_shared(file: BinaryIO) -> bool:
    """Lock for reading; False if the file is being removed, True also where locks are missing."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks on this file system: nobody knows of a use
        return True
    return True


def _is_part(name: str) -> bool:
    return name.startswith(_PART_PREFIX) and name.endswith(_PART_SUFFIX)


def _is_unused(path: Path, locks: contextlib.ExitStack) -> bool:
    try:
        file = locks.enter_context(path.open("r+b"))  # NFS needs write access for an exclusive lock
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # in use, or not ours
        return False
    return True


def _remove(path: Path, file: BinaryIO) -> None:
    """Remove the file that was opened, but not one that another writer put in its place."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_ino == os.fstat(file.fileno()).st_ino:
            path.unlink()
