"""Files behind URLs as fsspec reads them: found, opened, told apart; failed calls are retried."""

from __future__ import annotations

import errno
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path, PurePosixPath
from time import sleep
from typing import Any, TypeVar

from quant.common.errors import InputError, LlmpqError
from quant.common.files import FileIdentity

_T = TypeVar("_T")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")

TRIES = 6
"""Times that a call is tried which fails for a reason that may pass."""

BACKOFF_S = 0.5
"""Seconds before the second try, twice as many before each further one: 15 s in all."""

BLOCK_BYTES = 2**22
"""Bytes that a request of a stream asks for; clients' own of 50 MiB would be read for a header."""

_LASTING = (
    LlmpqError,
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
_PASSING_STATUS = (408, 425, 429)
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_VERSIONS = (
    *("ETag", "etag", "generation", "blob_id", "md5Hash", "Content-MD5"),
    *("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created"),
)
"""What stores call the version of a file; the first that is there counts."""

_NEVER_SETTLED_NS = 2**62 + 1
"""A time of a change far ahead: nothing tells whether such a file has changed."""


def is_url(name: str) -> bool:
    return _URL.match(name) is not None


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it; `InputError` without a client for it."""
    try:
        from fsspec.core import url_to_fs

        # a server that compresses what it sends would count other bytes than it sends
        plain = {"headers": {"Accept-Encoding": "identity"}}
        options = {"client_kwargs": plain} if url.startswith(("http://", "https://")) else {}
        fs, path = url_to_fs(url, **options)
    except ImportError as error:
        extra = _EXTRAS.get(url.partition(":")[0].lower())
        remedy = f"pip install 'llmpq[{extra}]'" if extra else str(error)
        raise InputError(f"{url} needs a client that is not installed: {remedy}") from error
    except Exception as error:  # clients raise errors of their own for what they cannot use
        remedy = "name a path, or s3://, gs://, hf://datasets/, https:// or another URL of fsspec"
        raise InputError(f"{url} cannot be used: {error}; {remedy}") from error
    return fs, str(path)


def retried(call: Callable[[], _T], url: str) -> _T:
    """What `call` gives, tried anew where it fails for a reason that may pass.

    Raises `LlmpqError` of `call` as it is, and all else as an OSError whose `filename` is the URL.
    """
    for attempt in range(TRIES):
        try:
            return call()
        except Exception as error:  # of fsspec, its clients, and the libraries that these use
            if isinstance(error, LlmpqError):
                raise
            if attempt + 1 == TRIES or not _may_pass(error):
                tried = f" ({TRIES} tries)" if _may_pass(error) else ""
                raise OSError(_number_of(error), _told(error) + tried, url) from error
            sleep(BACKOFF_S * 2**attempt)
    raise AssertionError("the last try returns or raises")


def _cause(error: BaseException) -> BaseException:
    """The error behind one that tells any failure as a file that is not there."""
    hides = isinstance(error, FileNotFoundError) and error.__cause__ is not None
    return error.__cause__ if hides and error.__cause__ is not None else error


def _status(error: BaseException) -> int | None:
    """The status of HTTP in an error of aiohttp, requests or botocore."""
    response: Any = getattr(error, "response", None)
    found = getattr(error, "status", None) or getattr(response, "status_code", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return found if isinstance(found, int) else None


def _may_pass(error: BaseException) -> bool:
    cause = _cause(error)
    status = _status(cause)
    if status is not None:
        return status >= 500 or status in _PASSING_STATUS
    return not isinstance(cause, _LASTING) and "Credential" not in type(cause).__name__


def _number_of(error: BaseException) -> int:
    cause = _cause(error)
    status = _status(cause)
    if status in (401, 403) or isinstance(cause, PermissionError):
        return errno.EACCES
    if status == 404 or isinstance(cause, FileNotFoundError):
        return errno.ENOENT
    return errno.EIO


def _told(error: BaseException) -> str:
    number, cause = _number_of(error), _cause(error)
    if number == errno.ENOENT:
        return "no such file, or no such bucket"
    if number == errno.EACCES:
        return f"no access with the credentials at hand ({str(cause) or type(cause).__name__:.200})"
    return f"{str(cause) or type(cause).__name__:.300}"


@dataclass(frozen=True)
class UrlFile:
    """A file behind a `url`, in place of a `Path` for what only reads; `path` is fsspec's.

    `file_bytes` as it was found, None where the store does not say.
    """

    url: str
    fs: Any = field(compare=False, repr=False)
    path: str = field(compare=False)
    file_bytes: int | None = field(compare=False)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.absolute().name

    def absolute(self) -> PurePosixPath:
        """A path that stands for the URL among those of other files."""
        scheme, _, rest = self.url.partition("://")
        if scheme.lower() in ("http", "https"):
            rest = re.split("[?#]", rest)[0]
        return PurePosixPath("/", scheme, rest.strip("/"))

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """A stream that goes on where it was when the connection is lost."""
        assert mode == "rb", "what is behind a URL is only read"
        return io.BufferedReader(_UrlStream(self), BLOCK_BYTES)

    def identity(self) -> FileIdentity:
        """Its state now, by what the store calls its version. Raises OSError."""
        info = fresh_info(self.fs, self.path, self.url)
        version = version_of(info)
        number, changed_ns = 0, _NEVER_SETTLED_NS
        if version is not None:
            number = int.from_bytes(hashlib.blake2b(version.encode(), digest_size=7).digest())
            changed_ns = 0
        return FileIdentity(self.url, 0, info.get("size") or 0, number, changed_ns)


AnyFile = Path | UrlFile


def identity_of(file: AnyFile) -> FileIdentity:
    return file.identity() if isinstance(file, UrlFile) else FileIdentity.of(file)


def fresh_info(fs: Any, path: str, url: str) -> dict[str, Any]:
    """What the store says of a file now, not what it has said before. Raises OSError."""

    def asked() -> dict[str, Any]:
        fs.invalidate_cache()
        return dict(fs.info(path))

    return retried(asked, url)


def version_of(info: dict[str, Any]) -> str | None:
    found = next((name for name in _VERSIONS if info.get(name)), None)
    return None if found is None else f"{found} {info[found]}"


def files_at(url: str, endings: Sequence[str]) -> list[UrlFile]:
    """The file at `url`; those in a folder with such `endings`; those that a glob matches.

    Sorted by name. Raises `InputError` where there are none, or they cannot be looked for.
    """
    fs, path = file_system(url)
    is_http = url.startswith(("http://", "https://"))
    try:
        if is_http and url.endswith("/"):
            info: dict[str, Any] | None = {"type": "directory"}
        else:
            info = _info_or_none(fs, path, url, "*" in url if is_http else has_magic(path))
        if info is None:
            found = retried(lambda: fs.glob(path, detail=True), url)
            infos, kind = list(found.values()), "name"
        elif info["type"] == "directory":
            listed = retried(lambda: fs.ls(path, detail=True), url)
            infos = [each for each in listed if str(each["name"]).lower().endswith(tuple(endings))]
            kind = ", ".join(endings)
        else:
            return [UrlFile(url, fs, path, info.get("size"))]
    except OSError as error:
        raise InputError(f"cannot read input {url}: {error.strerror}") from error
    infos = [each for each in infos if each["type"] == "file"]
    if not infos:
        raise InputError(f"cannot read input {url}: no file of that {kind} there")
    infos.sort(key=lambda each: str(each["name"]))
    made = [(fs.unstrip_protocol(each["name"]), each) for each in infos]
    return [UrlFile(name, fs, str(each["name"]), each.get("size")) for name, each in made]


def _info_or_none(fs: Any, path: str, url: str, may_lack: bool) -> dict[str, Any] | None:
    try:
        return fresh_info(fs, path, url)
    except FileNotFoundError:
        if may_lack:
            return None
        raise


class _UrlStream(io.RawIOBase):
    """The bytes of a file, from where it stands on, over as many connections as it takes."""

    def __init__(self, file: UrlFile) -> None:
        self._file = file
        self._at = 0
        self._raw: Any = None
        self._in_blocks = True  # False of servers that give no parts of files

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self._file.file_bytes is None:
            raise OSError(errno.EIO, "the server does not tell the file's size", self._file.url)
        base = (0, self._at, self._file.file_bytes or 0)[whence]
        if base + offset != self._at:
            self._at = base + offset
            self._drop()
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        data = retried(lambda: self._read(len(view)), self._file.url)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._drop()
        super().close()

    def _read(self, size: int) -> bytes:
        whole = self._file.file_bytes
        if whole is not None and self._at >= whole:
            return b""
        try:
            if self._raw is None:
                self._raw = self._opened()
            data = bytes(self._raw.read(size))
            if not data and whole is not None:
                raise OSError(errno.EIO, f"it ended after {self._at} of {whole} bytes")
            return data
        except ValueError as error:  # fsspec's for a server that answers with all in place of parts
            self._drop()
            if not self._in_blocks:
                raise
            self._in_blocks = False
            raise OSError(errno.EIO, str(error)) from error
        except BaseException:
            self._drop()
            raise

    def _opened(self) -> Any:
        fs, path = self._file.fs, self._file.path
        raw = fs.open(path, "rb", block_size=BLOCK_BYTES if self._in_blocks else 0)
        try:
            raw.seek(self._at)
        except ValueError:  # a stream from the beginning
            left = self._at
            while left and (skipped := len(raw.read(min(left, BLOCK_BYTES)))):
                left -= skipped
        return raw

    def _drop(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()


def changed_while_read(url: object) -> InputError:
    return InputError(f"input {url} changed while it was read; begin again when it stays as it is")
