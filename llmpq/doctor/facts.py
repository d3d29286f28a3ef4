"""What is known of a machine before it is judged; sizes in bytes, None for what is not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver tells of; `problem` where llmpq cannot use its kind."""

    name: str
    capability: tuple[int, int] | None
    problem: str | None = None


@dataclass(frozen=True)
class Driver:
    """NVIDIA's: `cuda` is the newest that it serves, `on_bus` counts GPUs with or without it,
    `said` are its complaints, `hidden` the value of CUDA_VISIBLE_DEVICES.
    """

    version: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    on_bus: int = 0
    said: tuple[str, ...] = ()
    hidden: str | None = None


@dataclass(frozen=True)
class Library:
    """A package, by what a process of its own said that imported and tried it.

    `error` is why that failed, `complaints` what works badly, `more` is by library.
    """

    version: str | None = None
    error: str | None = None
    complaints: tuple[str, ...] = ()
    more: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Torch(Library):
    """`cuda` it is built with, `targets` its code is for (`sm_75`), and what was `available`."""

    cuda: tuple[int, int] | None = None
    targets: tuple[str, ...] = ()
    available: bool = False


@dataclass(frozen=True)
class Folder:
    """A folder by what it is for; `path` is None where no home is known."""

    path: str | None
    writable: bool
    free_bytes: int = 0


@dataclass(frozen=True)
class Host:
    """`has_entry`: whether passwd knows the user; the cache is temporary where there is no home."""

    python: str
    user_id: int
    has_entry: bool
    cache: Folder
    cache_is_temporary: bool
    ray: Folder
    temporary: Folder
    shared_bytes: int
    shared_free_bytes: int
    memory_bytes: int
    limit_bytes: int | None
    open_files: int


@dataclass(frozen=True)
class Facts:
    """`bitsandbytes` and `kernels` are asked only where a GPU can be used."""

    host: Host
    driver: Driver
    torch: Torch
    numba: Library
    ray: Library
    bitsandbytes: Library | None = None
    kernels: Library | None = None
    cluster: Library | None = None
    address: str | None = None
