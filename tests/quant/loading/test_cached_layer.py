"""Decoder layers through the cache and the reading-ahead loader, against those loaded without."""

from __future__ import annotations

import importlib.util
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from quant.backends.cpu.int8pack import OneDnnW8A8
from quant.backends.kernel_classes import BACKENDS, usable_backend
from quant.backends.portable import Torch4Bit
from quant.backends.table import KERNEL_RULES
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import SINGLE_FILE
from quant.common.errors import CheckpointError
from quant.devices import local_processor
from quant.linear import LayerForm, QuantizedLinear
from quant.loading.cache_folder import ShardCache
from quant.loading.cached_layer import comes_back, layer_key
from quant.loading.layer_load import LayerLoad
from quant.loading.loader import load_layer, loading, module_nbytes
from quant.scheme import LinearShape, Processor

CPU = torch.device("cpu")
HERE = local_processor(CPU)
FORM = LayerForm(4, HERE, torch.bfloat16, CPU)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
USUAL = {("llama", 3, "bfloat16"), ("llama", 4, "float32"), ("llama", 8, "bfloat16")}
USUAL |= {("opt", 4, "bfloat16"), ("opt", 8, "float32"), ("bloom", 3, "float32")}
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None

Build = Callable[[str], PreTrainedModel]
MetaLayer = Callable[[PreTrainedModel, str], nn.Module]
Load = Callable[..., nn.Module]


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(tmp_path / "cache")


@pytest.fixture
def load(tiny_model: Build, meta_layer: MetaLayer, layer_list: Callable[[str], str]) -> Load:
    """Loads layer 1 of a family's checkpoint."""

    def load(
        folder: Path, form: LayerForm, cache: ShardCache | None = None, family: str = "llama"
    ) -> nn.Module:
        name = f"{layer_list(family)}.1"
        module = meta_layer(tiny_model(family), name)
        load_layer(LayerLoad(module, name, form), Checkpoint(folder), cache)
        return module

    return load


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called, no tensor of any checkpoint can be read."""

    def refuse(self: Checkpoint, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    return lambda: monkeypatch.setattr(Checkpoint, "read", refuse)


def contents(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that the layer holds, packed or not."""
    found = dict(layer.named_parameters()) | dict(layer.named_buffers())
    for name, child in layer.named_modules():
        if isinstance(child, QuantizedLinear):
            found |= {f"{name}:{part}": t for part, t in child.packed.state().items()}
            found[f"{name}:{type(child.packed).__name__}"] = torch.tensor(child.bits)
    return found


def assert_equal(layer: nn.Module, other: nn.Module) -> None:
    ours, theirs = contents(layer), contents(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name
    assert module_nbytes(layer) == module_nbytes(other)
    assert repr(layer) == repr(other)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def background_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("read-ahead", "shard-cache"))]


@pytest.mark.parametrize(
    ("family", "bits", "dtype"),
    [
        case if case in USUAL else pytest.param(*case, marks=pytest.mark.rare)
        for case in product(("llama", "opt", "bloom"), (3, 4, 8), ("float32", "bfloat16"))
    ],
)
def test_a_layer_from_the_cache_is_the_layer(
    family: str,
    bits: int,
    dtype: str,
    tiny_model: Build,
    load: Load,
    cache: ShardCache,
    no_reading: Callable[[], None],
    tmp_path: Path,
) -> None:
    """Bit for bit, without the checkpoint; sharded files."""
    tiny_model(family).save_pretrained(tmp_path, max_shard_size="40KB")
    form = replace(FORM, bits=bits, dtype=DTYPES[dtype])
    without = load(tmp_path, form, family=family)
    written = load(tmp_path, form, cache, family)
    no_reading()
    found = load(tmp_path, form, ShardCache(cache.folder), family)
    assert_equal(written, without)
    assert_equal(found, without)
    for name, child in found.named_modules():
        if isinstance(child, QuantizedLinear):
            x = torch.randn(3, child.in_features).to(form.dtype)
            assert torch.equal(child(x), without.get_submodule(name)(x))


