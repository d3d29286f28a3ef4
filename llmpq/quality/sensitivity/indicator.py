"""Indicators of a whole model from a calibration text, one decoder layer in memory at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from actors.stage.layer_stream import LayerStream, StreamedLayer
from llmpq.quality.perplexity import ReportProgress
from llmpq.quality.text_windows import Windows
from quant.common.errors import CheckpointError, InputError
from quant.importance.statistics import LargestKeys, LayerImportance, LinearInputs
from quant.loading.emulated_kernels import Compute
from quant.sensitivity.indicators import Indicator, LayerStatistics, Matrix

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Calibration:
    """The sequences that an indicator sees, `token_ids` `[sequences, length]`."""

    token_ids: TokenIds

    @classmethod
    def sample(cls, windows: Windows, sequences: int, seed: int) -> Calibration:
        """Draw at most `sequences` whole windows of a text by `seed`, kept in its order.

        Raises `InputError` for less than one sequence and for a negative seed.
        """
        if sequences < 1:
            raise InputError(f"sequences is {sequences}; give at least 1")
        if seed < 0:
            raise InputError(f"seed is {seed}; give at least 0")
        length = windows.token_ids.shape[1]
        whole = np.flatnonzero(windows.counts == length)
        drawn = np.random.default_rng(seed).permutation(whole)[:sequences]
        return cls(windows.token_ids[np.sort(drawn)])

    @property
    def fingerprint(self) -> str:
        """Digest of the token ids and of how they are cut."""
        shape = ",".join(map(str, self.token_ids.shape)).encode()
        content = self.token_ids.astype("<i8").tobytes()
        return hashlib.sha256(shape + b":" + content).hexdigest()[:16]


def measure_indicators(
    checkpoint: str | Path,
    token_ids: TokenIds,
    indicators: Mapping[str, Indicator],
    bitwidths: Sequence[int],
    compute: Compute,
    progress: ReportProgress | None = None,
) -> dict[str, Matrix]:
    """The indicators of `measure_with_importance` alone."""
    arguments = checkpoint, token_ids, indicators, bitwidths, compute, progress
    return measure_with_importance(*arguments)[0]


def measure_with_importance(
    checkpoint: str | Path,
    token_ids: TokenIds,
    indicators: Mapping[str, Indicator],
    bitwidths: Sequence[int],
    compute: Compute,
    progress: ReportProgress | None = None,
) -> tuple[dict[str, Matrix], list[LayerImportance]]:
    """Each indicator as `[layers, K]` by its name, and the importance of each layer, from one pass
    of the text through the model.

    `token_ids` `[sequences, length]`, without padding. Raises what `LayerStream` raises, and
    `CheckpointError` for layers whose inputs or indicators are not finite.
    """
    stream = LayerStream(checkpoint, compute)
    hidden = stream.embed(torch.from_numpy(token_ids))
    rows: dict[str, list[list[float]]] = {name: [] for name in indicators}
    importance: list[LayerImportance] = []
    for index in range(stream.layers):
        statistics = {name: indicator() for name, indicator in indicators.items()}
        try:
            found, own = _layer_rows(stream.layer(index, hidden), statistics, bitwidths)
        except CheckpointError as error:
            raise CheckpointError(f"layer {index}: {error}") from error
        importance.append(own)
        for name, row in found.items():
            rows[name].append(row)
        if progress is not None:
            progress(index + 1, stream.layers)
    return {name: np.array(matrix) for name, matrix in rows.items()}, importance


def _layer_rows(
    layer: StreamedLayer, statistics: Mapping[str, LayerStatistics], bitwidths: Sequence[int]
) -> tuple[dict[str, list[float]], LayerImportance]:
    """Send the text through the layer and the weights through every indicator.

    The layer is gone when this returns, before the next one is loaded.
    """
    inputs, keys = LinearInputs(), LargestKeys()
    with (
        _observed(layer.linears, list(statistics.values())) as source_of,
        inputs.watching(layer.linears),
    ):
        layer.advance(keys.see)
    weights = {name: linear.weight.detach() for name, linear in layer.linears.items()}
    found = {name: own.omega(weights, source_of, bitwidths) for name, own in statistics.items()}
    return found, LayerImportance(inputs.results(), keys.result())


@contextmanager
def _observed(
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
