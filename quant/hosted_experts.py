"""Experts in the memory of a GPU's host, where its CPU multiplies, or from where they stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from quant.backends.base import PackedWeight
from quant.experts import ExpertWeights, QuantizedExperts
from quant.linear import HostForm


class HostedExperts(QuantizedExperts):
    """Rows of the tokens go to the host and come back, in one copy each way. Of passes of
    `streams_from` tokens the weights come instead: each is copied as it is packed, and restored on
    the device, where so many rows are multiplied by restored weights anyway.
    """

    def __init__(
        self,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        apply_gate: Callable[[Tensor], Tensor],
        form: HostForm,
    ) -> None:
        super().__init__(gate_up, down, apply_gate, form)
        # what is copied from other memory keeps the host waiting
        self.streams_from = form.streams_from if _can_stream(gate_up, down, form) else None
        if self.streams_from is not None and torch.cuda.is_available():
            gate_up.pin()
            down.pin()

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        least = self.streams_from
        if least is not None and len(hidden) >= least and not self.padded_to:
            found = self.computed(hidden, top_k_index, top_k_weights, _streamed)
            return found.to(hidden.dtype)
        index, weights, rows = _on_host(top_k_index, top_k_weights, hidden)
        out = super().forward(rows, index, weights)
        if hidden.is_cuda:
            out = out.pin_memory()
        return out.to(hidden.device, non_blocking=True)

    def rows_without_waiting(self, per_token: int) -> int:
        return 0

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, streams_from={self.streams_from}"


def _can_stream(gate_up: ExpertWeights, down: ExpertWeights, form: HostForm) -> bool:
    probes = [(held.weights[0], torch.zeros(1, held.shape.in_features)) for held in (gate_up, down)]
    return all(weight.restored_for(probe.to(form.dtype)) is not None for weight, probe in probes)


def _streamed(weight: PackedWeight, rows: Tensor) -> Tensor:
    restored = weight.restored_for(rows)
    assert restored is not None, "what cannot be restored is multiplied on the host"
    return functional.linear(rows, restored)


def _on_host(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors to the host at once, those of wider elements first, for which they wait."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    parts = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    held = torch.empty(parts.shape, dtype=torch.uint8, pin_memory=parts.is_cuda)
    held.copy_(parts, non_blocking=True)
    if parts.is_cuda:
        torch.cuda.current_stream(parts.device).synchronize()
    split = held.split([tensor.nbytes for tensor in tensors])
    return [
        part.view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(split, tensors, strict=True)
    ]
