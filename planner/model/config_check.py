"""Checking entries of a `config.json` beside the model's sizes, on which the runtime relies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.model.config_file import ConfigFile, is_number, shown
from planner.model.family import (
    FULL,
    LONG_TYPES,
    SLIDING,
    ConfigKeys,
    RotaryKeys,
    UnusedEntries,
    check_layer_types,
)
from planner.model.shape import MAX_SIZE, ModelShape
from quant.common.errors import SpecError

ACTIVATIONS = frozenset({
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python",
    "gelu_python_tanh", "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish",
    "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh",
})  # fmt: skip
"""Names in `ACT2CLS` of transformers, but for the two with weights of their own (prelu, xielu)."""

DTYPE_KEYS = ("dtype", "torch_dtype")
_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", "half", "float", "double"})

_MOST = 1e300


def check_values(config: ConfigFile, keys: ConfigKeys, shape: ModelShape) -> None:
    _check_eps(config, keys.norm_eps)
    _check_activation(config, keys.activation)
    if keys.rotary is None:
        rope_entries(config)
    elif keys.rotary.by_type:
        for entries in _entries_by_type(config):
            check_rope(config, entries, keys.rotary, shape.head_dim)
    else:
        check_rope(config, rope_entries(config), keys.rotary, shape.head_dim)
    check_end_tokens(config.values.get("eos_token_id"), shape.vocab_size, config.place, SpecError)
    _check_other_tokens(config, keys.has_padding_row, shape.vocab_size)
    _check_dtype(config)
    if (given := config.values.get("layer_types")) is not None:
        check_layer_types(config, given, keys.layer_types, shape.layers)
    _check_unused(config, keys.unused)


def check_end_tokens(
    value: Any, vocab_size: int, place: str, refuse: type[Exception]
) -> tuple[int, ...]:
    """Check an `eos_token_id` (an id, a list, None) and return the ids; raises `refuse`."""
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise refuse(
                f"{place}: eos_token_id is {value!r:.80}; it must be a token id from 0 to "
                f"{vocab_size - 1} (vocab_size - 1), or a list of them, for requests to end"
            )
    return tuple(tokens)


def _check_eps(config: ConfigFile, key: str | None) -> None:
    value = config.values.get(key, 1e-6) if key else 1e-6
    if type(value) is not float or not is_number(value, 0, 1):
        raise config.refusal(str(key), value, "a number above 0, such as 1e-06")


def _check_activation(config: ConfigFile, key: str | None) -> None:
    value = config.values.get(key, "silu") if key else "silu"
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise config.refusal(str(key), value, f"one of {', '.join(sorted(ACTIVATIONS))}")


def _check_other_tokens(config: ConfigFile, has_padding_row: bool, vocab_size: int) -> None:
    """Check ids that may have any value where nothing is looked up with them: many are -1."""
    for key in ("bos_token_id", "pad_token_id"):
        value = config.values.get(key)
        if value is not None and type(value) is not int:
            raise config.refusal(key, value, "a token id or null")
    pad = config.values.get("pad_token_id")
    if has_padding_row and pad is not None and not -vocab_size <= pad < vocab_size:
        raise config.refusal(
            "pad_token_id", pad, f"below the vocabulary's size of {vocab_size}, or null"
        )


def _check_dtype(config: ConfigFile) -> None:
    for key in DTYPE_KEYS:
        value = config.values.get(key)
        if value is not None and str(value).removeprefix("torch.") not in _DTYPES:
            raise config.refusal(key, value, "float16, bfloat16 or float32, or left out")


def _check_unused(config: ConfigFile, unused: UnusedEntries) -> None:
    for key in unused.flags:
        config.flag(key, False)
    for key in unused.shares:
        value = config.values.get(key, 0.0)
        is_missing = value is None and unused.may_be_null
        if not is_missing and not is_number(value, -_MOST, _MOST):
            raise config.refusal(key, value, "a number such as 0.0, or left out")
    value = config.values.get(unused.deviation, 0.02)
    if type(value) is not float or not is_number(value, -1e-9, 1):
        raise config.refusal(unused.deviation, value, "a number from 0.0 to 1.0, or left out")
    for key in unused.decimals:
        value = config.values.get(key, 0.0)
        if type(value) is not float or not is_number(value, -_MOST, _MOST):
            raise config.refusal(key, value, "a number with a decimal point, or left out")
    _check_labels(config)
    for key in unused.counts:
        count = config.values.get(key, 1)
        is_missing = count is None and unused.may_be_null
        if not is_missing and type(count) is not int:
            raise config.refusal(key, count, "a whole number, or left out")


def _check_labels(config: ConfigFile) -> None:
    labels = config.values.get("id2label")
    labels = {} if labels is None else labels
    if not isinstance(labels, Mapping) or not all(key.isdecimal() for key in labels):
        raise config.refusal("id2label", labels, "an object of names by number, or left out")


ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
"""The `ROPE_INIT_FUNCTIONS` of transformers with which a token's frequencies depend only on its
position: longrope (`LONG_TYPES`) changes them with the longest request of a batch."""

_DEFAULT_THETA = 10_000.0
_MOST_ROPE = 1e12
"""The largest value of these numbers, whose powers and products stay finite."""

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
}
_OFF_AT_ZERO = ("mscale", "mscale_all_dim")
_WITH_LENGTH = ("llama3", "yarn")
"""Types with an entry for the length with which the model was first trained."""

_STRETCHING = ("linear", "yarn")
_LENGTH = "original_max_position_embeddings"

Entries = tuple[str, Mapping[str, Any]]
"""The key under which the entries stand, and the entries."""


def check_rope(config: ConfigFile, entries: Entries, keys: RotaryKeys, head_dim: int) -> None:
    """Raise SpecError for rotary entries with which heads of `head_dim` cannot be computed."""
    key, parameters = entries
    rope_type = _rope_type(config, entries, keys.types or ROPE_TYPES)
    _check_theta(config, entries, keys.theta)
    for name in _NEEDED.get(rope_type, ()):
        if not is_number(parameters.get(name), 0, _MOST_ROPE):
            raise config.refusal(f"{key}.{name}", parameters.get(name), "a number above 0")
    for name in _OPTIONAL.get(rope_type, ()):
        value = parameters.get(name)
        is_off = value is None or (name in _OFF_AT_ZERO and value == 0)
        if not is_off and not is_number(value, 0, _MOST_ROPE):
            raise config.refusal(f"{key}.{name}", value, "a number above 0, or left out")
    if rope_type in _WITH_LENGTH:
        _check_original_length(config, key, parameters)
    if rope_type == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise SpecError(
            f"{config.entry(key)}.low_freq_factor is {parameters['low_freq_factor']}; it must "
            f"be below high_freq_factor, {parameters['high_freq_factor']}"
        )
    width = _check_width(config, entries, keys, head_dim)
    if rope_type in LONG_TYPES:
        _check_long(config, entries, width // 2)


def rope_entries(config: ConfigFile) -> Entries:
    """Find rotary entries as transformers 5 does; older `rope_scaling` goes before the newer."""
    for key in ("rope_scaling", "rope_parameters"):
        value = config.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise config.refusal(key, value, "an object or null")
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    parameters = config.values.get(key) or {}
    nested = next((name for name, value in parameters.items() if isinstance(value, Mapping)), None)
    if nested is not None:
        raise SpecError(
            f"{config.entry(key)}.{nested} is an object; {config.values['model_type']} has one "
            "set of rotary parameters for all layers: put its entries directly there"
        )
    return key, parameters


def _entries_by_type(config: ConfigFile) -> list[Entries]:
    """Entries of each type of layers, or older `rope_scaling`, which is that of full attention."""
    nested, scaling = config.values.get("rope_parameters"), config.values.get("rope_scaling")
    for key, value in (("rope_parameters", nested), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, Mapping):
            raise config.refusal(key, value, "an object or null")
    if nested is None:
        return [("rope_scaling", scaling or {})]
    if scaling is not None:
        raise config.refusal("rope_scaling", scaling, "left out beside rope_parameters")
    for name, value in nested.items():
        if name not in (FULL, SLIDING) or not (value is None or isinstance(value, Mapping)):
            needed = f"below {FULL} or {SLIDING}, an object each"
            raise config.refusal(f"rope_parameters.{name}", value, needed)
    return [(f"rope_parameters.{name}", value or {}) for name, value in nested.items()]


def reach(config: ConfigFile, positions: int) -> int:
    """Return the positions that requests may have: a stretching type multiplies them, as in vLLM
    (`_get_and_verify_max_len`), but not `dynamic`, whose frequencies then depend on the longest
    request of a batch.
    """
    _, parameters = rope_entries(config)
    rope_type = parameters.get("rope_type", parameters.get("type"))
    if rope_type not in _STRETCHING:
        return positions
    trained = positions
    if rope_type in _WITH_LENGTH:
        trained = config.values.get(_LENGTH, parameters.get(_LENGTH, positions))
    return min(max(1, int(trained * parameters["factor"])), MAX_SIZE)


def _rope_type(config: ConfigFile, entries: Entries, known: tuple[str, ...]) -> str:
    key, parameters = entries
    name = "rope_type" if "rope_type" in parameters else "type"
    value = parameters.get(name, "default")
    if value not in known:
        raise SpecError(
            f"{config.entry(key)}.{name} is {shown(value)}, which llmpq does not run; it must be "
            f"one of {', '.join(known)}"
        )
    return str(value)


def _check_theta(config: ConfigFile, entries: Entries, outer: str) -> None:
    key, parameters = entries
    if "rope_theta" in parameters:
        outer, value = f"{key}.rope_theta", parameters["rope_theta"]
    else:
        value = config.values.get(outer, _DEFAULT_THETA)
    if not is_number(value, 1, _MOST_ROPE):
        raise config.refusal(outer, value, "a number above 1, such as 10000.0")


def _check_original_length(config: ConfigFile, key: str, parameters: Mapping[str, Any]) -> None:
    for place, entries in (("", config.values), (f"{key}.", parameters)):
        if _LENGTH in entries and (type(entries[_LENGTH]) is not int or entries[_LENGTH] < 1):
            value = entries[_LENGTH]
            raise config.refusal(f"{place}{_LENGTH}", value, "a whole number of at least 1")


def _check_long(config: ConfigFile, entries: Entries, pairs: int) -> None:
    key, parameters = entries
    _check_original_length(config, key, parameters)
    for name in ("short_factor", "long_factor"):
        factors = parameters.get(name)
        is_list = isinstance(factors, list) and all(is_number(f, 0, _MOST_ROPE) for f in factors)
        if not isinstance(factors, list) or not is_list or len(factors) != pairs:
            raise config.refusal(f"{key}.{name}", factors, f"{pairs} numbers above 0")
    for name in ("factor", "attention_factor"):
        value = parameters.get(name)
        if value is not None and not is_number(value, 0, _MOST_ROPE):
            raise config.refusal(f"{key}.{name}", value, "a number above 0, or left out")


def _check_width(config: ConfigFile, entries: Entries, keys: RotaryKeys, head_dim: int) -> int:
    """Check that pairs fit into a head, all of it in most families; return elements that turn."""
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
    return width
