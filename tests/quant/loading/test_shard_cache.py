"""The folder of packed layers: reading, writers at once, removal of old files, and faults."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quant.checkpoint.tensor_files import TensorWriter, reserved_bytes
from quant.common.errors import SpecError
from quant.loading import cache_folder as shard_cache
from quant.loading.cache_folder import CachedTensors, CacheKey, NewEntry, ShardCache, open_cache
from quant.loading.cache_settings import CacheSettings, cache_settings, default_folder

KEY = CacheKey("model.layers.3-4bit", '{"bits": 4}')
TENSORS = {
    "codes": torch.arange(-100, 100, dtype=torch.int8).view(20, 10),
    "scale": torch.randn(20, 1).bfloat16(),
    "number": torch.tensor(128),
    "empty": torch.zeros(0, 3, dtype=torch.float16),
    "transposed": torch.randn(4, 6).t(),
}
NBYTES = sum(tensor.nbytes for tensor in TENSORS.values())
FILE_BYTES = reserved_bytes(NBYTES)

Corrupt = Callable[[bytes], bytes]


def entry(key: CacheKey = KEY) -> NewEntry:
    return NewEntry(key, TENSORS.items, {"note": "kept"}, NBYTES)


def key_number(number: int) -> CacheKey:
    return CacheKey(f"layer {number}", str(number))


def read_all(cached: CachedTensors) -> dict[str, torch.Tensor]:
    assert cached.notes["note"] == "kept"
    return {name: cached.read(name) for name in cached.names}


def assert_same(found: dict[str, torch.Tensor] | None) -> None:
    assert found is not None
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "not" / "there yet"


@pytest.fixture(autouse=True)
def _every_warning_is_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


@pytest.mark.parametrize("in_background", [True, False])
def test_what_is_stored_comes_back(folder: Path, in_background: bool) -> None:
    cache = ShardCache(folder)
    assert cache.restore(KEY, read_all) is None
    if in_background:
        with cache:
            cache.store(entry())
    else:
        cache.store(entry())
    assert [thread for thread in threading.enumerate() if "shard-cache" in thread.name] == []
    assert files_in(folder) == {KEY.file_name}
    assert_same(ShardCache(folder).restore(KEY, read_all))
    assert_same(load_file(cache.path_of(KEY)))  # as the library reads it
    assert cache.restore(key_number(1), read_all) is None


def test_file_names_are_plain() -> None:
    key = CacheKey("../../etc/passwd " + "x" * 300, "")
    assert "/" not in key.file_name
    assert len(key.file_name) < 130
    assert key.file_name != CacheKey(key.label, "other").file_name


DAMAGE: dict[str, Corrupt] = {
    "empty": lambda content: b"",
    "only a length": lambda content: content[:8],
    "header cut": lambda content: content[:1000],
    "data cut": lambda content: content[:-1],
    "one bit of the data": lambda content: content[:-7] + bytes([content[-7] ^ 1]) + content[-6:],
    "header is no JSON": lambda content: content[:8] + b"[" * 40000 + content[40008:],
    "huge header": lambda content: b"\xff" * 8 + content[8:],
    "another type": lambda content: content.replace(b'"BF16"', b'"FP99"', 1),
    "another shape": lambda content: content.replace(b"[20, 10]", b"[20, 11]", 1),
    "endless shape": lambda content: content.replace(b"[20, 10]", b"[1e999 ]", 1),
    "another shape of as many": lambda content: content.replace(b"[20, 10]", b"[10, 20]", 1),
    "another type of as many bytes": lambda content: content.replace(b'"BF16"', b'"F16" ', 1),
    "another note": lambda content: content.replace(b'"kept"', b'"Kept"', 1),
    "endless checksum": lambda content: re.sub(
        rb'(\\"codes\\": )(\d+)', lambda m: m[1] + b"1e999".ljust(len(m[2])), content, count=1
    ),
    "negative shape": lambda content: content.replace(b"[20, 10]", b"[-2, -1]", 1),
    "another key": lambda content: content.replace(b'{\\"bits\\": 4}', b'{\\"bits\\": 5}', 1),
    "no checksums": lambda content: content.replace(b'"crc32"', b'"crc33"', 1),
    "backward range": lambda content: content.replace(b"[0, 200]", b"[9, 200]", 1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_files_are_removed_and_written_again(folder: Path, damage: Corrupt) -> None:
    cache = ShardCache(folder)
    cache.store(entry())
    path = cache.path_of(KEY)
    content = path.read_bytes()
    assert damage(content) != content
    path.write_bytes(damage(content))
    later = ShardCache(folder)
    with pytest.warns(RuntimeWarning, match=r"is damaged .* and was removed"):
        assert later.restore(KEY, read_all) is None
    assert files_in(folder) == set()
    later.store(entry())
    assert path.read_bytes() == content
    assert_same(later.restore(KEY, read_all))


def test_one_warning_for_all_damaged_files(folder: Path) -> None:
    cache = ShardCache(folder)
    for number in range(3):
        cache.store(entry(key_number(number)))
        cache.path_of(key_number(number)).write_bytes(b"")
    later = ShardCache(folder)
    with pytest.warns(RuntimeWarning) as caught:
        assert [later.restore(key_number(n), read_all) for n in range(3)] == [None] * 3
    assert len(caught) == 1
    assert files_in(folder) == set()


def age(cache: ShardCache, key: CacheKey, seconds: float) -> None:
    used = time.time() - seconds
    os.utime(cache.path_of(key), (used, used))


def test_least_recently_used_files_go_first(folder: Path) -> None:
    keys = [key_number(n) for n in range(4)]
    for key in keys[:3]:
        ShardCache(folder).store(entry(key))  # of a stage that is gone: in use by nobody
    for key, seconds in zip(keys[:3], (300, 200, 100), strict=True):
        age(ShardCache(folder), key, seconds)
    assert_same(ShardCache(folder).restore(keys[0], read_all))  # used now
    ShardCache(folder, 3 * FILE_BYTES).store(entry(keys[3]))
    assert files_in(folder) == {keys[n].file_name for n in (0, 2, 3)}
    ShardCache(folder, 2 * FILE_BYTES).store(entry(keys[1]))
    assert files_in(folder) == {keys[n].file_name for n in (1, 3)}


def test_files_in_use_stay(folder: Path) -> None:
    """By a stage that has read or written them, whatever their age and whoever looks for room."""
    keys = [key_number(n) for n in range(4)]
    writer, reader = ShardCache(folder), ShardCache(folder)
    writer.store(entry(keys[0]))
    ShardCache(folder).store(entry(keys[1]))
    assert_same(reader.restore(keys[1], read_all))
    for key in keys[:2]:
        age(writer, key, 1000)
    other = ShardCache(folder, 2 * FILE_BYTES)
    with pytest.warns(RuntimeWarning, match=rf"no room .* limit of {2 * FILE_BYTES} bytes"):
        other.store(entry(keys[2]))
    other.store(entry(keys[3]))  # no second warning
    assert files_in(folder) == {keys[0].file_name, keys[1].file_name}
    del reader
    ShardCache(folder, 2 * FILE_BYTES).store(entry(keys[2]))
    assert files_in(folder) == {keys[0].file_name, keys[2].file_name}


def test_a_layer_beyond_the_limit_takes_nothing_away(folder: Path) -> None:
    ShardCache(folder).store(entry())
    with pytest.warns(RuntimeWarning, match="no room"):
        ShardCache(folder, FILE_BYTES - 1).store(entry(key_number(1)))
    assert files_in(folder) == {KEY.file_name}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("at", ["add", "finish"])
@pytest.mark.parametrize("in_background", [True, False])
def test_a_full_disk_leaves_nothing_half_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, at: str, in_background: bool
) -> None:
    """One warning, and no further attempt; what was there is still read."""
    ShardCache(folder).store(entry())
    attempts = []

    def refuse(self: TensorWriter, *arguments: object) -> None:
        attempts.append(arguments)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(TensorWriter, at, refuse)
    cache = ShardCache(folder)

    def store_three() -> None:
        with cache if in_background else contextlib.nullcontext():
            for number in range(3):
                cache.store(entry(key_number(number)))

    with pytest.warns(RuntimeWarning) as caught:
        store_three()
    assert len(caught) == 1
    assert os.strerror(code) in str(caught[0].message)
    assert len(attempts) == 1
    assert files_in(folder) == {KEY.file_name}
    assert_same(cache.restore(KEY, read_all))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = ShardCache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning, match="cannot read"):
        assert cache.restore(KEY, read_all) is None
    with pytest.warns(RuntimeWarning, match=r"cannot write to .*cache_dir or no_cache"):
        cache.store(entry())
    cache.store(entry())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_only_be_read(folder: Path) -> None:
    ShardCache(folder).store(entry())
    folder.chmod(0o500)
    cache = ShardCache(folder)
    assert_same(cache.restore(KEY, read_all))
    with pytest.warns(RuntimeWarning, match="cannot write"):
        cache.store(entry(key_number(1)))


def test_faults_of_ours_are_not_hidden(folder: Path) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "good", torch.zeros(3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), ShardCache(folder) as cache:
        cache.store(NewEntry(KEY, tensors, {}, 12))
    assert files_in(folder) == set()


def test_after_an_error_nothing_more_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the layer that was being written is finished."""
    begun, go_on = threading.Event(), threading.Event()
    join = threading.Thread.join

    def left(writer: threading.Thread, limit_s: float | None = None) -> None:
        """Whoever waits for the writer has told it what not to write."""
        go_on.set()
        join(writer, limit_s)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        begun.set()
        assert go_on.wait(30)
        yield from TENSORS.items()

    def fail(cache: ShardCache) -> None:
        cache.store(NewEntry(KEY, tensors, {"note": "kept"}, NBYTES))
        cache.store(entry(key_number(1)))
        assert begun.wait(30)
        monkeypatch.setattr(threading.Thread, "join", left)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ShardCache(folder) as cache:
        fail(cache)
    assert files_in(folder) == {KEY.file_name}


