"""LoRA adapters: folders of `adapter_config.json` and `adapter_model.safetensors`, as PEFT writes
them. Configuration and header are checked without torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quant.checkpoint.stored_tensors import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    DamagedFileError,
    TensorPlace,
    read_header,
    unreadable,
)
from quant.common.errors import CheckpointError
from quant.common.files import FileIdentity, read_json_object

_PEFT_TYPE = "LORA"
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales whole weights too",
    "modules_to_save": "whole modules are not taken from an adapter",
    "trainable_token_indices": "embeddings are not taken from an adapter",
    "target_parameters": "fused experts are not taken from an adapter",
    "fan_in_fan_out": "weights are [out, in] in the models that are run",
    "lora_bias": "biases are not taken from an adapter",
    "layer_replication": "the adapter is of a model with other layers",
    "alora_invocation_tokens": "it would count for a part of the tokens alone",
    "use_qalora": "its inputs are pooled",
    "megatron_config": "its weights are cut as Megatron cuts them",
    **dict.fromkeys(
        ("arrow_config", "kasa_config", "monteclora_config", "use_bdlora", "velora_config"),
        "that variant of LoRA is not computed",
    ),
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` by which training began from another base model
(peft.tuners.lora.layer)."""

_MERGE = "merge it with peft (merge_and_unload, save_pretrained) and give that folder as --model"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_FLOATS = ("F64", "F32", "F16", "BF16")
_LISTED_CHARACTERS = 120


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to the weight `[out, in]` of one module: `scale` times the product of
    its tensors `up` `[out, rank]` and `down` `[rank, in]`.
    """

    down: str
    up: str
    rank: int
    shape: tuple[int, int]
    scale: float


class Adapter:
    """The adapter in `folder`: what it adds by `modules`, which have the names of training.
    CheckpointError names the file with a field or tensor that is missing, damaged, or not taken.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = _found(folder)
        path = self.folder / ADAPTER_CONFIG
        self._config, self._weights = _checked_config(path), self.folder / ADAPTER_WEIGHTS
        self.identities = _identities(self.folder)
        self._places = _places(self._weights)
        self.modules = dict(self._modules())
        self.ranks = {each.rank for each in self.modules.values()}

    @property
    def is_unchanged(self) -> bool:
        return self.identities == _identities(self.folder)

    def read(self, of: LowRank) -> tuple[Any, Any]:
        """Read torch's tensors `down` `[rank, in]` and `up` `[out, rank]` in float32;
        CheckpointError for values that are not finite.
        """
        return self._tensor(of.down), self._tensor(of.up)

    def check_values(self) -> None:
        """Read all tensors once; CheckpointError for values that are not finite."""
        for each in self.modules.values():
            self.read(each)

    def _tensor(self, name: str) -> Any:
        try:
            with safe_open(self._weights, framework="pt") as opened:
                tensor = opened.get_tensor(name).float()
        except (SafetensorError, RuntimeError, TypeError, OSError) as error:
            raise unreadable(self._weights, error) from error
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"tensor {name} in {self._weights} holds NaN or infinity; train or download the "
                "adapter again"
            )
        return tensor

    def _modules(self) -> Iterator[tuple[str, LowRank]]:
        parts: dict[str, dict[str, str]] = {}
        for name in self._places:
            match = _NAME.fullmatch(name)
            if match is None:
                raise CheckpointError(
                    f"{self._weights}: tensor {name:.200} is no lora_A or lora_B of a linear, "
                    f"which alone are taken; {_MERGE}"
                )
            parts.setdefault(match["module"], {})[match["part"]] = name
        if not parts:
            raise CheckpointError(f"{self._weights} has no tensors; give the adapter that was kept")
        for module, own in parts.items():
            if len(own) < 2:
                there, lacking = ("A", "B") if "A" in own else ("B", "A")
                raise CheckpointError(
                    f"{self._weights}: {module:.200} has lora_{there} but no lora_{lacking}; "
                    "download the adapter again"
                )
            yield module, self._low_rank(module, own["A"], own["B"])

    def _low_rank(self, module: str, down: str, up: str) -> LowRank:
        for name in (down, up):
            place = self._places[name]
            if len(place.shape) != 2 or 0 in place.shape or place.dtype not in _FLOATS:
                raise CheckpointError(
                    f"{self._weights}: tensor {name} is {place.dtype} {list(place.shape)}; it must "
                    "be a matrix of F32, F16 or BF16"
                )
        rank, inputs = self._places[down].shape
        outputs, other = self._places[up].shape
        planned = _by_pattern(self._config["rank_pattern"], module, self._config["r"])
        if not rank == other == planned:
            raise CheckpointError(
                f"{self._weights}: lora_A of {module} is {[rank, inputs]} and lora_B "
                f"{[outputs, other]}, but its rank by {ADAPTER_CONFIG} is {planned}; the files are "
                "of two adapters"
            )
        alpha = _by_pattern(self._config["alpha_pattern"], module, self._config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if self._config["use_rslora"] else rank)
        return LowRank(down, up, rank, (outputs, inputs), scale)


