"""Mean Kullback-Leibler divergence on a text: how far quantization moves predictions.

Unlike a difference of perplexities it cannot be negative and does not depend on which tokens really
came, so it tells apart what perplexity on a short text cannot.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actors.stage.layer_stream import LayerStream, compute_on, stream_layers
from llmpq.quality.scoring import Subject
from llmpq.quality.text_windows import Windows


class Divergence:
    """Divergence of subjects from `reference`, whose log-probabilities `[tokens, vocabulary]` it
    keeps.
    """

    def __init__(self, checkpoint: Path, windows: Windows, reference: Subject) -> None:
        self._checkpoint = checkpoint
        self._windows = windows
        self._expected = self._log_probabilities(reference)
        self._weights = self._expected.exp()

    def nats_per_token(self, subject: Subject) -> float:
        """Mean over all tokens of sum p log(p / q), p being the reference's probabilities."""
        apart = self._expected - self._log_probabilities(subject)
        return float((self._weights * apart).sum(-1).double().mean())

    def _log_probabilities(self, subject: Subject) -> Tensor:
        stream = LayerStream(self._checkpoint, compute_on(torch.device("cpu"), torch.float32))
        token_ids = torch.from_numpy(self._windows.token_ids)
        *_, last = stream_layers(stream, token_ids, subject.layers)
        is_text = np.arange(token_ids.shape[1]) < self._windows.counts[:, None]
        tail = stream.tail()
        parts = [
            torch.log_softmax(tail.logits(tail.normed(row[None]))[0][torch.from_numpy(kept)], -1)
            for row, kept in zip(last.hidden, is_text, strict=True)
        ]
        return torch.cat(parts)