def test_the_default_limit_leaves_half_of_what_is_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ShardCache(folder).store(entry())
    ShardCache(folder).store(entry(key_number(1)))
    age(ShardCache(folder), KEY, 100)
    usage = type("Usage", (), {"free": 2 * FILE_BYTES})()
    monkeypatch.setattr(shard_cache.shutil, "disk_usage", lambda path: usage)
    # Two files and as much again free: two files are half of it all.
    ShardCache(folder).store(entry(key_number(2)))
    assert files_in(folder) == {key_number(1).file_name, key_number(2).file_name}


def test_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "llmpq/shards"
    assert CacheSettings().path == default_folder()
    for unusable in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert default_folder() == Path.home() / ".cache/llmpq/shards"
    monkeypatch.chdir(tmp_path)
    given = cache_settings("here", 1.5, no_cache=False)
    assert given.path == tmp_path / "here"
    assert given.limit_bytes == 3 << 29
    assert open_cache(cache_settings(None, None, no_cache=True)) is None
    for limit in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(SpecError, match="cache limit"):
            CacheSettings(limit_gib=limit)


def test_folders_in_homes_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"folder ~no-such-user/x: .* give another cache_dir"):
        cache_settings("~no-such-user/x", None, no_cache=False)
    with pytest.raises(SpecError, match="no home folder"):
        open_cache(CacheSettings("~no-such-user/x"))
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a container's user without a name
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")  # where no folder can be made
    with pytest.raises(SpecError, match="no home folder"):
        open_cache(CacheSettings())


def test_checksums_cover_every_tensor(folder: Path) -> None:
    ShardCache(folder).store(entry())
    content = (folder / KEY.file_name).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    found = json.loads(header["__metadata__"]["crc32"])
    assert found.keys() == TENSORS.keys()
