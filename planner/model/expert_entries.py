"""Reading the entries of a `config.json` about experts."""

from __future__ import annotations

from typing import Any

from planner.model.config_file import ConfigFile
from planner.model.family import ConfigKeys, RotaryKeys, UnusedEntries
from planner.model.layer_parts import Experts

_COUNT = ("num_experts", "num_local_experts")
_ASKED = "num_experts_per_tok"
_OF_OTHERS = ("n_routed_experts", "moe_num_experts")
"""How other families call the number of experts."""


def says_experts(config: ConfigFile, is_known: bool) -> bool:
    """Whether a file is of a model with experts: by their number, and of a family that is not known
    by its name too.
    """
    counts = (config.integer(key, default=0) for key in (*_COUNT, *_OF_OTHERS))
    by_name = not is_known and "moe" in str(config.values["model_type"])
    return by_name or any(count > 1 for count in counts)


def experts_of(
    config: ConfigFile, width_key: str, count_keys: tuple[str, ...] = _COUNT, **own: Any
) -> Experts:
    """Read how many experts there are, how many a token asks, and their width."""
    refuse_nulls(config, *count_keys)
    count, per_token = config.size(*count_keys), config.size(_ASKED)
    if per_token > count:
        key = next(key for key in count_keys if config.values.get(key) is not None)
        raise config.refusal(_ASKED, per_token, f"at most {count} ({key})")
    return Experts(count, per_token, config.size(width_key), **own)


def refuse_nulls(config: ConfigFile, *keys: str) -> None:
    """Raise SpecError where one of `keys` is there without a value, as transformers does."""
    for key in keys:
        if config.values.get(key, 0) is None:
            raise config.refusal(key, None, "a whole number, or left out")


def expert_keys(
    *flags: str,
    share: float | None = None,
    decimals: tuple[str, ...] = (),
    counts: tuple[str, ...] = (),
) -> ConfigKeys:
    """The entries of a family with experts; `share` of a head is rotated, None: all of it."""
    return ConfigKeys(
        rotary=RotaryKeys(default_share=share),
        unused=UnusedEntries(
            flags=("use_cache", "output_router_logits", *flags),
            decimals=("router_aux_loss_coef", *decimals),
            counts=counts,
        ),
    )
