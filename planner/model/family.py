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
    """The entries `values` of the model `name`; messages call the file `place`."""

    name: str
    values: Mapping[str, Any]
    place: str

    def refusal(self, key: str, value: Any, needed: str) -> SpecError:
        return SpecError(f"{self.place}: {key} is {shown(value)}; it must be {needed}")

    def integer(self, *keys: str, default: int | None = None) -> int:
        """Read the first of `keys` that is set, a whole number (older files have other names)."""
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
        """Read a whole number from 1 to `most`, as `integer` does."""
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
    """The value as Python writes it, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


@dataclass(frozen=True)
class Architecture:
    """Names of a family's modules in transformers, and how its layers are called.

    `decoder`: full name of the module that holds embedding and layers. Among its children are
    `layers`, the list of decoder layers; `embedding`, those that only the first stage has (the
    token embedding first); and `final`, those that only the last stage has (the final norm first).
    In a layer: `attention` (queries, keys and values, or the three fused, then the output), `mlp`
    and the two `norms`. `head_names`: names under which checkpoints store an untied LM head.
    `layer_returns_tuple`: a layer returns its hidden states in a tuple. `context_as_cache`: a
    layer passes no keyword arguments on to its attention, nothing but the KV cache.
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
    """Entries of `config.json` about rotary positions in older files.

    `theta`: the base of the frequencies. `share`: the part of a head that is rotated; a family
    with `default_share` may rotate less than all of it.
    """

    theta: str = "rope_theta"
    share: str = "partial_rotary_factor"
    default_share: float | None = None


@dataclass(frozen=True)
class UnusedEntries:
    """Entries that generation does not use, or that only change how it is done; transformers
    builds no model where they have a wrong type.

    `flags` are true or false; `shares` any number (dropout in training); `deviation` is a number
    with a decimal point; `counts` are whole numbers. With `may_be_null` shares and counts may be
    null.
    """

    flags: tuple[str, ...] = ("use_cache",)
    shares: tuple[str, ...] = ("attention_dropout",)
    deviation: str = "initializer_range"
    counts: tuple[str, ...] = ()
    may_be_null: bool = False


@dataclass(frozen=True)
class ConfigKeys:
    """Names of a family's entries in `config.json` that are checked beside the sizes.

    `activation` and `norm_eps` are None where the family has no such entry, `rotary` where its
    positions are not rotary. `has_padding_row`: the embedding is built with `pad_token_id`.
    """

    activation: str | None = "hidden_act"
    norm_eps: str | None = "rms_norm_eps"
    rotary: RotaryKeys | None = RotaryKeys()
    has_padding_row: bool = True
    unused: UnusedEntries = UnusedEntries()


@dataclass(frozen=True)
class Family:
    """A model family. `read_shape` raises SpecError for entries that are missing or impossible;
    `attention_bias` and `mlp_bias` name the entries that give linears biases, None for none.
    """

    read_shape: Callable[[ConfigFile], ModelShape]
    architecture: Architecture
    keys: ConfigKeys = ConfigKeys()
    attention_bias: str | None = None
    mlp_bias: str | None = None
