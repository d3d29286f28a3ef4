"""The types that describe a model family: its configuration, shape and modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.model.config_file import ConfigFile
from planner.model.shape import ModelShape


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
        """Full name of the list of layers."""
        return f"{self.decoder}.{self.layers}"

    @property
    def base(self) -> str:
        """The base model's prefix, which checkpoints may lack."""
        return self.decoder.partition(".")[0]

    @property
    def embedding_path(self) -> str:
        """Full name of the token embedding."""
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
    """A model family, by the `model_type` of its `config.json`.

    `read_shape` raises SpecError for entries that are missing or impossible. `attention_bias` and
    `mlp_bias` are the entries that give the linears of attention and MLP biases, None where the
    family has none.
    """

    model_type: str
    read_shape: Callable[[ConfigFile], ModelShape]
    architecture: Architecture
    keys: ConfigKeys = ConfigKeys()
    attention_bias: str | None = None
    mlp_bias: str | None = None
