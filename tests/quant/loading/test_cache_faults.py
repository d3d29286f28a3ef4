"""Cache files that are damaged, other programs' files, killed writers, and memory that runs out."""

from __future__ import annotations

import copy
import errno
import fcntl
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from quant.backends.portable import Torch4Bit
from quant.checkpoint.tensor_files import TensorWriter, reserved_bytes
from quant.linear import LayerForm, quantize_linear
from quant.loading import cache_folder as shard_cache
from quant.loading.cache_folder import CacheKey, NewEntry, ShardCache
from quant.loading.cached_layer import CachedLayer, layer_key, new_entry, read_layer
from quant.loading.layer_load import LayerLoad
from quant.loading.loader import module_nbytes
from quant.scheme import Processor

FORM = LayerForm(4, Processor(), torch.bfloat16, torch.device("cpu"), "torch_4bit")
NBYTES = 4000
FILE_BYTES = reserved_bytes(NBYTES)

Contents = dict[str, Tensor]
Notes = dict[str, str]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 64)
        self.down = nn.Linear(128, 64, bias=False)
        self.norm = nn.LayerNorm(128)
        self.register_buffer("places", torch.arange(3))


def meta_layer() -> nn.Module:
    with torch.device("meta"):
        return Layer()


KEY = layer_key(LayerLoad(meta_layer(), "model.layers.0", FORM), "fingerprint")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The file of a layer that is in the cache, in use by nobody."""
    torch.manual_seed(0)
    layer = Layer().bfloat16()
    for name, linear in (("up", layer.up), ("down", layer.down)):
        filled = quantize_linear(linear.weight.detach(), None, FORM)
        filled.bias = linear.bias
        setattr(layer, name, filled)
    layer.requires_grad_(False)
    entry = new_entry(LayerLoad(layer, "model.layers.0", FORM), KEY, module_nbytes(layer))
    assert entry is not None
    cache = ShardCache(tmp_path)
    cache.store(entry)
    return cache.path_of(KEY)


def restore(folder: Path) -> CachedLayer | None:
    module = meta_layer()
    load = LayerLoad(module, "model.layers.0", FORM)
    return ShardCache(folder).restore(KEY, lambda cached: read_layer(load, cached))


def contents(layer: CachedLayer) -> Contents:
    packed = {
        f"{name}:{part}": tensor
        for name, linear in layer.modules.items()
        for part, tensor in linear.packed.state().items()
    }
    return {**layer.tensors, **packed}


def rewrite(path: Path, change: Callable[[Contents, Notes], object]) -> None:
    """Another content with the right checksums."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    with safe_open(path, "pt") as file:
        notes = dict(file.metadata())
    change(tensors, notes)
    with path.open("wb") as file:
        writer = TensorWriter(file)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish(notes)


def test_an_unchanged_file_is_read(stored: Path) -> None:
    rewrite(stored, lambda tensors, notes: None)
    layer = restore(stored.parent)
    assert layer is not None
    assert {"norm.weight", "up.bias", "down:packed", "places"} <= contents(layer).keys()
    assert layer.tensors["places"].dtype == torch.int64


