"""A decode step of the real decoder on tensors without memory: what it launches and moves."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import mul
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel

from actors.attention import cuda as range_kernels
from actors.attention.kv_cache import CacheForm, KVCache
from actors.attention.ragged import RaggedContext
from actors.messages import MicroBatch
from actors.stage.layer_cache import make_cache
from actors.stage.layers import cuda_layer
from actors.stage.layers import own_layers as own_layer_files
from actors.stage.layers.own_layers import own_layers, put_own_layers
from actors.stage.model_config import with_layers
from actors.stage.partial_model import empty_model, keep_stage
from actors.stage.stage import run_decoder
from quant.backends.base import CanonicalPacked, PackedWeight
from quant.backends.cuda import driver as cuda_driver
from quant.backends.cuda import packed as cuda_packed
from quant.backends.cuda import products as cuda_products
from quant.backends.cuda import w8a8 as cuda_w8a8
from quant.backends.cuda.driver import Argument, Kernels
from quant.backends.kernel_classes import BACKENDS
from quant.backends.table import INT8_MATRICES, KERNEL_RULES
from quant.linear import QuantizedLinear
from quant.loading.cached_layer import put_submodule
from quant.rounding.canonical import CanonicalWeight
from quant.scheme import FULL_BITS, LinearShape, Processor, ScaleForm

META = torch.device("meta")
VIEWS = {
    *("chunk", "detach", "dropout", "empty", "empty_like", "expand", "flatten", "permute"),
    *("new_empty", "narrow", "reshape", "select", "slice", "split", "squeeze", "t", "transpose"),
    *("unbind", "unflatten", "unsqueeze", "view", "_unsafe_view", "as_strided", "alias"),
    *("split_with_sizes", "empty_strided", "_reshape_alias", "tensor_split", "lift_fresh"),
}
"""Operations that start no kernel: views, memory that is not filled, dropout of no training."""

_ATTENTION = ("attend", "merge", "scaled_dot_product", "index_select", "repeat_interleave")


@dataclass
class Started:
    """Kernels that were started, by name, and the bytes of what each reads and writes, once."""

    kernels: Counter[str] = field(default_factory=Counter)
    moved_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, moved_bytes: int) -> None:
        self.kernels[name] += 1
        self.moved_bytes[name] += moved_bytes

    @property
    def attention_bytes(self) -> int:
        """Of attention itself and of the copies of keys and values that it is given."""
        return sum(moved for name, moved in self.moved_bytes.items() if name.startswith(_ATTENTION))

    def __sub__(self, other: Started) -> Started:
        kernels, moved_bytes = Counter(self.kernels), Counter(self.moved_bytes)
        kernels.subtract(other.kernels)
        moved_bytes.subtract(other.moved_bytes)
        return Started(+kernels, +moved_bytes)


@dataclass(frozen=True)
class Recorded(Kernels):
    """Kernels of ours that are counted, not launched. Attention reads the whole cache, others touch
    `new_share` of it.
    """

    started: Started
    cache: set[int]
    new_share: float

    def launch(self, name: str, blocks: int, *arguments: Argument) -> None:
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        if name == "restore":  # rows of a weight, into the last of its tensors
            packed, scales, restored = tensors
            share = restored.numel() / (packed.shape[0] * restored.shape[1])
            held_bytes = _bytes(packed) + _bytes(scales)
            self.started.add(name, round(share * held_bytes) + _bytes(restored))
            return
        shares = [self._share(name, each) for each in tensors]
        self.started.add(name, round(sum(map(mul, map(_bytes, tensors), shares))))

    def _share(self, name: str, tensor: Tensor) -> float:
        if tensor.untyped_storage()._cdata in self.cache:
            return 1.0 if name.startswith("attend") else self.new_share
        is_left = tensor.dtype == torch.float32 and name.startswith(("attend", "tensor"))
        return 2.0 if is_left else 1.0  # sums of splits, which are read again


class Operations(TorchDispatchMode):
    """Counts torch's operations that start a kernel."""

    def __init__(self, started: Started) -> None:
        super().__init__()
        self._started = started

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        out = func(*args, **(kwargs or {}))
        if name not in VIEWS and not (name == "to" and out is args[0]):
            self._started.add(name, _moved_bytes(name, args, kwargs, out))
        return out