def _found(folder: str | Path) -> Path:
    path = Path(folder)
    try:
        path = path.expanduser().absolute()
        is_there, has_config = path.is_dir(), (path / ADAPTER_CONFIG).is_file()
        has_weights = (path / ADAPTER_WEIGHTS).is_file()
        other = next((each.name for each in path.glob("adapter_model*.bin")), None)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"adapter {folder!s:.200}: {error}; give the folder that holds {ADAPTER_CONFIG}"
        ) from error
    if not is_there or not has_config:
        lacks = f"holds no {ADAPTER_CONFIG}" if is_there else "is no folder here"
        raise CheckpointError(
            f"adapter {path} {lacks}; give the folder that PEFT wrote, the same on every node"
        )
    if has_weights:
        return path
    if other is not None:
        raise CheckpointError(
            f"adapter {path} holds {other}, which is not read; save it as safetensors "
            "(save_pretrained of a PEFT of today)"
        )
    raise CheckpointError(f"adapter {path} holds no {ADAPTER_WEIGHTS}; download it again")


def _identities(folder: Path) -> tuple[FileIdentity, ...]:
    try:
        return tuple(FileIdentity.of(folder / file) for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    except OSError as error:
        raise CheckpointError(f"adapter {folder} cannot be read: {error.strerror}") from error


def is_of_layer(module: str) -> bool:
    """Whether a module of training is part of a decoder layer, which has a number."""
    return re.search(r"\.\d+\.", f".{module}") is not None


def _checked_config(path: Path) -> Mapping[str, Any]:
    """The fields that say what is added, with PEFT's defaults."""
    values = read_json_object(path, "download the adapter again", CheckpointError)
    kind = values.get("peft_type")
    if kind != _PEFT_TYPE:
        raise _refused(path, "peft_type", kind, f"{_PEFT_TYPE} alone is taken")
    for field, why in _REFUSED.items():
        if values.get(field):
            raise _refused(path, field, values[field], why)
    if values.get("bias") not in (None, "none"):
        raise _refused(path, "bias", values["bias"], "biases are not taken from an adapter")
    begun = values.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        why = "the adapter is of another base model; convert it on saving (path_initial_model_..."
        raise _refused(path, "init_lora_weights", begun, f"{why}for_weight_conversion of PEFT)")
    found: dict[str, Any] = {"use_rslora": values.get("use_rslora") or False}
    if not isinstance(found["use_rslora"], bool):
        raise _refused(path, "use_rslora", found["use_rslora"], "it must be true or false")
    for field, usual in (("r", 8), ("lora_alpha", 8)):  # peft.LoraConfig
        found[field] = _number(path, field, values.get(field, usual), field == "r")
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = values.get(field) or {}
        if not isinstance(patterns, dict):
            raise _refused(path, field, patterns, "it must be an object of numbers by module")
        is_rank = field == "rank_pattern"
        found[field] = {
            key: _number(path, f"{field}.{key:.60}", value, is_rank)
            for key, value in patterns.items()
        }
        _check_patterns(path, field, found[field])
    return found


def _number(path: Path, field: str, value: object, is_rank: bool) -> float:
    kinds = (int,) if is_rank else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or (is_rank and value < 1):
        wanted = "a whole number of 1 or more" if is_rank else "a number"
        raise _refused(path, field, value, f"it must be {wanted}")
    return value


def _check_patterns(path: Path, field: str, patterns: Mapping[str, float]) -> None:
    for pattern in patterns:
        try:
            re.compile(_ending_in(pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise _refused(path, field, pattern, f"it is no pattern of names ({error})") from error


def _by_pattern(patterns: Mapping[str, float], module: str, usual: float) -> float:
    """The value for `module`, by the first pattern that it ends in (peft.utils.get_pattern_key)."""
    found = (value for key, value in patterns.items() if re.match(_ending_in(key), module))
    return next(found, usual)


def _ending_in(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _refused(path: Path, field: str, value: object, why: str) -> CheckpointError:
    shown = repr(value)[:_LISTED_CHARACTERS]
    remedy = "" if field == "peft_type" else f"; {_MERGE}"
    return CheckpointError(f"{path}: field {field} is {shown}: {why}{remedy}")


def _places(path: Path) -> Mapping[str, TensorPlace]:
    try:
        with path.open("rb") as file:
            return read_header(file).places
    except (DamagedFileError, OSError) as error:
        raise unreadable(path, error) from error
