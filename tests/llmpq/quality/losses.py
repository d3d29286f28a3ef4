"""A text of random ids, and the loss on it by transformers."""

from __future__ import annotations

from typing import Any

import torch

from llmpq.quality.text_windows import Windows
from tests.actors.configs import VOCABULARY


def token_text(count: int = 131) -> list[int]:
    """Random token ids; 131 make 5 windows of 24 and a rest of 11."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def by_transformers(model: Any, windows: Windows) -> float:
    """Mean loss per token, from the library's forward with labels, window by window."""
    nats = 0.0
    for row, count in zip(windows.token_ids, windows.counts, strict=True):
        ids = torch.from_numpy(row[:count])[None]
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        nats += float(loss) * (len(ids[0]) - 1)
    return nats / windows.scored
