"""Random pipelines for timelines: stages of unlike devices, with times shaped like a roofline's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.length_distribution import FloatArray

# Half-precision TFLOP/s and memory GB/s of data sheets: T4, P100, V100, A100, H100.
DEVICES = ((65.0, 320.0), (18.7, 732.0), (125.0, 900.0), (312.0, 1555.0), (990.0, 3350.0))
_REACHED = 0.5
_LAYER_OVERHEAD_S = 1e-4


@dataclass(frozen=True, eq=False)
class RandomTimes:
    """Times of stages of these numbers of `layers` [N], each of `hidden` width with `bits` a
    weight, on devices of these rates [N]; links have `link_latency_s` and `link_bytes_per_s` [N].
    """

    layers: FloatArray
    hidden: float
    bits: float
    flops: FloatArray
    bytes_per_s: FloatArray
    link_latency_s: FloatArray
    link_bytes_per_s: FloatArray

    @property
    def stages(self) -> int:
        """Number of stages, N."""
        return len(self.layers)

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """Compute seconds of the prompts of a micro-batch [N]."""
        tokens = requests * prompt_tokens
        pairs = tokens * prompt_tokens / 2
        return self._layers_s(tokens, 4 * pairs * self.hidden, 0.0)

    def attention_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """The part of those seconds that is attention's [N]."""
        flops = 2 * requests * prompt_tokens**2 * self.hidden
        return np.asarray(self.layers * flops / self.flops)

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        """Compute seconds of a decode step [N]."""
        read = requests * (context_tokens + 1)
        return self._layers_s(requests, 0.0, 4 * read * self.hidden)

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """Seconds of the transfers behind the stages for the prompts of a micro-batch [N]."""
        sent = np.full(self.stages, 2 * requests * prompt_tokens * self.hidden)
        sent[-1] = 4 * requests
        return np.asarray(self.link_latency_s + sent / self.link_bytes_per_s)

    def decode_hop_s(self, requests: float) -> FloatArray:
        """Seconds of the transfers behind the stages for a decode step [N]."""
        return self.prefill_hop_s(requests, 1.0)

    def _layers_s(self, tokens: float, attention_flops: float, kv_bytes: float) -> FloatArray:
        weights = 12 * self.hidden**2
        products_s = 2 * tokens * weights / self.flops
        read_s = weights * self.bits / 8 / self.bytes_per_s
        attention_s = np.maximum(attention_flops / self.flops, kv_bytes / self.bytes_per_s)
        layer_s = np.maximum(products_s, read_s) + attention_s + _LAYER_OVERHEAD_S
        return np.asarray(self.layers * layer_s)


def random_times(rng: np.random.Generator, stages: int) -> RandomTimes:
    """Stages of one to three kinds of devices, balanced with errors of some tens of percent."""
    kinds = np.array(DEVICES)[rng.choice(len(DEVICES), size=int(rng.integers(1, 4)))]
    rates = kinds[rng.integers(len(kinds), size=stages)] * [[1e12, 1e9]] * _REACHED
    hidden, bits = float(rng.choice([2048, 4096, 5120, 7168, 8192])), float(rng.choice([4, 8, 16]))
    balanced = rates[:, 1] ** rng.uniform(0, 1) * rates[:, 0] ** rng.uniform(0, 0.5)
    share = balanced * rng.lognormal(0, 0.25, stages)
    layers = np.maximum(1.0, np.round(share / share.sum() * rng.integers(24, 81)))
    return RandomTimes(
        layers,
        hidden,
        bits,
        rates[:, 0],
        rates[:, 1],
        np.exp(rng.uniform(np.log(1e-5), np.log(1e-3), stages)),
        np.exp(rng.uniform(np.log(1e9), np.log(1e11), stages)),
    )
