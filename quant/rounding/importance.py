"""Statistics of what a model's linears multiply, by which weights are rounded, and their file.

The error of an output is sum_j (w_j - q_j) x_j: over many tokens its square weighs each column of
the weight by E[x_j^2] (and by products of columns, which are left out here). 8-bit kernels that
round activations too scale them by how large they become.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from quant.common.errors import CheckpointError, InputError
from quant.common.files import write_whole
from quant.rounding.importance_header import (
    FINGERPRINT,
    FINGERPRINT_HEX,
    FORMAT,
    FORMAT_NOW,
    REMEDY,
    SEEN,
    SHAPE,
    SHARED,
    SUFFIX,
    read_importance_header,
)


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Float32 `[in]` on the host: `mean_square` E[x^2]; `largest` |x| seen."""

    mean_square: Tensor
    largest: Tensor

    def of_inputs(self, part: slice) -> InputStatistics:
        return InputStatistics(self.mean_square[part], self.largest[part])


HEAD = "lm_head"
"""The name of the LM head among the linears of the last layer."""


@dataclass(frozen=True, eq=False)
class LayerImportance:
    """`inputs` by the linear's name; linears of one input share an object. `keys`: the largest
    magnitude of each channel as cached, after rotation, float32 `[kv_heads, head_dim]`.
    """

    inputs: Mapping[str, InputStatistics]
    keys: Tensor

    def with_head(self, head: InputStatistics) -> LayerImportance:
        """As that of the last layer, beside which what its norm gives to the LM head is kept."""
        return replace(self, inputs={**self.inputs, HEAD: head})

    @property
    def of_head(self) -> InputStatistics | None:
        return self.inputs.get(HEAD)


class RunningStatistics:
    """Sums of a pass in float32, of all passes in float64."""

    def __init__(self) -> None:
        self._squares = torch.zeros((), dtype=torch.float64)
        self._largest = torch.zeros(())
        self.vectors = 0

    def add(self, vectors: Tensor) -> None:
        rows = vectors.detach().reshape(-1, vectors.shape[-1]).float()
        self._squares = self._squares + rows.square().sum(0).cpu().double()
        self._largest = torch.maximum(self._largest, rows.abs().amax(0).cpu())
        self.vectors += len(rows)

    def result(self) -> InputStatistics:
        mean_square = (self._squares / max(1, self.vectors)).float()
        if not self.vectors or not bool(mean_square.isfinite().all()):
            raise CheckpointError(
                "the values that it multiplies are not finite in the type computed in; the weights "
                "are damaged, or the model needs another dtype (or rounding nearest, which does "
                "not look at them)"
            )
        return InputStatistics(mean_square, self._largest)


_ALIKE_VECTORS = 32
"""Vectors of like columns that are added to those that an expert has seen. Of the demo model's down
projections at 4 bit, sums of 4 vectors alone make outputs err 1.9 times as much as no weighing
does, with 32 beside them 1.06; of 64 vectors 0.91 and 0.87, of 500 both 0.74."""


class ExpertStatistics:
    """As `RunningStatistics`, of experts that each see a part of what passes: one after another in
    `[experts * in]`, zeros for an expert that has seen nothing. Of the few vectors that others have
    seen columns differ by chance, and are drawn to their mean (`_ALIKE_VECTORS`).
    """

    def __init__(self) -> None:
        self._of: list[RunningStatistics] = []

    def see(self, weight: str, rows: Tensor, counts: Sequence[int]) -> None:
        """Take the inputs of down projections, of those that experts tell."""
        if weight == "down_proj":
            self.add(rows, counts)

    def add(self, rows: Tensor, counts: Sequence[int]) -> None:
        self._of = self._of or [RunningStatistics() for _ in counts]
        for running, own in zip(self._of, rows.split(list(counts)), strict=True):
            if len(own):
                running.add(own)

    def result(self) -> InputStatistics:
        found = [_drawn_together(running) if running.vectors else None for running in self._of]
        seen = next((each for each in found if each is not None), None)
        if seen is None:
            raise CheckpointError("no expert was asked; the weights are damaged")
        nothing = InputStatistics(*(torch.zeros_like(seen.mean_square) for _ in range(2)))
        each = [nothing if own is None else own for own in found]
        return InputStatistics(
            torch.cat([own.mean_square for own in each]), torch.cat([own.largest for own in each])
        )


def _drawn_together(running: RunningStatistics) -> InputStatistics:
    own, share = running.result(), _ALIKE_VECTORS / (running.vectors + _ALIKE_VECTORS)
    drawn = (values.lerp(values.mean(), share) for values in (own.mean_square, own.largest))
    return InputStatistics(*drawn)


class LinearInputs:
    """Statistics by name while `watching`; linears called in turn with one tensor share theirs."""

    def __init__(self) -> None:
        self._running: dict[str, RunningStatistics] = {}
        self._experts: dict[str, ExpertStatistics] = {}
        self._source_of: dict[str, str] = {}
        self._last: tuple[Tensor | None, str] = (None, "")  # kept: no other takes its place

    @contextmanager
    def watching(
        self, linears: Mapping[str, nn.Module], experts: Mapping[str, Any] = MappingProxyType({})
    ) -> Iterator[None]:
        """Watch `linears`, and `quant.experts.QuantizedExperts`, whose weights have the names
        `gate_up_proj` and `down_proj` below theirs; all experts share what the first ones see.
        """
        watched = {**linears, **{f"{name}.gate_up_proj": own for name, own in experts.items()}}
        handles = [
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: self._see(name, inputs[0])
            )
            for name, module in watched.items()
        ]
        for name, own in experts.items():
            statistics = self._experts.setdefault(f"{name}.down_proj", ExpertStatistics())
            own.seen = statistics.see
        try:
            yield
        finally:
            self._last = (None, "")
            for handle in handles:
                handle.remove()
            for own in experts.values():
                own.seen = None

    def _see(self, name: str, inputs: Tensor) -> None:
        if inputs is not self._last[0]:
            self._last = (inputs, name)
            self._running.setdefault(name, RunningStatistics()).add(inputs)
        self._source_of[name] = self._last[1]

    def results(self) -> dict[str, InputStatistics]:
        found: dict[str, InputStatistics] = {}
        all_running: dict[str, RunningStatistics | ExpertStatistics] = {}
        for name, running in (all_running | self._running | self._experts).items():
            try:
                found[name] = running.result()
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}") from error
        sources = self._source_of | {name: name for name in self._experts}
        return {name: found[source] for name, source in sources.items()}