@pytest.mark.parametrize(
    ("stored", "sharded", "window_bytes"),
    [
        pytest.param(*case, marks=() if i % 4 == 0 else pytest.mark.rare)
        for i, case in enumerate(product(DTYPES, (True, False), (0, 1, 1 << 20)))
    ],
)
def test_reading_ahead_changes_nothing(
    stored: str,
    sharded: bool,
    window_bytes: int,
    tiny_model: Build,
    meta_layer: MetaLayer,
    cache: ShardCache,
    no_reading: Callable[[], None],
    tmp_path: Path,
) -> None:
    """All layers of a checkpoint in each type, first from its files, then from the cache."""
    model = tiny_model("opt").to(DTYPES[stored])  # its head is tied
    model.save_pretrained(tmp_path, max_shard_size="40KB" if sharded else "5GB")
    assert (tmp_path / SINGLE_FILE).exists() != sharded
    names = [f"model.decoder.layers.{i}" for i in range(2)]
    bits = (3, 8)

    def loads() -> list[LayerLoad]:
        return [
            LayerLoad(meta_layer(model, name), name, replace(FORM, bits=b))
            for name, b in zip(names, bits, strict=True)
        ]

    wanted = loads()
    for load in wanted:
        load_layer(load, Checkpoint(tmp_path))
    for turn in range(2):
        checkpoint, found = Checkpoint(tmp_path), loads()
        others = ["model.decoder.embed_tokens.weight", "lm_head.weight", "no.such.tensor"]
        with loading(found, others, checkpoint, cache, window_bytes):
            for load in found:
                load_layer(load, checkpoint, cache)
        assert background_threads() == []
        for load, reference in zip(found, wanted, strict=True):
            assert_equal(load.module, reference.module)
        if not turn:
            no_reading()


def test_the_first_error_ends_everything(
    tiny_model: Build, meta_layer: MetaLayer, cache: ShardCache, tmp_path: Path
) -> None:
    """No thread stays, no file is left half-written, no damaged layer is kept."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp").down_proj.weight[3, 3] = torch.nan
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    names = [f"model.layers.{i}" for i in range(3)]
    loads = [LayerLoad(meta_layer(model, name), name, FORM) for name in names]

    def load_all() -> None:
        with loading(loads, [], checkpoint, cache):
            for load in loads:
                load_layer(load, checkpoint, cache)

    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj"):
        load_all()
    assert background_threads() == []
    assert {path.name.split("-")[0] for path in cache.folder.glob("*")} <= {
        "model.layers.0",
        ".lock",
    }


def test_a_file_that_becomes_shorter_is_an_error(tiny_model: Build, tmp_path: Path) -> None:
    """Found by the reader; touching the mapped page would end the process."""
    tiny_model("llama").save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    ranges = [checkpoint.range_of(name) for name in checkpoint.names()]
    (path,) = {file_range.path for file_range in ranges}
    os.truncate(path, path.stat().st_size - 50)
    last = max(checkpoint.names(), key=lambda name: checkpoint.range_of(name).stop)
    with (
        checkpoint.reading_ahead(ranges),
        pytest.raises(CheckpointError, match="truncated or damaged"),
    ):
        checkpoint.read(last)


def test_ranges_are_those_of_the_tensors(tiny_model: Build, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    content = (tmp_path / SINGLE_FILE).read_bytes()
    for name in checkpoint.names():
        file_range = checkpoint.range_of(name)
        stored: Any = checkpoint.read(name).view(-1).view(torch.uint8).numpy()
        assert content[file_range.start : file_range.stop] == stored.tobytes()


def keep_times(path: Path, change: Callable[[], None]) -> None:
    before = path.stat()
    change()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def negate(folder: Path, name: str) -> None:
    """Change a stored tensor and nothing else, size and time of the file included."""
    path = folder / SINGLE_FILE
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    tensors[name].neg_()
    keep_times(path, lambda: save_file(tensors, path, {"format": "pt"}))


def flip_in_place(folder: Path, name: str) -> None:
    """The same within the same file: its inode stays."""
    path = folder / SINGLE_FILE
    file_range = Checkpoint(folder).range_of(name)

    def flip() -> None:
        with path.open("r+b") as file:
            file.seek(file_range.start)
            values = bytearray(file.read(file_range.stop - file_range.start))
            values[3::4] = bytes(value ^ 0x80 for value in values[3::4])  # signs of float32
            file.seek(file_range.start)
            file.write(values)

    keep_times(path, flip)


@pytest.mark.parametrize("change", [negate, flip_in_place])
def test_a_changed_checkpoint_never_hits(
    change: Callable[[Path, str], None],
    tiny_model: Build,
    load: Load,
    cache: ShardCache,
    tmp_path: Path,
) -> None:
    """Neither size nor time of change, which programs can set, tell them apart."""
    tiny_model("llama").save_pretrained(tmp_path)
    before = load(tmp_path, FORM, cache)
    change(tmp_path, "model.layers.1.mlp.up_proj.weight")
    after = load(tmp_path, FORM, cache)
    assert_equal(after, load(tmp_path, FORM))
    x = torch.randn(1, 64).bfloat16()
    up, was = after.get_submodule("mlp.up_proj"), before.get_submodule("mlp.up_proj")
    assert (up(x) + was(x)).norm() < 0.2 * was(x).norm()


def test_a_checkpoint_that_changes_while_it_is_read_is_not_kept(
    tiny_model: Build, load: Load, meta_layer: MetaLayer, cache: ShardCache, tmp_path: Path
) -> None:
    """It was opened before another took its place: its tensors must not stand for the new one."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    opened = Checkpoint(tmp_path)
    negate(tmp_path, "model.layers.1.mlp.up_proj.weight")
    name = "model.layers.1"
    load_layer(LayerLoad(meta_layer(model, name), name, FORM), opened, cache)
    assert not cache.folder.exists()
    assert_equal(load(tmp_path, FORM, cache), load(tmp_path, FORM))


