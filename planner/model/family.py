"""The types that describe a model family, and the `config.json` from which it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.model.shape import MAX_SIZE, ModelShape
from quant.common.errors import SpecError


@dataclass(frozen=True)
class ConfigFile:
    name: str
    values: Mapping[str, Any]
    place: str

    def refusal(self, key: str, value: Any, needed: str) -> SpecError:
        return SpecError(f"{self.place}: {key} is {shown(value)}; it must be {needed}")

    def integer(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if type(value) is not int:
                raise self.refusal(key, value, "a whole number")
            return value
        if default is None:
            raise SpecError(f"{self.place}: {' or '.join(keys)} is missing")
        return default

    def size(self, *keys: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self.integer(*keys, default=default)
        if not 1 <= value <= most:
            key = next((key for key in keys if self.values.get(key) is not None), keys[0])
            raise self.refusal(key, value, f"1 to {most}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def per_head(self, width: int, heads: int) -> int:
        if heads < 1 or width % heads:
            raise SpecError(f"{self.place}: hidden size {width} cannot be split over {heads} heads")
        return width // heads


def is_number(value: Any, least: float, most: float) -> bool:
    """Whether `value` is a finite number above `least` and at most `most`."""
    if type(value) not in (int, float) or (type(value) is float and not math.isfinite(value)):
        return False
    return bool(least < value <= most)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


@dataclass(frozen=True)
class Architecture:
    """Names of a family's modules in transformers. `decoder` is the module whose children are
    `layers`, `embedding` (the first stage's, token embedding first) and `final` (the last stage's,
    final norm first). In a layer: `attention` (queries, keys, values or all fused, then output),
    `mlp`, `norms`. `head_names` are those of an untied head. `layer_returns_tuple`: hidden states
    come in a tuple; `context_as_cache`: a layer passes nothing but the KV cache on to attention.
    """

    decoder: str
    embedding: tuple[str, ...]
    final: tuple[str, ...]
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    norms: tuple[str, str]
    layers: str = "layers"
    head_names: tuple[str, ...] = ("lm_head",)
    layer_returns_tuple: bool = False
    context_as_cache: bool = False

    @property
    def layers_path(self) -> str:
        return f"{self.decoder}.{self.layers}"

    @property
    def base(self) -> str:
        """The base model's prefix, which checkpoints may lack."""
        return self.decoder.partition(".")[0]

    @property
    def embedding_path(self) -> str:
        return f"{self.decoder}.{self.embedding[0]}"


@dataclass(frozen=True)
class RotaryKeys:
    """Entries about rotary positions in older files; `share` of a head is rotated, or
    `default_share`.
    """

    theta: str = "rope_theta"
    share: str = "partial_rotary_factor"
    default_share: float | None = None


@dataclass(frozen=True)
class UnusedEntries:
    """Entries that generation does not use, but of whose wrong types transformers builds no model:
    `flags`, `shares` (any number), `deviation` (with a decimal point), whole `counts`.
    """

    flags: tuple[str, ...] = ("use_cache",)
    shares: tuple[str, ...] = ("attention_dropout",)
    deviation: str = "initializer_range"
    counts: tuple[str, ...] = ()
    may_be_null: bool = False


@dataclass(frozen=True)
class ConfigKeys:
    """Entries checked beside the sizes; None where the family has none. `has_padding_row`: the
    embedding is built with `pad_token_id`.
    """

    activation: str | None = "hidden_act"
    norm_eps: str | None = "rms_norm_eps"
    rotary: RotaryKeys | None = RotaryKeys()
    has_padding_row: bool = True
    unused: UnusedEntries = UnusedEntries()


@dataclass(frozen=True)
class Family:
    """`read_shape` raises SpecError; `attention_bias` and `mlp_bias` are entries, None for none."""

    read_shape: Callable[[ConfigFile], ModelShape]
    architecture: Architecture
    keys: ConfigKeys = ConfigKeys()
    attention_bias: str | None = None
    mlp_bias: str | None = None
