"""Checking the entries about rotary positions in a `config.json`, as transformers 5 reads them.

The entries are in `rope_parameters`, or, in older files, in `rope_scaling` with `rope_theta` beside
it; `rope_scaling` is used where both are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.model.config_file import ConfigFile, is_number, shown
from planner.model.families.family import RotaryKeys
from planner.model.shape import MAX_SIZE
from quant.common.errors import SpecError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
"""The `ROPE_INIT_FUNCTIONS` of transformers with which a token's frequencies depend only on its
position: longrope changes them with the longest request of a batch."""

_DEFAULT_THETA = 10_000.0
_MOST = 1e12
"""The largest value of these numbers, whose powers and products stay finite."""

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
_OFF_AT_ZERO = ("mscale", "mscale_all_dim")
_WITH_LENGTH = ("llama3", "yarn")
"""Types with an entry for the length with which the model was first trained."""

_STRETCHING = ("linear", "yarn")
_LENGTH = "original_max_position_embeddings"

Entries = tuple[str, Mapping[str, Any]]
"""The key under which the entries stand, and the entries."""


def check_rope(config: ConfigFile, entries: Entries, keys: RotaryKeys, head_dim: int) -> None:
    """Raise SpecError for an entry with which heads of `head_dim` elements cannot be computed.

    `keys`: how the family calls the entries beside `entries`.
    """
    key, parameters = entries
    rope_type = _rope_type(config, key, parameters)
    _check_theta(config, entries, keys.theta)
    for name in _NEEDED.get(rope_type, ()):
        if not is_number(parameters.get(name), 0, _MOST):
            raise config.refusal(f"{key}.{name}", parameters.get(name), "a number above 0")
    for name in _OPTIONAL.get(rope_type, ()):
        value = parameters.get(name)
        is_off = value is None or (name in _OFF_AT_ZERO and value == 0)
        if not is_off and not is_number(value, 0, _MOST):
            raise config.refusal(f"{key}.{name}", value, "a number above 0, or left out")
    if rope_type in _WITH_LENGTH:
        _check_original_length(config, key, parameters)
    if rope_type == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise SpecError(
            f"{config.place}: {key}.low_freq_factor is {parameters['low_freq_factor']}; it must be "
            f"below high_freq_factor, {parameters['high_freq_factor']}"
        )
    _check_width(config, entries, keys, head_dim)


def rope_entries(config: ConfigFile) -> Entries:
    """Find the entries about rotary positions; SpecError where they are no object."""
    for key in ("rope_scaling", "rope_parameters"):
        value = config.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise config.refusal(key, value, "an object or null")
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    parameters = config.values.get(key) or {}
    nested = next((name for name, value in parameters.items() if isinstance(value, Mapping)), None)
    if nested is not None:
        raise SpecError(
            f"{config.place}: {key}.{nested} is an object; {config.values['model_type']} has one "
            "set of rotary parameters for all layers: put its entries directly there"
        )
    return key, parameters


def reach(config: ConfigFile, positions: int) -> int:
    """The positions that requests may have, of the `positions` in a checked configuration.

    Types that stretch them by a factor reach so much further, as in vLLM
    (`_get_and_verify_max_len`). `dynamic` does not here: beyond `positions` its frequencies depend
    on the longest request of a batch.
    """
    key, parameters = rope_entries(config)
    rope_type = _rope_type(config, key, parameters)
    if rope_type not in _STRETCHING:
        return positions
    trained = positions
    if rope_type in _WITH_LENGTH:
        trained = config.values.get(_LENGTH, parameters.get(_LENGTH, positions))
    return min(max(1, int(trained * parameters["factor"])), MAX_SIZE)


def _rope_type(config: ConfigFile, key: str, parameters: Mapping[str, Any]) -> str:
    name = "rope_type" if "rope_type" in parameters else "type"
    value = parameters.get(name, "default")
    if value not in ROPE_TYPES:
        raise SpecError(
            f"{config.place}: {key}.{name} is {shown(value)}, which llmpq does not run; it must be "
            f"one of {', '.join(ROPE_TYPES)}"
        )
    return str(value)


def _check_theta(config: ConfigFile, entries: Entries, outer: str) -> None:
    key, parameters = entries
    if "rope_theta" in parameters:
        outer, value = f"{key}.rope_theta", parameters["rope_theta"]
    else:
        value = config.values.get(outer, _DEFAULT_THETA)
    if not is_number(value, 1, _MOST):
        raise config.refusal(outer, value, "a number above 1, such as 10000.0")


def _check_original_length(config: ConfigFile, key: str, parameters: Mapping[str, Any]) -> None:
    for place, entries in (("", config.values), (f"{key}.", parameters)):
        if _LENGTH in entries and (type(entries[_LENGTH]) is not int or entries[_LENGTH] < 1):
            value = entries[_LENGTH]
            raise config.refusal(f"{place}{_LENGTH}", value, "a whole number of at least 1")


def _check_width(config: ConfigFile, entries: Entries, keys: RotaryKeys, head_dim: int) -> None:
    """Check that pairs of rotated elements fit into a head, and are all of it in most families."""
    key, parameters = entries
    is_partial = keys.default_share is not None
    outer, name = keys.share, "partial_rotary_factor"
    if name in parameters:
        outer, share = f"{key}.{name}", parameters[name]
    else:
        share = config.values.get(outer, keys.default_share)
    if is_partial:
        if not is_number(share, 0, 1) or int(head_dim * share) < 1:
            raise config.refusal(outer, share, f"such a share of {head_dim} elements, at most 1")
    elif share is not None and share != 1:
        raise config.refusal(outer, share, f"1 for {config.values['model_type']}, or left out")
    width = int(head_dim * share) if is_partial else head_dim
    if width + width % 2 > head_dim:
        raise SpecError(
            f"{config.place}: the head size (head_dim, or hidden_size over num_attention_heads) is "
            f"{head_dim}; with rotary positions it must be even"
        )
