"""LoRA adapters beside the weights of a stage: what each request's adapter adds to the linears that
compute its tokens, whatever kernels hold their weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from actors.messages import Admission, MicroBatch
from actors.stage.ranks import Summed
from planner.adapters import adapter_folders, in_layers
from planner.model.shape import ModelShape
from quant.backends.base import copy_of
from quant.checkpoint.adapter import Adapter
from quant.common.errors import CheckpointError
from quant.linear import LayerForm
from quant.loading.layer_load import LayerLoad
from quant.scheme import COLUMNS, ROWS, Cut

_BASE = 0
"""The number of no adapter."""


class StageAdapters(nn.Module):
    """The adapters of a stage's layers, in the compute type; `slots` requests have one each.

    `whole`: products are computed for all rows of a pass, so that no row's depends on how many
    there are.
    """

    def __init__(self, adapters: Sequence[str], slots: int, whole: bool = False) -> None:
        super().__init__()
        self.folders = adapter_folders(adapters)
        self.numbers = {name: number for number, name in enumerate(self.folders, start=1)}
        self.whole = whole
        self.rows: dict[int, Tensor] = {}
        self._of_slot = np.full(slots, _BASE, dtype=np.int64)

    def load(self, shape: ModelShape, layers: range, loads: Sequence[LayerLoad]) -> None:
        """Read what is added in the loaded `layers` of a model of this shape."""
        for name, folder in self.folders.items():
            adapter = Adapter(Path(folder))
            wanted = in_layers(adapter, shape)
            for index, load in zip(layers, loads, strict=True):
                for module, added in wanted.get(index, {}).items():
                    down, up = adapter.read(added)
                    pair = _held(down, up * added.scale, load.form, load.cuts.get(module))
                    self._added_to(load.module, index, module).put(self.numbers[name], *pair)

    def _added_to(self, layer: nn.Module, index: int, module: str) -> _Added:
        """What is added to a linear, which adds it from now on."""
        name = f"{index} {module}".replace(".", " ")
        found = self._modules.get(name)
        if found is None:
            found = _Added(self)
            self.add_module(name, found)
            linear_of(layer, module).register_forward_hook(found.add)
        assert isinstance(found, _Added)
        return found

    def admit(self, admitted: Sequence[Admission]) -> None:
        """Take in whose tokens come from now on; CheckpointError for an unknown adapter."""
        for each in admitted:
            if each.adapter and each.adapter not in self.numbers:
                raise CheckpointError(
                    f"request {each.custom_id!r:.80} asks for adapter {each.adapter!r:.80}, which "
                    "this stage has not"
                )
            self._of_slot[each.slot] = self.numbers.get(each.adapter, _BASE)

    def choose(self, number: int) -> None:
        """Have all slots compute with the adapter of this number, 0 for none."""
        self._of_slot[:] = number

    def begin(self, batch: MicroBatch, device: torch.device) -> None:
        """Find the rows of each adapter in a pass over `batch`, of which no others are changed."""
        of_row = np.repeat(self._of_slot[batch.slots], batch.counts)
        present = np.unique(of_row[of_row != _BASE]).tolist()
        self.rows = {
            number: torch.from_numpy(np.flatnonzero(of_row == number)).to(device)
            for number in present
        }


class _Added(nn.Module):
    """What the adapters add to one linear: `up` `[out, rank]` times `down` `[rank, in]`."""

    def __init__(self, owner: StageAdapters) -> None:
        super().__init__()
        self._owner = [owner]  # a list, so that it is no submodule

    def put(self, number: int, down: Tensor, up: Tensor) -> None:
        self.register_buffer(f"down_{number}", down)
        self.register_buffer(f"up_{number}", up)

    def add(self, _: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> Tensor:
        """Add to the rows of `out` `[..., out]` that have an adapter, in place."""
        (owner,), held = self._owner, self._buffers
        chosen = {number: rows for number, rows in owner.rows.items() if f"up_{number}" in held}
        if not chosen:
            return out
        inputs = arguments[0].reshape(-1, arguments[0].shape[-1])
        found = out.reshape(-1, out.shape[-1])
        for number, rows in chosen.items():
            down, up = held[f"down_{number}"], held[f"up_{number}"]
            assert down is not None, "put together"
            assert up is not None, "put together"
            own = inputs if owner.whole else inputs[rows]
            added = (own.to(down.dtype) @ down.t() @ up.t()).to(found.dtype)
            found.index_add_(0, rows, added[rows] if owner.whole else added)
        return found.view(out.shape)


def linear_of(layer: nn.Module, name: str) -> nn.Module:
    """The linear of this name in a loaded layer, below the sums over ranks."""
    found = layer
    for part in name.split("."):
        found = getattr(found, part)
        if isinstance(found, Summed):
            found = found.part
    return found


def _held(down: Tensor, up: Tensor, form: LayerForm, cut: Cut | None) -> tuple[Tensor, Tensor]:
    """The part of a pair that a rank holds, by the `cut` of the linear."""
    if cut is not None and cut.dimension == COLUMNS:
        down = down[:, cut.index[COLUMNS]]
    elif cut is not None:
        up = up[cut.index[ROWS]]
    return copy_of(down, form.dtype, form.device), copy_of(up, form.dtype, form.device)


def adapters_of(model: nn.Module) -> StageAdapters | None:
    """The adapters beside a stage's model, where it has some."""
    found: Mapping[str, nn.Module | None] = model._modules
    own = found.get(NAME)
    return own if isinstance(own, StageAdapters) else None


NAME = "adapters_beside"
