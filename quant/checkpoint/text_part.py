"""The text model within the configuration of one that takes images or sound too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quant.common.errors import SpecError

TEXT_SECTION = "text_config"
TIED_KEY = "tie_word_embeddings"


@dataclass(frozen=True)
class Wrapper:
    """`text_types`: of the text models that it may have, first the one where none is named; `ties`:
    whether embedding and head are one where its configuration does not say.
    """

    text_types: tuple[str, ...]
    ties: bool = True


WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(("gemma3_text",)),
    "gemma4": Wrapper(("gemma4_text",)),
    "gemma4_unified": Wrapper(("gemma4_unified_text",)),
    "mistral3": Wrapper(("mistral", "ministral3", "mistral4")),
    "qwen3_5": Wrapper(("qwen3_5_text",), ties=False),
    "qwen3_5_moe": Wrapper(("qwen3_5_moe_text",), ties=False),
}
"""Models by `model_type` of which the text part is run."""

SHARED_KEYS = ("quantization_config", "compression_config", "dtype", "torch_dtype", "eos_token_id")
"""Entries beside `text_config` that count for the text model where it has none of its own."""


def wrapper_of(values: Mapping[str, Any]) -> Wrapper | None:
    """What wraps the text model of a parsed `config.json`; None: it is one itself."""
    model_type = values.get("model_type")
    return WRAPPERS.get(model_type) if isinstance(model_type, str) else None


def text_entries(values: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """The entries of the text model of a parsed `config.json`, itself where nothing wraps it.

    Raises SpecError naming `place` for a text model that its wrapper cannot have.
    """
    wrapper = wrapper_of(values)
    if wrapper is None:
        return values
    own = values.get(TEXT_SECTION)
    if not isinstance(own, Mapping):
        raise SpecError(
            f"{place}: {TEXT_SECTION} is {own!r:.60}; a {values['model_type']} model needs an "
            "object there, with the entries of its text model: download the file again"
        )
    kept = {key: values[key] for key in SHARED_KEYS if values.get(key) is not None} | dict(own)
    # As transformers, which ties by the outer configuration whatever that of the text says.
    kept[TIED_KEY] = values.get(TIED_KEY, wrapper.ties)
    text_type = kept.setdefault("model_type", wrapper.text_types[0])
    if text_type not in wrapper.text_types:
        raise SpecError(
            f"{place}: {TEXT_SECTION}.model_type is {text_type!r:.60}; the text model of a "
            f"{values['model_type']} model that is run: {' or '.join(wrapper.text_types)}"
        )
    return kept
