"""A layer of the packed-shard cache to spoil; half of the spoiled ones get checksums that fit."""

from __future__ import annotations

import json
import random
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from quant.checkpoint.stored_tensors import DamagedFileError, Header, _place
from quant.checkpoint.tensor_files import _HEADER_CRC32, _header_crc32
from quant.linear import LayerForm, quantize_linear
from quant.loading.cache_folder import CacheKey, ShardCache
from quant.loading.cached_layer import fill_from, layer_key, new_entry, read_layer
from quant.loading.layer_load import LayerLoad
from quant.loading.loader import module_nbytes
from quant.scheme import Processor
from tests.properties.mutation import mutate_framed

FORM = LayerForm(4, Processor(), torch.float32, torch.device("cpu"), "torch_4bit")


class Small(nn.Module):
    """Two linears and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 32)
        self.b = nn.Linear(64, 32, bias=False)
        self.norm = nn.LayerNorm(64)


@dataclass(frozen=True)
class PackedLayer:
    """The file, its key, and the layer that it is."""

    data: bytes
    key: CacheKey
    layer: Small

    def restores(self, data: bytes, folder: Path) -> bool:
        """Whether the cache takes the file; AssertionError for a layer of other shapes."""
        cache_folder = ShardCache(folder)
        path = cache_folder.path_of(self.key)
        path.write_bytes(data)
        with torch.device("meta"):
            module = Small()
        load = LayerLoad(module, "m.layers.0", FORM)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = cache_folder.restore(self.key, lambda found: read_layer(load, found))
        if parts is None:
            assert not path.exists(), "a damaged file stays"
            return False
        fill_from(module, parts)
        assert module.norm.weight.shape == self.layer.norm.weight.shape
        return True


@cache
def packed_layer() -> PackedLayer:
    """Made once."""
    torch.manual_seed(0)
    layer = Small()
    with torch.device("meta"):
        meta = Small()
    key = layer_key(LayerLoad(meta, "m.layers.0", FORM), "fingerprint")
    for name in ("a", "b"):
        weight = getattr(layer, name).weight.detach()
        linear = quantize_linear(weight, None, FORM)
        linear.bias = getattr(layer, name).bias
        setattr(layer, name, linear)
    layer.requires_grad_(False)
    with TemporaryDirectory() as folder:
        shards = ShardCache(Path(folder), 1 << 30)
        entry = new_entry(LayerLoad(layer, "m.layers.0", FORM), key, module_nbytes(layer))
        assert entry is not None
        shards.store(entry)
        return PackedLayer(shards.path_of(key).read_bytes(), key, layer)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Spoiled; in one of two cases the checksum of the header is made right again."""
    spoiled = mutate_framed(data, rng)
    return spoiled if rng.random() < 0.5 else _with_checksum(spoiled)


def _with_checksum(data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    if length > len(data):
        return data
    try:
        entries = json.loads(data[8 : 8 + length])
        notes = dict(entries["__metadata__"])
        start = 8 + length
        places = {n: _place(e, start) for n, e in entries.items() if n != "__metadata__"}
        notes[_HEADER_CRC32] = str(_header_crc32(Header(places, notes)))
        entries["__metadata__"] = notes
        header = json.dumps(entries).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, DamagedFileError,
            OverflowError):  # fmt: skip
        return data
    header = header.ljust(length)  # of the same length, for the checksum counts from its end
    if len(header) != length:
        return data
    return data[:8] + header + data[start:]
