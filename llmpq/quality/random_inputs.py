"""Statistics of each layer's inputs from random token ids, as a stage measures them by itself."""

from __future__ import annotations

from actors.stage.importance import measure_layer, random_token_ids
from actors.stage.layer_stream import LayerStream
from quant.importance.statistics import LayerImportance


class RandomInputs:
    """A few random ids that pass through the plain layers of `stream`, one after another."""

    def __init__(self, stream: LayerStream) -> None:
        self._stream = stream
        self._hidden = stream.embed(random_token_ids(stream.config))

    def measure(self, index: int) -> LayerImportance:
        """Load layer `index`, the next one, and send the ids through; CheckpointError for inputs
        that are not finite.
        """
        return measure_layer(self._stream.layer(index, self._hidden))
