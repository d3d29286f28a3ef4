"""Checks of what a `config.json` says beside the model's sizes, which the runtime would believe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.model.config_file import ConfigFile, is_number
from planner.model.rope import check_rope, rope_entries
from planner.model.shape import ModelShape
from quant.common.errors import SpecError

ACTIVATIONS = frozenset({
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python",
    "gelu_python_tanh", "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish",
    "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh",
})  # fmt: skip
"""Transformers' `ACT2CLS`, but for the two with weights of their own (prelu, xielu)."""

_ACTIVATION = {"bloom": None, "opt": "activation_function"}
_NORM_EPS = {"bloom": "layer_norm_epsilon", "gpt_neox": "layer_norm_eps", "opt": None}
_WITHOUT_ROPE = frozenset({"bloom", "opt"})
_WITHOUT_PADDING_ROW = frozenset({"bloom", "gpt_neox"})
"""Families whose embedding is built without `pad_token_id`."""

_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", "half", "float", "double"})
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class _Unused:
    """Entries that generation does not use, or that only change how, without whose right types
    transformers builds no model: true or false, any number (a share that is left out in training),
    and numbers with a decimal point.
    """

    flags: tuple[str, ...] = ("use_cache",)
    shares: tuple[str, ...] = ("attention_dropout",)
    deviation: str = "initializer_range"


_UNUSED: Mapping[str, _Unused] = {
    "bloom": _Unused(
        flags=("use_cache", "apply_residual_connection_post_layernorm", "slow_but_exact"),
        shares=("attention_dropout", "hidden_dropout"),
    ),
    "gpt_neox": _Unused(
        flags=("use_cache", "is_decoder", "use_parallel_residual"),
        shares=("attention_dropout", "hidden_dropout", "classifier_dropout"),
    ),
    "opt": _Unused(shares=("attention_dropout", "dropout", "layerdrop"), deviation="init_std"),
}
_MOST = 1e300


def check_values(config: ConfigFile, shape: ModelShape) -> None:
    """SpecError naming file, entry, value and remedy for the first that could not be run with."""
    family = shape.model_type
    _check_eps(config, _NORM_EPS.get(family, "rms_norm_eps"))
    _check_activation(config, _ACTIVATION.get(family, "hidden_act"))
    rope = rope_entries(config)
    if family not in _WITHOUT_ROPE:
        check_rope(config, rope, shape.head_dim)
    check_end_tokens(config.values.get("eos_token_id"), shape.vocab_size, config.place, SpecError)
    _check_other_tokens(config, shape)
    _check_dtype(config)
    _check_layer_types(config, shape)
    _check_unused(config, family)


def check_end_tokens(
    value: Any, vocab_size: int, place: str, refuse: type[Exception]
) -> tuple[int, ...]:
    """The token ids of an `eos_token_id`: one, a list or none; `refuse` where they are none of a
    vocabulary of `vocab_size`.
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


def _check_other_tokens(config: ConfigFile, shape: ModelShape) -> None:
    """Of any size where nothing is looked up with them: many configs have -1."""
    for key in ("bos_token_id", "pad_token_id"):
        value = config.values.get(key)
        if value is not None and type(value) is not int:
            raise config.refusal(key, value, "a token id or null")
    pad = config.values.get("pad_token_id")
    has_row = shape.model_type not in _WITHOUT_PADDING_ROW
    if has_row and pad is not None and not -shape.vocab_size <= pad < shape.vocab_size:
        raise config.refusal(
            "pad_token_id", pad, f"below the vocabulary's size of {shape.vocab_size}, or null"
        )


def _check_dtype(config: ConfigFile) -> None:
    for key in ("dtype", "torch_dtype"):
        value = config.values.get(key)
        if value is not None and (not isinstance(value, str) or value not in _DTYPES):
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


def _check_unused(config: ConfigFile, family: str) -> None:
    unused = _UNUSED.get(family, _Unused())
    for key in unused.flags:
        config.flag(key, False)
    for key in unused.shares:
        value = config.values.get(key, 0.0)
        may_miss = value is None and family == "llama"
        if not may_miss and not is_number(value, -_MOST, _MOST):
            raise config.refusal(key, value, "a number such as 0.0, or left out")
    value = config.values.get(unused.deviation, 0.02)
    if type(value) is not float or not is_number(value, -1e-9, 1):
        raise config.refusal(unused.deviation, value, "a number from 0.0 to 1.0, or left out")
    _check_labels(config)
    ways = config.values.get("pretraining_tp", 1)
    may_miss = ways is None and family == "llama"
    if family in ("bloom", "llama") and not may_miss and type(ways) is not int:
        raise config.refusal("pretraining_tp", ways, "a whole number, or left out")


def _check_labels(config: ConfigFile) -> None:
    labels = config.values.get("id2label")
    labels = {} if labels is None else labels
    if not isinstance(labels, Mapping) or not all(key.isdecimal() for key in labels):
        raise config.refusal("id2label", labels, "an object of names by number, or left out")
