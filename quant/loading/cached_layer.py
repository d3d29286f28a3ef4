"""A quantized decoder layer as the tensors of a cached file, and the key of all it depends on.

Packed weights are kept as their backends hold them, so that nothing is computed when they come
back. That layout is the machine's: it is part of the key, with the versions of everything that has
a say in it. Norms and biases go along, so that a layer from the cache needs no checkpoint.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import platform
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from hashlib import sha256
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import torch
from torch import nn

from quant.backends.base import PackedWeight
from quant.backends.kernel_classes import BACKENDS, usable_backend
from quant.backends.kernel_rule import KernelRule
from quant.backends.table import KERNEL_RULES
from quant.checkpoint.stored_tensors import DamagedFileError
from quant.common.json_text import loads
from quant.experts import ExpertWeights, QuantizedExperts, expert_shapes, is_experts
from quant.linear import LayerForm, QuantizedLinear
from quant.loading.cache_folder import CachedTensors, CacheKey, NewEntry
from quant.loading.expert_tensors import FUSED, experts_like
from quant.loading.layer_load import LayerLoad, held_dtype
from quant.rounding.importance import digest_of_inputs
from quant.scheme import LinearShape, part_shape

_LIBRARIES = ("torch", "bitsandbytes", "numba")
"""Libraries that decide on the layout or the rounding of packed weights."""

_SOURCES = (".py", ".cu", ".cuh")
_RULES = {BACKENDS[rule.name].__name__: rule for rule in KERNEL_RULES if rule.name in BACKENDS}
"""Rules by the name of the backend's class, which stands in the file."""

_LINEARS, _EXPERTS = "linears", "experts"
_PART = ":"
"""Separates the name of a linear and that of a part of its packed weight in a file."""

_NOTES_BYTES = 4096
"""Most bytes stored of a linear beside its weight: group sizes, oneDNN's layout (772)."""

_TEST_SHAPE = LinearShape(in_features=256, out_features=192)
_TEST_TOKENS = 5
_TOLERANCE = 1e-3
"""Largest relative difference of products that differ only in the order of their sums."""


def layer_key(load: LayerLoad, fingerprint: str) -> CacheKey:
    """The key of what a module, on the meta device, becomes by `load`. The source code of this
    package stands for what it does to a weight, so that no version number has to be kept.
    """
    module, name_prefix, form, importance = (
        load.module,
        load.name_prefix,
        load.form,
        load.importance,
    )
    depends_on = {
        "checkpoint": fingerprint,
        "layer": name_prefix,
        "tensors": {
            name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in all_tensors(module)
        },
        "bits": form.bits,
        "experts": None if load.experts_form is None else _place_of(load.experts_form),
        "backends": _backends(load),
        "cuts": {name: astuple(cut) for name, cut in load.cuts.items()},
        "rounding": form.rounding,
        "importance": None if importance is None else digest_of_inputs(importance.inputs),
        "dtype": str(form.dtype),
        "device": form.device.type,
        "capability": form.processor.compute_capability,
        "rocm_architecture": form.processor.rocm_architecture,
        "instructions": sorted(form.processor.instruction_sets),
        "cpu": [torch.backends.cpu.get_cpu_capability(), _cpu_flags()],
        "code": _code_fingerprint(),
        "libraries": _library_versions(),
    }
    label = f"{name_prefix}-{form.bits}bit"
    return CacheKey(label, json.dumps(depends_on, sort_keys=True))


def _place_of(form: LayerForm) -> list[object]:
    return [type(form).__name__, form.bits, str(form.dtype), form.device.type]


