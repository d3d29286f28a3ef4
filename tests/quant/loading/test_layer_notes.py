"""Who asks is told of every layer that is loaded, in the thread that loads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from actors.stage.layer_stream import LayerStream, compute_on
from quant.loading.loader import note_layer, noting_layers
from tests.actors.configs import CONFIGS
from tests.actors.models import save_tiny


def test_layers_are_noted_as_they_are_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny(folder, CONFIGS["llama"])
    stream = LayerStream(folder, compute_on(torch.device("cpu"), torch.float32))
    hidden = stream.embed(torch.zeros(1, 4, dtype=torch.int64))
    seen: list[int] = []
    with noting_layers(lambda: seen.append(1)):
        for index in range(stream.layers):
            assert len(seen) == index
            stream.layer(index, hidden)
    stream.layer(0, hidden)  # nobody asks any more
    assert len(seen) == stream.layers


def test_other_threads_and_an_error_leave_it_alone() -> None:
    seen: list[int] = []

    def fails() -> None:
        with noting_layers(lambda: seen.append(1)):
            other = threading.Thread(target=note_layer)
            other.start()
            other.join()
            raise ValueError("unusable weights")

    with pytest.raises(ValueError, match="unusable"):
        fails()
    note_layer()
    assert seen == []