def _moved_bytes(name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that an operation reads and writes; of what it picks from, what it picks."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    written = sum(_bytes(each) for each in tree_leaves(out) if isinstance(each, Tensor))
    if name in ("index_select", "index", "embedding"):
        return 2 * written
    if name in ("index_put", "index_put_"):
        return 2 * _bytes(tensors[-1])
    if name == "copy_":
        return _bytes(tensors[0]) + _bytes(tensors[1])
    return written + sum(map(_bytes, tensors))


def _bytes(tensor: Tensor) -> int:
    """Bytes of its numbers, those of expanded dimensions once."""
    sizes = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return int(np.prod(sizes, dtype=np.int64)) * tensor.element_size()


@dataclass(frozen=True)
class Step:
    """A decode step of requests of these `lengths`, the new token counted in, on a GPU of
    `capability` with so many multiprocessors. Their ranges fill the cache; without `own_kernels` it
    has room for reading them by one copy.
    """

    lengths: tuple[int, ...]
    bits: int = FULL_BITS
    kv_bits: int = FULL_BITS
    dtype: torch.dtype = torch.float16
    capability: tuple[int, int] = (7, 0)
    multiprocessors: int = 80
    own_kernels: bool = True

    def count(self, config: PretrainedConfig, layers: int) -> Started:
        """What so many layers of the model of `config` start."""
        config = with_layers(config, layers)
        model = empty_model(config)
        keep_stage(model, range(layers), is_first=False, is_last=False, has_head=False)
        model.to_empty(device=META).to(self.dtype)
        if self.bits != FULL_BITS:
            self._pack_linears(model)
        form = CacheForm(self.dtype, META, self.kv_bits)
        lengths = np.array(self.lengths)
        own = int(lengths.sum())
        tokens = own if self.own_kernels else len(lengths) * int(lengths.max())
        cache = make_cache(config, range(layers), tokens, form)
        begins = np.cumsum(lengths) - lengths
        ones = np.ones_like(lengths)
        batch = MicroBatch(np.arange(len(lengths)), lengths - 1, ones, begins)
        hidden = torch.empty(len(lengths), config.hidden_size, dtype=self.dtype, device=META)
        started = Started()
        with torch.inference_mode(), self._pretended(cache, started), Operations(started):
            if self.own_kernels:
                put_own_layers(model, range(layers), cache, self.dtype)
                assert own_layers(model), f"{config.model_type} has no layers of ours"
            run_decoder(model, RaggedContext.of(cache, batch), hidden)
        return started

    def _pack_linears(self, model: PreTrainedModel) -> None:
        processor = Processor(compute_capability=self.capability)
        dtype = str(self.dtype).removeprefix("torch.")
        for name, linear in list(model.get_decoder().named_modules()):
            if not isinstance(linear, nn.Linear):
                continue
            shape = LinearShape(linear.in_features, linear.out_features)
            rule = next(
                each
                for each in KERNEL_RULES
                if each.bits == self.bits
                and each.name.startswith("cuda" if self.own_kernels else f"cuda_{self.bits}bit")
                and each.supports(processor, shape, dtype)
            )
            packed = _packed(BACKENDS[rule.name], shape, self.bits)
            bias = None if linear.bias is None else linear.bias.detach()
            quantized = QuantizedLinear(packed, shape, bias, self.dtype, rule)
            put_submodule(model.get_decoder(), name, quantized)

    @contextmanager
    def _pretended(self, cache: KVCache, started: Started) -> Iterator[None]:
        """Let torch's other half believe that there is such a GPU."""
        share = len(self.lengths) / sum(self.lengths)
        has_tensor_cores = cuda_products.has_tensor_cores(self.capability, self.dtype)
        names = cuda_products.TENSOR_KERNELS if self.own_kernels and has_tensor_cores else ()
        functions = dict.fromkeys(names, ctypes.c_void_p())
        recorded = Recorded(ctypes.CDLL(None), functions, META, started, _memory(cache), share)
        blocks = cuda_w8a8._BLOCKS * self.multiprocessors
        has_library = self.capability >= INT8_MATRICES
        codes = cuda_w8a8.CodeProducts(recorded, blocks, has_library)
        products = cuda_products.CudaProducts(recorded, self.dtype, self.multiprocessors)
        blocks = range_kernels._BLOCKS * self.multiprocessors
        attention = range_kernels.RangeAttention(recorded, blocks) if self.own_kernels else None
        properties = SimpleNamespace(multi_processor_count=self.multiprocessors)
        with ExitStack() as stack:
            for name, value in (
                ("get_device_capability", lambda *_: self.capability),
                ("get_device_properties", lambda *_: properties),
            ):
                stack.enter_context(patch.object(torch.cuda, name, value))
            for module, name in _users(cuda_driver.kernels_for):
                stack.enter_context(patch.object(module, name, lambda *_, **__: recorded))
            for module, name, value in (
                (own_layer_files, "layer_kernels", lambda *_: cuda_layer.LayerKernels(recorded)),
                (own_layer_files, "self_test", lambda *_: None),
                (cuda_packed, "_products_for", lambda *_: products),
                (cuda_w8a8, "code_products", lambda *_: codes),
            ):
                stack.enter_context(patch.object(module, name, value))
            for module, name in _users(range_kernels.range_attention):
                stack.enter_context(patch.object(module, name, lambda *_: attention))
            yield


def _packed(kernel: type[PackedWeight], shape: LinearShape, bits: int) -> PackedWeight:
    rows, columns = shape.out_features, shape.in_features

    def empty(dtype: torch.dtype, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=META)

    codes = empty(torch.int8 if bits == 8 else torch.uint8, rows, columns)
    if kernel is cuda_w8a8.CudaW8A8:
        return kernel(codes, empty(torch.float32, rows), empty(torch.float32, columns))
    assert issubclass(kernel, CanonicalPacked)
    if bits == 8:
        whole = CanonicalWeight(codes, empty(torch.float32, rows, 1), None, 8, columns)
        return kernel.from_canonical(whole)
    scale, zero = (empty(torch.bfloat16, rows, columns // shape.group) for _ in range(2))
    own = CanonicalWeight(codes, scale, zero, bits, shape.group, shape.form is ScaleForm.NARROW)
    return kernel.from_canonical(own)


def _memory(cache: KVCache) -> set[int]:
    return {each.untyped_storage()._cdata for each in cache.of_tokens(0, 1)}


def _users(function: object) -> list[tuple[Any, str]]:
    """Modules that have imported a function, and their names of it."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        for name, value in list(vars(module).items())
        if value is function
    ]