def new_entry(load: LayerLoad, key: CacheKey, nbytes: int) -> NewEntry | None:
    """Make an entry of a filled layer; None if weights of a backend cannot be stored."""
    module, form, experts_form = load.module, load.form, load.experts_form or load.form
    linears: dict[str, PackedWeight] = {}
    experts: dict[str, ExpertWeights] = {}
    for name, child in module.named_modules():
        if isinstance(child, QuantizedLinear):
            if child.input_order is not None:  # of stored codes, which are quickly had again
                return None
            linears[name] = child.packed
        elif isinstance(child, QuantizedExperts):
            fused = zip(FUSED, (child.gate_up, child.down), strict=True)
            experts |= {f"{name}.{part}": weights for part, weights in fused}
    names = {name: type(packed) for name, packed in linears.items()}
    stacks = {name: weights.backend for name, weights in experts.items()}
    for backends, own in ((names, form), (stacks, experts_form)):
        if not all(comes_back(each, own.dtype, own.device) for each in {*backends.values()}):
            return None

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, packed in linears.items():  # one at a time, as oneDNN's are copied
            for part, tensor in packed.state().items():
                yield f"{name}{_PART}{part}", tensor
        for name, weights in experts.items():
            for part, tensor in weights.state():
                yield f"{name}{_PART}{part}", tensor
        yield from all_tensors(module)

    notes = {_LINEARS: _class_names(names), _EXPERTS: _class_names(stacks)}
    nbytes += _NOTES_BYTES * (len(linears) + sum(each.count for each in experts.values()))
    return NewEntry(key, tensors, notes, nbytes)


def _class_names(backends: Mapping[str, type[PackedWeight]]) -> str:
    return json.dumps({name: backend.__name__ for name, backend in backends.items()})


