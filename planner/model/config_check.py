"""Checking entries of a `config.json` beside the model's sizes, on which the runtime relies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.model.config_file import ConfigFile, is_number
from planner.model.families.family import ConfigKeys, UnusedEntries
from planner.model.rope_check import check_rope, rope_entries
from planner.model.shape import ModelShape
from quant.common.errors import SpecError

ACTIVATIONS = frozenset({
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python",
    "gelu_python_tanh", "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish",
    "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh",
})  # fmt: skip
"""Names in `ACT2CLS` of transformers, but for the two with weights of their own (prelu, xielu)."""

DTYPE_KEYS = ("dtype", "torch_dtype")
_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", "half", "float", "double"})
_LAYER_TYPES = ("full_attention", "sliding_attention")


_MOST = 1e300


def check_values(config: ConfigFile, keys: ConfigKeys, shape: ModelShape) -> None:
    """Raise SpecError for the first entry with which the model could not be run."""
    _check_eps(config, keys.norm_eps)
    _check_activation(config, keys.activation)
    rope = rope_entries(config)
    if keys.rotary is not None:
        check_rope(config, rope, keys.rotary, shape.head_dim)
    check_end_tokens(config.values.get("eos_token_id"), shape.vocab_size, config.place, SpecError)
    _check_other_tokens(config, keys.has_padding_row, shape.vocab_size)
    _check_dtype(config)
    _check_layer_types(config, shape)
    _check_unused(config, keys.unused)


def check_end_tokens(
    value: Any, vocab_size: int, place: str, refuse: type[Exception]
) -> tuple[int, ...]:
    """Check an `eos_token_id`: a token id, a list of them, or None. Returns the ids; raises
    `refuse` where one is not in a vocabulary of `vocab_size`.
    """
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


def _check_layer_types(config: ConfigFile, shape: ModelShape) -> None:
    value = config.values.get("layer_types")
    if value is None:
        return
    known = isinstance(value, list) and all(each in _LAYER_TYPES for each in value)
    if not known or len(value) != shape.layers:
        raise config.refusal(
            "layer_types", value, f"{shape.layers} of {' and '.join(_LAYER_TYPES)}, or left out"
        )


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
