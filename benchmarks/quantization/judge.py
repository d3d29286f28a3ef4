"""What rounded weights cost: perplexity, and divergence from the predictions at 16 bit.

All are judged by the same forward pass in float32, from dequantized weights, so that nothing but
rounding differs; embedding, norms and head are those of the model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actors.stage.layer_stream import LayerStream, compute_on, stream_layers
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.text_windows import Windows

_COMPUTE = compute_on(torch.device("cpu"), torch.float32)


class Judge:
    """Scores of models that differ from `model` in their decoder layers, on `windows`."""

    def __init__(self, model: Path, windows: Windows) -> None:
        self.model, self.windows = model, windows
        stream = LayerStream(model, _COMPUTE)
        self._tail = stream.tail()
        self._expected = self._normed(model)
        self._layers = stream.layers
        self.reference = self.score("16 bit", model)

    def score(self, name: str, folder: Path) -> Perplexity:
        """Perplexity of the model in `folder`, and its divergence from the first one."""
        is_reference = hasattr(self, "reference") is False
        normed = self._expected if is_reference else self._normed(folder)
        sums = np.zeros((len(normed), 2))
        for row, (own, expected) in enumerate(zip(normed, self._expected, strict=True)):
            count = int(self.windows.counts[row])
            targets = torch.from_numpy(self.windows.token_ids[row, 1:count])
            found = self._log_probabilities(own[: count - 1])
            sums[row, 0] = -float(found.gather(-1, targets[:, None]).double().sum())
            if not is_reference:
                right = self._log_probabilities(expected[: count - 1])
                sums[row, 1] = float((right.exp() * (right - found)).sum(-1).double().sum())
        return Perplexity(
            name=name,
            bitwidths=(16,) * self._layers,
            window_nll=tuple(sums[:, 0].tolist()),
            window_tokens=tuple((self.windows.counts - 1).tolist()),
            dtypes=("float32",),
            window_divergence=None if is_reference else tuple(sums[:, 1].tolist()),
        )

    def _normed(self, folder: Path) -> Tensor:
        """Hidden states `[windows, length, width]` after the final norm."""
        stream = LayerStream(folder, _COMPUTE)
        *_, last = stream_layers(stream, torch.from_numpy(self.windows.token_ids))
        return torch.cat([self._tail.normed(row[None]) for row in last.hidden])

    @torch.no_grad()
    def _log_probabilities(self, normed: Tensor) -> Tensor:
        return torch.log_softmax(self._tail.logits(normed), -1)
