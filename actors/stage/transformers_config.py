"""The configuration of a model as transformers reads it, and whether it can build the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from actors.stage.partial_model import empty_model
from planner.model.config_check import DTYPE_KEYS
from planner.model.stored_weights import has_own_head
from quant.checkpoint.gguf.files import settings_place
from quant.checkpoint.gptq_config import CONFIG_FILE, CONFIG_KEY
from quant.common.errors import CheckpointError
from quant.common.files import read_json_object
from quant.common.text import library_reason


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration in `folder`; raises `CheckpointError` where transformers does not take it.

    Embedding and LM head are tied only where the weights do not differ (`has_own_head`).
    """
    values = read_json_object(folder / CONFIG_FILE, "download it again", CheckpointError)
    config = config_of_values(values, settings_place(folder, CONFIG_FILE))
    config.name_or_path = str(folder)
    if getattr(config, "tie_word_embeddings", False) and has_own_head(folder, config.model_type):
        config.tie_word_embeddings = False
    return config


def config_of_values(values: Mapping[str, Any], place: str = CONFIG_FILE) -> PretrainedConfig:
    """The configuration of a parsed `config.json`, without how its weights are stored; messages
    call it `place`. Types may be written as torch shows them, `torch.bfloat16`.
    """
    kept = {k: v for k, v in values.items() if k not in (CONFIG_KEY, "names")}
    for key in kept.keys() & DTYPE_KEYS:
        kept[key] = kept[key] and str(kept[key]).removeprefix("torch.")
    with _named(place):
        return AutoConfig.for_model(**kept)


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """`config` with another number of `layers`."""
    values = config.to_dict() | {"num_hidden_layers": layers}
    if values.get("layer_types"):  # one for each layer: sliding windows or not
        values["layer_types"] = (values["layer_types"] * layers)[:layers]
    return type(config).from_dict(values)


def check_transformers_builds(folder: Path) -> None:
    """Build a model of one layer from the configuration in `folder`, without memory.

    Raises `CheckpointError` where transformers cannot.
    """
    config = read_config(folder)
    with _named(settings_place(folder, CONFIG_FILE)):
        empty_model(with_layers(config, 1))


@contextmanager
def _named(file: str) -> Iterator[None]:
    try:
        yield
    # Transformers raises anything at values that it did not foresee: errors of its own checks, of
    # torch's, of arithmetic and of types. The fault is in the values.
    except Exception as error:
        raise CheckpointError(
            f"{file}: transformers cannot build the model that it describes "
            f"({library_reason(error)}); mend it, or download it again"
        ) from error