@functools.cache
def comes_back(backend: type[PackedWeight], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a weight of `backend` survives storing; tried once per process, as libraries may
    change their layouts.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_TEST_SHAPE.out_features, _TEST_SHAPE.in_features, generator=generator)
    x = torch.randn(_TEST_TOKENS, _TEST_SHAPE.in_features, generator=generator).to(device, dtype)
    try:
        packed = backend.from_weight(weight, dtype, device)
        state = {name: tensor.clone() for name, tensor in packed.state().items()}
        again = backend.from_state(state, _TEST_SHAPE, dtype).forward(x).float()
        wanted = packed.forward(x).float()
    except (RuntimeError, AttributeError, TypeError) as error:
        complaint = f"{type(error).__name__}: {error}"
    else:
        if float((again - wanted).norm() / wanted.norm()) <= _TOLERANCE:
            return True
        complaint = "its product differs when it comes back"
    warnings.warn(
        f"weights of kernel backend {backend.__name__} are not cached ({complaint}); stages "
        "quantize them at every start",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


@dataclass(frozen=True)
class CachedLayer:
    """`modules`: linears and experts, by name."""

    modules: Mapping[str, nn.Module]
    tensors: Mapping[str, torch.Tensor]


def read_layer(load: LayerLoad, cached: CachedTensors) -> CachedLayer:
    module, form = load.module, load.form
    try:
        names, stacks = (
            {name: _RULES[own] for name, own in dict(loads(cached.notes[kind])).items()}
            for kind in (_LINEARS, _EXPERTS)
        )
        places = {name: (module.get_submodule(name), rule) for name, rule in names.items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{type(error).__name__}: {error}") from error
    modules: dict[str, nn.Module] = {
        n: _read_linear(meta, n, rule, cached, form) for n, (meta, rule) in places.items()
    }
    for name, child in module.named_modules():
        if is_experts(child):
            modules[name] = _read_experts(child, name, stacks, cached, load.form_of(name))
    packed = {f"{name}.weight" for name in names} | {*stacks}
    plain = [name for name in cached.names if _PART not in name]
    tensors = {name: cached.read(name).to(load.form_of(name).device) for name in plain}
    expected = {name: tensor for name, tensor in all_tensors(module) if name not in packed}
    if tensors.keys() != expected.keys():
        raise DamagedFileError(f"it lacks or should not have {min(tensors.keys() ^ expected)}")
    for name, tensor in expected.items():
        own = load.form_of(name).dtype
        held = held_dtype(name, tensor, own) if tensor.is_meta else tensor.dtype
        wanted = (tensor.shape, held)
        if (tensors[name].shape, tensors[name].dtype) != wanted:
            raise DamagedFileError(f"{name} is not {list(tensor.shape)} of {wanted[1]}")
    return CachedLayer(modules, tensors)


def fill_from(module: nn.Module, layer: CachedLayer) -> None:
    for name, child in layer.modules.items():
        put_submodule(module, name, child)
    for name, tensor in layer.tensors.items():
        owner_name, _, attribute = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        is_parameter = attribute in owner._parameters
        setattr(owner, attribute, nn.Parameter(tensor, False) if is_parameter else tensor)


def _read_linear(
    meta: nn.Module, name: str, rule: KernelRule, cached: CachedTensors, form: LayerForm
) -> QuantizedLinear:
    if not isinstance(meta, nn.Linear):
        raise DamagedFileError(f"{name} is no linear layer")
    shape = LinearShape(meta.in_features, meta.out_features)
    placed = _placed_parts(name, cached, form.device)
    with _damaged(name):
        packed = BACKENDS[rule.name].from_state(placed, shape, form.dtype)
    linear = QuantizedLinear(packed, shape, None, form.dtype, rule)
    linear.bias = meta.bias
    return linear


def _read_experts(
    meta: nn.Module,
    name: str,
    rules: Mapping[str, KernelRule],
    cached: CachedTensors,
    form: LayerForm,
) -> QuantizedExperts:
    count, *shapes = expert_shapes(meta)
    held = []
    for fused, shape in zip(FUSED, shapes, strict=True):
        full_name = f"{name}.{fused}"
        with _damaged(full_name):
            backend = BACKENDS[rules[full_name].name]
            state = _placed_parts(full_name, cached, form.device)
            held.append(ExpertWeights.of_state(backend, state, shape, count, form.dtype))
    return experts_like(meta, held[0], held[1], form)


def _placed_parts(
    name: str, cached: CachedTensors, device: torch.device
) -> dict[str, torch.Tensor]:
    start = f"{name}{_PART}"
    parts = {n.removeprefix(start): cached.read(n) for n in cached.names if n.startswith(start)}
    return {part: tensor.to(device) if tensor.dim() else tensor for part, tensor in parts.items()}


@contextmanager
def _damaged(name: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise  # the file is not at fault
        raise DamagedFileError(f"{name}: {type(error).__name__}: {error}") from error


def _backends(load: LayerLoad) -> dict[str, str]:
    shapes = {name: LinearShape(own.in_features, own.out_features) for name, own in load.linears}
    for name, child in load.module.named_modules():
        if is_experts(child):
            own = zip(FUSED, expert_shapes(child)[1:], strict=True)
            shapes |= {f"{name}.{fused}": shape for fused, shape in own}
    found = {}
    for name, shape in shapes.items():
        form, cut = load.form_of(name), load.cuts.get(name)
        if cut is not None:
            rows, columns = cut.whole_shape((shape.out_features, shape.in_features))
            shape = part_shape(LinearShape(columns, rows), cut)
        rule = form.rule_of(shape)
        if rule.kernel is not None:
            backend = usable_backend(rule.name, form.bits, form.dtype, form.device)
            found[name] = backend.__name__
    return found


def all_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


@functools.cache
def _code_fingerprint() -> str:
    digest = sha256()
    for path, content in sorted(_sources(resources.files("quant"), "")):
        digest.update(f"{path} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _sources(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _sources(item, f"{path}/{item.name}")
        elif item.name.endswith(_SOURCES):
            yield f"{path}/{item.name}", item.read_bytes()


@functools.cache
def _cpu_flags() -> str:
    """Digest of the CPU's flags, by which libraries choose the layout of packed weights."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8", "replace").splitlines() if info.is_file() else []
    flags = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return sha256(flags[0].encode()).hexdigest() if flags else platform.processor()


@functools.cache
def _library_versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def put_submodule(module: nn.Module, name: str, child: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, child)