WRONG: dict[str, Callable[[Contents, Notes], object]] = {
    "no packed weight": lambda tensors, _: tensors.pop("up:packed"),
    "no norm": lambda tensors, _: tensors.pop("norm.weight"),
    "no bias": lambda tensors, _: tensors.pop("up.bias"),
    "a tensor too many": lambda tensors, _: tensors.update({"norm.other": torch.ones(3)}),
    "another shape": lambda tensors, _: tensors.update(
        {"norm.weight": torch.ones(64, dtype=torch.bfloat16)}
    ),
    "another type": lambda tensors, _: tensors.update({"norm.weight": torch.ones(128).half()}),
    "no such backend": lambda _, notes: notes.update(
        {"linears": notes["linears"].replace("Torch4Bit", "Uorch4Bit")}
    ),
    "no such linear": lambda _, notes: notes.update(
        {"linears": notes["linears"].replace('"up"', '"us"')}
    ),
    "a norm as linear": lambda _, notes: notes.update(
        {"linears": notes["linears"].replace('"up"', '"norm"')}
    ),
    "linears by number": lambda _, notes: notes.update({"linears": '{"up": [1]}'}),
    "no linears": lambda _, notes: notes.pop("linears"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_whole_file_of_a_wrong_layer_is_damaged(
    wrong: Callable[[Contents, Notes], object], stored: Path
) -> None:
    rewrite(stored, wrong)
    with pytest.warns(RuntimeWarning, match="is damaged") as caught:
        assert restore(stored.parent) is None
    assert len(caught) == 1
    assert not stored.exists()


def test_no_changed_byte_of_a_header_goes_unnoticed(stored: Path) -> None:
    """Either the file is damaged, or what it says is the same."""
    content = stored.read_bytes()
    whole = restore(stored.parent)
    assert whole is not None
    expected = contents(whole)
    del whole
    generator = random.Random(0)
    end = len(content[: reserved_bytes(0)].rstrip())
    read = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place in range(end):
            changed = bytearray(content)
            changed[place] ^= 1 << generator.randrange(8)
            stored.write_bytes(changed)
            found = restore(stored.parent)
            if found is None:
                assert not stored.exists()
                continue
            read += 1
            assert contents(found).keys() == expected.keys()
            assert all(torch.equal(contents(found)[name], t) for name, t in expected.items())
    assert read < end / 20


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["device", "host"])
@pytest.mark.parametrize("where", ["reading", "unpacking"])
def test_without_memory_a_good_file_stays(
    error: RuntimeError, where: str, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise copy.copy(error)

    if where == "reading":
        monkeypatch.setattr(shard_cache, "read_tensor", fail)
    else:
        monkeypatch.setattr(Torch4Bit, "from_state", fail)
    with pytest.raises(type(error), match="allocate"):
        restore(stored.parent)
    assert stored.exists()
    monkeypatch.undo()
    assert restore(stored.parent) is not None


def test_a_weight_that_its_backend_refuses_is_damaged(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("another layout")

    monkeypatch.setattr(Torch4Bit, "from_state", refuse)
    with pytest.warns(RuntimeWarning, match="is damaged .*another layout"):
        assert restore(stored.parent) is None
    assert not stored.exists()


# ------------------------------------------------------------------------------------ the folder


def entry(number: int) -> NewEntry:
    tensor = torch.full((NBYTES // 4,), float(number))
    return NewEntry(CacheKey("layer", str(number)), lambda: [("x", tensor)], {}, NBYTES)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_files_of_others_neither_count_nor_go(tmp_path: Path) -> None:
    """Of programs that keep weights or downloads where the cache was told to be."""
    others = {
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        f"{'a' * 32}.safetensors",
        f"x-{'0' * 32}.safetensors.part",
        "ubuntu.iso.part",
        ".hidden.part",
        ".llmpq-shard-notes.txt",
    }
    for name in others:
        (tmp_path / name).write_bytes(bytes(3 * FILE_BYTES))
        os.utime(tmp_path / name, (0, 0))
    for number in range(2):
        ShardCache(tmp_path, FILE_BYTES).store(entry(number))
    assert names_in(tmp_path) == others | {entry(1).key.file_name}


def test_what_killed_writers_left_goes_at_once(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f".llmpq-shard-{number}.part").write_bytes(bytes(FILE_BYTES))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ShardCache(tmp_path, FILE_BYTES).store(entry(0))
    assert names_in(tmp_path) == {entry(0).key.file_name}


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        begun.set()
        assert go_on.wait(30)
        yield "x", torch.zeros(NBYTES // 4)

    writer = ShardCache(tmp_path, FILE_BYTES)
    with writer:
        writer.store(replace(entry(0), tensors=tensors))
        assert begun.wait(30)
        with pytest.warns(RuntimeWarning, match="no room"):
            ShardCache(tmp_path, FILE_BYTES).store(entry(1))
        (part,) = names_in(tmp_path)
        assert part.startswith(".llmpq-shard-")
        go_on.set()
    assert names_in(tmp_path) == {entry(0).key.file_name}
    with pytest.warns(RuntimeWarning, match="no room"):  # still in use, now as a layer
        ShardCache(tmp_path, FILE_BYTES).store(entry(1))
    assert names_in(tmp_path) == {entry(0).key.file_name}


def test_room_is_made_where_locks_are_those_of_nfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There exclusive locks need a file open for writing, shared ones for reading (flock(2))."""
    flock = fcntl.flock

    def of_nfs(file: int, operation: int) -> None:
        number = file if isinstance(file, int) else file.fileno()
        missing = os.O_RDONLY if operation & fcntl.LOCK_EX else os.O_WRONLY
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == missing:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(number, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    for number in range(2):
        ShardCache(tmp_path, FILE_BYTES).store(entry(number))
    assert names_in(tmp_path) == {entry(1).key.file_name}
