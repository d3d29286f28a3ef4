"""What goes into the linears of a layer, and what each of its experts is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from actors.stage.layer_stream import LayerStream, StreamedLayer
from quant.loading.expert_tensors import FUSED, inputs_of_expert
from quant.rounding.importance import InputStatistics
from quant.rounding.indicators import AskedWeight, LayerStatistics

SQUARES_BYTES = 2 << 30
"""Most memory for matrices `[in, in]` of experts that see the text in one pass."""


@contextmanager
def observed(
    linears: Mapping[str, nn.Linear], statistics: Sequence[LayerStatistics]
) -> Iterator[dict[str, str]]:
    """Have inputs of the linears reach the statistics while it is open, equal ones once.

    Gives the name of the linear whose input stands for each one's: linears called one after
    another with the same tensor share it.
    """
    source_of: dict[str, str] = {}
    last: list[Any] = [None, ""]  # an input, kept so that no other takes its place, and its source

    def look(name: str, inputs: Tensor) -> None:
        if inputs is not last[0]:
            last[:] = [inputs, name]
            for own in statistics:
                own.observe(name, inputs)
        source_of[name] = last[1]

    handles = [
        linear.register_forward_pre_hook(lambda _, inputs, name=name: look(name, inputs[0]))
        for name, linear in linears.items()
    ]
    try:
        yield source_of
    finally:
        last[:] = [None, ""]
        for handle in handles:
            handle.remove()


class AskedExperts:
    """Shows statistics the inputs of each expert of a layer, in as many passes as `ranges`."""

    def __init__(self, layer: StreamedLayer, statistics: Sequence[LayerStatistics]) -> None:
        self._layer, self._statistics = layer, statistics
        self._experts = layer.experts
        self.asked: set[str] = set()

    def ranges(self) -> list[range]:
        """The experts that one pass each shows; all at once unless their matrices are large."""
        count = max((own.gate_up.count for own in self._experts.values()), default=0)
        size = sum(
            4 * held.shape.in_features**2
            for own in self._experts.values()
            for held in (own.gate_up, own.down)
        ) * sum(own.gathers_squares for own in self._statistics)
        at_once = max(1, SQUARES_BYTES // size) if size else max(1, count)
        return [range(at, min(at + at_once, count)) for at in range(0, count, at_once)]

    def observe_all_but_last(self) -> range:
        """Show all ranges but the last, which is returned, by passes of their own."""
        *earlier, last = self.ranges() or [range(0)]
        for own in earlier:
            with self.shown(own):
                self._layer.observe()
            for each in self._statistics:
                each.settle()
        return last

    @contextmanager
    def shown(self, shown: range) -> Iterator[None]:
        """Show the inputs of the experts `shown` while it is open, beside who is shown them yet."""
        before = {name: own.seen for name, own in self._experts.items()}
        handles = []
        for name, own in self._experts.items():
            view = _View(name, shown, self._statistics, self.asked, own.seen)
            handles.append(own.register_forward_pre_hook(view.route))
            own.seen = view.see
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for name, own in self._experts.items():
                own.seen = before[name]


class _View:
    """One module of experts: its router's weights, kept until its inputs come."""

    def __init__(
        self,
        name: str,
        shown: range,
        statistics: Sequence[LayerStatistics],
        asked: set[str],
        before: Any,
    ) -> None:
        self._name, self._shown, self._statistics = name, shown, statistics
        self._asked, self._before = asked, before
        self._counted = torch.zeros(0)

    def route(self, _: nn.Module, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
        """Note how much each expert of a token counts, in the order of `computed`."""
        index, weights = arguments[1:]
        shares = weights.float().abs()
        shares = shares * shares.sum(-1, keepdim=True)
        order = index.flatten().sort(stable=True).indices
        self._counted = shares.flatten()[order]

    def see(self, weight: str, rows: Tensor, counts: Sequence[int]) -> None:
        if self._before is not None:
            self._before(weight, rows, counts)
        parts = zip(rows.split(list(counts)), self._counted.split(list(counts)), strict=True)
        for index, (own, counted) in enumerate(parts):
            if index in self._shown and len(own):
                source = _source(self._name, index, weight)
                self._asked.add(source)
                for each in self._statistics:
                    each.observe_asked(source, own, counted)


def asked_weights(
    stream: LayerStream,
    layer: StreamedLayer,
    asked: Set[str],
    importance: Mapping[str, InputStatistics],
) -> Iterator[AskedWeight]:
    """Weights of the experts of `layer` whose inputs are among the sources `asked`, one at a time;
    `importance` of the layer's inputs, by name.

    Raises `CheckpointError` as the loading of experts does.
    """
    tokens = layer.hidden.shape[0] * layer.hidden.shape[1]
    compute, experts = stream.compute, layer.experts
    for name, tensors in stream.stored_experts(layer.index).items():
        own = experts[name]
        for fused, held in zip(FUSED, (own.gate_up, own.down), strict=True):
            parts = {f"{name}.{part}": rows for part, rows in tensors.rows_of(fused).items()}
            read = tensors.reader(fused, held.shape)
            for index in range(held.count):
                source = _source(name, index, fused)
                if source not in asked:
                    continue
                rounded_by = inputs_of_expert(
                    importance.get(f"{name}.{fused}"), index, held.shape.in_features
                )
                weight = read(index).to(compute.device, compute.dtype)
                yield AskedWeight(source, weight, parts, tokens, rounded_by)


def _source(name: str, index: int, weight: str) -> str:
    return f"{name}.{index}.{weight}"