class LargestKeys:
    def __init__(self) -> None:
        self._largest: Tensor | None = None

    def see(self, keys: Tensor) -> None:
        own = keys.detach().float().abs().amax(0).cpu()
        self._largest = own if self._largest is None else torch.maximum(self._largest, own)

    def result(self) -> Tensor:
        """What was seen; nothing, `[0, 0]`, of a layer without keys of its own."""
        if self._largest is None:
            return torch.zeros(0, 0)
        if not bool(self._largest.isfinite().all()):
            raise CheckpointError("its keys are not finite; the weights are damaged")
        return self._largest


_FIELDS = ("mean_square", "largest")


@dataclass(frozen=True, eq=False)
class Importance:
    """Statistics of all layers of a model; `seen` says of what, `shape` has the fingerprint."""

    layers: tuple[LayerImportance, ...]
    seen: str
    shape: str

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for layer in self.layers:
            digest.update(digest_of_inputs(layer.inputs).encode())
            digest.update(_bytes(layer.keys))
        return digest.hexdigest()[:FINGERPRINT_HEX]


def digest_of_inputs(inputs: Mapping[str, InputStatistics]) -> str:
    digest = hashlib.sha256()
    for name, own in sorted(inputs.items()):
        digest.update(f"{name} {len(own.mean_square)} ".encode())
        digest.update(_bytes(own.mean_square) + _bytes(own.largest))
    return digest.hexdigest()


def save_importance(path: Path, importance: Importance) -> None:
    tensors: dict[str, Tensor] = {}
    shared: list[dict[str, str]] = []
    for index, layer in enumerate(importance.layers):
        sources: dict[int, str] = {}
        shared.append({})
        for name, own in layer.inputs.items():
            source = sources.setdefault(id(own), name)
            shared[-1][name] = source
            if source == name:
                for field in _FIELDS:
                    tensors[f"{index}.{name}.{field}"] = getattr(own, field).contiguous()
        tensors[f"{index}.keys"] = layer.keys.contiguous()
    notes = {
        FORMAT: FORMAT_NOW,
        SEEN: importance.seen,
        SHAPE: importance.shape,
        FINGERPRINT: importance.fingerprint,
        SHARED: json.dumps(shared),
    }
    try:
        write_whole(path, save(tensors, notes))
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise InputError(
            f"cannot write {path} ({error}); name a file in a folder that can be written"
        ) from error


def load_importance(path: Path) -> Importance:
    """Read a file; CheckpointError names tensor and remedy of what is missing, wrong or changed."""
    told = read_importance_header(path)
    try:
        with safe_open(path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {REMEDY}") from error
    layers = tuple(_layers(path, tensors, told.shared))
    found = Importance(layers, told.seen, told.shape)
    if found.fingerprint != told.fingerprint:
        raise CheckpointError(
            f"{path} is damaged: its numbers have fingerprint {found.fingerprint}, not "
            f"{told.fingerprint}; {REMEDY}"
        )
    return found


def _layers(
    path: Path, tensors: Mapping[str, Tensor], shared: Sequence[Mapping[str, str]]
) -> Iterator[LayerImportance]:
    for index, sources in enumerate(shared):
        owners = sorted(set(sources.values()))
        own = {
            name: InputStatistics(
                *(_tensor(path, tensors, f"{index}.{name}.{field}", 1) for field in _FIELDS)
            )
            for name in owners
        }
        for name, found in own.items():
            if found.mean_square.shape != found.largest.shape:
                raise CheckpointError(
                    f"{path}: {index}.{name} has {len(found.mean_square)} mean squares and "
                    f"{len(found.largest)} largest values; {REMEDY}"
                )
        inputs = {name: own[source] for name, source in sources.items()}
        yield LayerImportance(inputs, _tensor(path, tensors, f"{index}.keys", 2))


def _tensor(path: Path, tensors: Mapping[str, Tensor], name: str, dimensions: int) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{path} has no tensor {name}; {REMEDY}")
    if tensor.dtype != torch.float32 or tensor.dim() != dimensions:
        raise CheckpointError(
            f"{path}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, not float32 of "
            f"{dimensions} dimension{'s' * (dimensions > 1)}; {REMEDY}"
        )
    if not bool(tensor.isfinite().all()) or bool((tensor < 0).any()):
        raise CheckpointError(f"{path}: tensor {name} has negative or infinite values; {REMEDY}")
    return tensor


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


_KEPT_FILES = 64
"""Most files kept, the ones used last: a 70B model has 30 MB."""


def keep_file(folder: Path, path: Path, importance: Importance) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create {folder} ({error.strerror})") from error
    save_importance(path, importance)
    with suppress(OSError):
        files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda each: each.stat().st_mtime_ns)
        for old in files[:-_KEPT_FILES]:
            old.unlink(missing_ok=True)