def test_what_a_key_depends_on(tiny_model: Build, meta_layer: MetaLayer, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    name = "model.layers.1"
    module = meta_layer(model, name)

    def text(
        form: LayerForm = FORM, name: str = name, fingerprint: str = "x", part: nn.Module = module
    ) -> str:
        return layer_key(LayerLoad(part, name, form), fingerprint).text

    keys = [
        text(),
        text(fingerprint="y"),
        text(name="model.layers.2"),
        text(part=meta_layer(model, "model.layers.1.mlp")),
        text(replace(FORM, bits=3)),
        text(replace(FORM, backend="torch_4bit")),
        text(replace(FORM, rounding="stochastic")),
        text(replace(FORM, dtype=torch.float32)),
        text(replace(FORM, processor=Processor(instruction_sets=frozenset({"other"})))),
    ]
    assert len(set(keys)) == len(keys)
    assert text() == text()
    fingerprint = Checkpoint(tmp_path).fingerprint(name)
    assert fingerprint == Checkpoint(tmp_path).fingerprint(name)
    assert fingerprint != Checkpoint(tmp_path).fingerprint("model.layers.2")
    with (tmp_path / "config.json").open("a") as file:
        file.write(" ")
    assert fingerprint != Checkpoint(tmp_path).fingerprint(name)


def test_sixteen_bits_are_not_cached(
    tiny_model: Build, load: Load, cache: ShardCache, tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    load(tmp_path, replace(FORM, bits=16), cache)
    assert not cache.folder.exists()


class Forgetful(Torch4Bit):
    """A backend that comes back as another weight."""

    def state(self) -> dict[str, torch.Tensor]:
        return super().state() | {"packed": ~self.packed}


def test_a_backend_that_does_not_come_back_is_not_cached(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Build,
    load: Load,
    cache: ShardCache,
    tmp_path: Path,
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setitem(BACKENDS, "torch_4bit", Forgetful)
    usable_backend.cache_clear()
    form = replace(FORM, backend="torch_4bit")
    with pytest.warns(RuntimeWarning, match="Forgetful are not cached .*differs when it comes"):
        load(tmp_path, form, cache)
    usable_backend.cache_clear()
    assert not cache.folder.exists()


def usable_here() -> list[Any]:
    shape = LinearShape(in_features=256, out_features=192)
    rules = [rule for rule in KERNEL_RULES if rule.bits != 16]
    found = [
        (rule.name, dtype)
        for rule in rules
        for dtype in DTYPES
        if rule.supports(HERE, shape, dtype) or rule.name.startswith(("bnb", "cuda"))
    ]
    skip = pytest.mark.skipif(not HAS_BITSANDBYTES, reason="needs bitsandbytes")
    return [
        pytest.param(name, dtype, marks=[skip] if name.startswith("bnb") else [])
        for name, dtype in found
    ]


@pytest.mark.parametrize(("name", "dtype"), usable_here())
def test_every_backend_comes_back(name: str, dtype: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert comes_back(BACKENDS[name], DTYPES[dtype], CPU)


@pytest.mark.skipif("avx512_vnni" not in HERE.instruction_sets, reason="needs VNNI")
def test_bytes_of_another_layout_are_refused() -> None:
    """Such as come from another processor's oneDNN."""
    shape = LinearShape(in_features=256, out_features=192)
    packed = OneDnnW8A8.from_weight(torch.randn(192, 256), torch.bfloat16, CPU)
    state = packed.state()
    for part in ("layout", "content"):
        changed = state | {part: torch.cat((state[part][1:-1], state[part][:1]))}
        with pytest.raises(RuntimeError, match="another layout"):
            OneDnnW8A8.from_state(changed, shape, torch.bfloat16)
