"""The tensors that stand in place of a module's weight in a quantized checkpoint; no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quant.checkpoint.formats.tensors import (
    FLOATS,
    FORMS,
    FP4,
    INT8_SCALES,
    INTEGERS,
    NARROW_PART,
    PACKED,
    SCALED,
    SCALES,
    SIGNED4,
    STATES,
    TABLE,
    TORCHAO_PARTS,
    WHOLE_SCALES,
    Parts,
    codes_part,
    stored_part,
)
from quant.checkpoint.stored_config import (
    AWQ,
    BITSANDBYTES,
    COMPRESSED,
    FP8,
    GPTQ_METHOD,
    MODELOPT,
    TORCHAO,
    Scheme,
    StoredConfig,
    StoredLinear,
)
from quant.checkpoint.stored_methods import read_stored_config
from quant.checkpoint.stored_tensors import StoredTensor, stored_tensors

BLOCKS, NUMBERS = "blocks", "numbers"
"""Forms of GGUF files: of codes, and of what stands beside them and is rounded to their bits."""

_MARKS = {
    GPTQ_METHOD: ("qweight",),
    AWQ: ("qweight",),
    FP8: SCALES,
    COMPRESSED: ("weight_packed", "weight_scale"),
    BITSANDBYTES: (*STATES, INT8_SCALES),
    MODELOPT: ("weight_scale",),
    TORCHAO: ("_weight_qdata",),
}
"""Parts of which a module has one where it is quantized, by the method."""

_OF_INPUTS = ("pre_quant_scale", "_weight_act_pre_scale")
"""What inputs of a module are multiplied by, in ModelOpt and torchao."""

_PARTS = (
    *("qweight", "qzeros", "scales", NARROW_PART, "g_idx", "weight", "weight_packed", *SCALES),
    *("weight_zero_point", "weight_shape", "weight_g_idx", *WHOLE_SCALES, *_OF_INPUTS),
    *(INT8_SCALES, *STATES, "weight.absmax", "weight.quant_map"),
    *("weight.nested_absmax", "weight.nested_quant_map"),
)
_BESIDE = (
    *(part for part in _PARTS if part != "weight"),
    *("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale"),
    *("input_scale_ub", "weight_format", *TORCHAO_PARTS.values()),
)
"""What else a quantized module has; activations are not quantized as it says."""

_DECODED_TYPE = "F32"


@dataclass(frozen=True)
class CodedWeight:
    """The weight `[out, in]` of the module `stem`; `shape` None: not all of it is here. `linear`:
    how it is stored as integer codes, None of other numbers, which are decoded.
    """

    stem: str
    form: str
    scheme: Scheme
    shape: tuple[int, int] | None = None
    linear: StoredLinear | None = None


def coded_weights(names: Collection[str], config: StoredConfig) -> dict[str, str]:
    """The names of weights that stand for others, each with that of the tensor that tells so."""
    found = dict[str, str]()
    for mark in reversed(_MARKS[config.method]):  # where there are two, the first one tells more
        marked = (name for name in names if name.endswith(f".{mark}"))
        found |= {f"{name.removesuffix(mark)}weight": name for name in marked}
    return found


def parts_beside(weights: Iterable[str]) -> frozenset[str]:
    """Names of tensors that a model does not ask for, as the `weights` stand for them."""
    stems = [name.removesuffix("weight") for name in weights]
    return frozenset(f"{stem}{part}" for stem in stems for part in _BESIDE)


def describe(
    weight: str, config: StoredConfig, folder: Path, find: Callable[[str], StoredTensor | None]
) -> CodedWeight:
    """Tell how `weight` is stored, by tensors that `find` gives. CheckpointError names file and
    tensor where one is missing, of another type, or does not fit the others.
    """
    stem = weight.removesuffix(".weight")
    names = ((part, stored_part(stem, part, config.method)) for part in _PARTS)
    found = {part: tensor for part, name in names if (tensor := find(name)) is not None}
    form = _form(found, config)
    scheme = config.scheme_of(stem) or next(iter(config.schemes), Scheme())
    if any(tensor.shape is None for tensor in found.values()):
        return CodedWeight(stem, form, scheme)
    parts = Parts(folder, stem, found, config, scheme)
    for part in filter(parts.has, _OF_INPUTS):
        parts.refuse(part, "inputs are not multiplied by anything here")
    shape, linear = FORMS[form](parts)
    return CodedWeight(stem, form, scheme, shape, linear)


def weight_tensors(folder: Path) -> Mapping[str, StoredTensor]:
    """As `stored_tensors`, with weights as models ask for them in place of their codes."""
    tensors, config = stored_tensors(folder), read_stored_config(folder)
    if config is None or config.method not in _MARKS:
        return tensors
    marks = coded_weights(tensors, config)
    plain = {name: tensors[name] for name in tensors.keys() - parts_beside(marks)}
    for weight, mark in marks.items():
        coded = describe(weight, config, folder, tensors.get)
        file = tensors[mark].file
        plain[weight] = StoredTensor(file, _DECODED_TYPE, coded.shape, coded.linear)
    return plain


def _form(parts: Mapping[str, StoredTensor], config: StoredConfig) -> str:
    if config.method in (GPTQ_METHOD, AWQ):
        return config.method
    if any(part in parts for part in STATES):
        return TABLE
    codes = parts.get(codes_part(parts))
    if codes is not None and codes.dtype == "U8":
        return FP4
    if "weight_packed" in parts:
        return PACKED
    if codes is None or codes.dtype != "I8":
        return SCALED
    zeros = parts.get("weight_zero_point")
    has_numbers = config.method == TORCHAO and zeros is not None and zeros.dtype in FLOATS
    return SIGNED4 if has_numbers else INTEGERS
