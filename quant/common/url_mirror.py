"""Outputs behind URLs: a local file or folder, and its copy there, which appears whole or not."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quant.common.errors import InputError
from quant.common.files import user_cache_folder, user_state_folder, write_whole
from quant.common.json_text import loads
from quant.common.url_files import (
    UrlFile,
    changed_while_read,
    file_system,
    fresh_info,
    retried,
    version_of,
)

_COMMIT_WHOLE = frozenset(
    ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "hf", "oss", "oci")
)
"""Stores where an object appears when it is complete. Elsewhere it is written aside and renamed."""

_RECORD = "uploaded.json"
_ASIDE = ".llmpq-part"
_COPY_BYTES = 2**20
_DIGEST_BYTES = 16


def local_place(url: str) -> Path:
    """The path on this machine of what becomes the output behind `url`."""
    fs, path = file_system(url)
    url = fs.unstrip_protocol(path).rstrip("/")
    name = UrlFile(url, fs, path, None).absolute().name
    digest = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    name = "output" if name in ("", ".", "..") else name
    return user_state_folder() / "jobs" / digest / name


@dataclass(frozen=True)
class _Record:
    """What was there last that this job knows of, and whether it is to be replaced unread; `local`:
    size and time of the file that was brought there.
    """

    state: str | None = None
    replaced: bool = False
    local: tuple[int, int] | None = None


class UrlMirror:
    """The output behind `url` and its place `local` on this machine: a file, or `in_folder` all
    files whose names `is_kept` takes, which those of a job beside a file have too.

    Raises `InputError` for a URL that cannot be written to, and OSError, whose `strerror` tells,
    where the store fails for longer than retries last.
    """

    def __init__(self, url: str, is_kept: Callable[[str], bool]) -> None:
        self.url = url
        self.in_folder = url.endswith("/")
        self.local = local_place(url)
        self._is_kept = is_kept
        self._fs, path = file_system(url)
        self._path = path.rstrip("/")
        names = self._fs.protocol
        self._protocols = {names} if isinstance(names, str) else set(names)
        if self._protocols & {"http", "https"}:
            raise InputError(
                f"output {url} cannot be written: a web server takes no files; name a path, or "
                "s3://, gs:// or another store"
            )
        self._before: str | None = None

    def pull(self, replace: bool) -> None:
        """Bring here what is there and not known, unless it is to be replaced.

        Raises `InputError` where something else has written there since this job began.
        """
        if self.in_folder:
            self._pull_folder(replace)
        else:
            self._pull_file(replace)

    def check_writable(self) -> None:
        """Write and remove an empty file, so that missing rights show before hours of work.

        It has the name of one that is written aside, so that the next upload takes it away.
        """
        if "hf" in self._protocols:  # where each would be a commit
            return
        there = _aside(f"{self._path}/job.json" if self.in_folder else self._path)
        self._make_parent(there)
        retried(lambda: self._fs.pipe_file(there, b""), self.url)
        with suppress(OSError):  # who may write may lack the right to delete
            retried(lambda: self._fs.rm_file(there), self.url)

    def push(self) -> None:
        """Have what is there be what is here."""
        if self.in_folder:
            self._push_folder()
        else:
            self._push_file()

    def put(self, path: Path) -> None:
        """Bring one file of the folder there."""
        self._put(path, f"{self._path}/{path.name}")

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            retried(lambda: self._fs.rm_file(f"{self._path}/{name}"), self.url)

    def is_kept(self, name: str) -> bool:
        return self._is_kept(name)

    def _pull_file(self, replace: bool) -> None:
        state = self._before = self._state()
        record, job = self._record(), self.local.with_name(self.local.name + ".job")
        if state is None:
            return
        if replace:
            self._write_record(_Record(state, replaced=True))
            return
        has_job = job.is_dir() and any(self._is_kept(path.name) for path in job.iterdir())
        if record.state == state and (self.local.exists() or (record.replaced and has_job)):
            return
        if not has_job and not self.local.exists():
            self._fetch(self._path, self.local)
        elif not self._is_same():
            raise InputError(
                f"output {self.url} was written by something else than the job in "
                f"{self.local.parent}; name another output, pass --overwrite, or remove that "
                "folder to go on from what is there"
            )
        self._write_record(_Record(state, local=self._local_state()))

    def _push_file(self) -> None:
        state, local = self._state(), self._local_state()
        if local is None or (state is not None and self._record() == _Record(state, False, local)):
            return
        if state != self._before:
            raise OSError(
                errno.EEXIST,
                f"something else has written there meanwhile; the results are in {self.local}",
                self.url,
            )
        self._put(self.local, self._path)
        self._before = self._state()
        self._write_record(_Record(self._before, local=local))

    def _pull_folder(self, replace: bool) -> None:
        there = self._names()
        kept = {name for name in there if self._is_kept(name)}
        here = {path.name for path in self._files()}
        if replace:
            return
        foreign = sorted(name for name in there - kept if not name.endswith(_ASIDE))
        if foreign and not kept and not here:
            raise InputError(
                f"output {self.url} is a folder with other files in it ({foreign[0]}); name an "
                "empty one, or a file in it"
            )
        for name in sorted(kept - here):
            self._fetch(f"{self._path}/{name}", self.local / name)

    def _push_folder(self) -> None:
        there, here = self._names(), {path.name: path for path in self._files()}
        for name, path in sorted(here.items(), reverse=True):  # results before what tells of them
            if name not in there or not name.startswith("part-"):
                self.put(path)
        for name in there:
            if self._is_kept(name) and name not in here:
                self.remove(name)

    def _files(self) -> list[Path]:
        found = self.local.iterdir() if self.local.is_dir() else ()
        return [path for path in found if self._is_kept(path.name)]

    def _names(self) -> set[str]:
        def listed() -> Any:
            self._fs.invalidate_cache()
            return self._fs.ls(self._path, detail=False)

        try:
            paths = retried(listed, self.url)
        except FileNotFoundError:
            return set()
        return {str(path).rstrip("/").rpartition("/")[2] for path in paths}

    def _state(self) -> str | None:
        """What tells the object that is there from others; None where there is none."""
        try:
            info = fresh_info(self._fs, self._path, self.url)
        except FileNotFoundError:
            return None
        if info["type"] == "directory":
            raise InputError(f"output {self.url} is a folder; end its name in /, or name a file")
        return f"{version_of(info)} {info.get('size')}"

    def _local_state(self) -> tuple[int, int] | None:
        if not self.local.exists():
            return None
        found = self.local.stat()
        return found.st_size, found.st_mtime_ns

    def _is_same(self) -> bool:
        """Whether the object is the local file, as a kill may have come before the record of it."""
        if not self.local.exists():
            return False
        file = self._file(self._path)
        if file.file_bytes not in (None, self.local.stat().st_size):
            return False
        with file.open() as there, self.local.open("rb") as here:
            return all(
                there.read(_COPY_BYTES) == block
                for block in iter(lambda: here.read(_COPY_BYTES), b"")
            )

    def _file(self, path: str) -> UrlFile:
        info = fresh_info(self._fs, path, self.url)
        return UrlFile(self._fs.unstrip_protocol(path), self._fs, path, info.get("size"))

    def _fetch(self, path: str, target: Path) -> None:
        fetch(self._file(path), target)

    def _put(self, source: Path, path: str) -> None:
        def put() -> None:
            if self._protocols & _COMMIT_WHOLE:
                self._fs.put_file(str(source), path)
            else:
                self._fs.put_file(str(source), _aside(path))
                self._fs.mv(_aside(path), path)
            self._fs.invalidate_cache()
            found, size = self._fs.info(path)["size"], source.stat().st_size
            if found != size:
                raise OSError(errno.EIO, f"{found} of {size} bytes have arrived")

        self._make_parent(path)
        retried(put, self.url)

    def _make_parent(self, path: str) -> None:
        if not self._protocols & _COMMIT_WHOLE:  # where folders are no part of a name
            retried(lambda: self._fs.makedirs(path.rpartition("/")[0], exist_ok=True), self.url)

    def _record(self) -> _Record:
        try:
            found = loads((self.local.parent / _RECORD).read_text(encoding="utf-8"))
            local = found["local"]
            return _Record(found["state"], found["replaced"], tuple(local) if local else None)
        except (OSError, ValueError, LookupError, TypeError):
            return _Record()

    def _write_record(self, record: _Record) -> None:
        write_whole(self.local.parent / _RECORD, json.dumps(asdict(record)))


def fetched(url: str) -> Path:
    """A copy of the file behind `url` in the user's cache, of its present state.

    Raises OSError, and `InputError` for a URL that cannot be used.
    """
    fs, path = file_system(url)
    info = fresh_info(fs, path, url)
    if info["type"] == "directory":
        raise InputError(f"{url} is a folder; name a file")
    file = UrlFile(url, fs, path, info.get("size"))
    state = repr(file.identity()).encode()
    folder = hashlib.blake2b(state, digest_size=8).hexdigest()
    target = user_cache_folder() / "files" / folder / file.name
    if not target.exists() or not file.identity().is_settled:
        fetch(file, target)
    return target


def _aside(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{folder}/.{name}{_ASIDE}"


def fetch(file: UrlFile, target: Path) -> None:
    """Copy what is behind a URL to `target`, whole or not at all. Raises OSError, and `InputError`
    where it changes meanwhile.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    before = file.identity()
    try:
        with file.open() as source, aside.open("wb") as copy:
            shutil.copyfileobj(source, copy, _COPY_BYTES)
            copy.flush()
            os.fsync(copy.fileno())
        if file.identity() != before:
            raise changed_while_read(file)
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
