"""Choosing the kernel backend that holds a weight on a device, without torch."""

from __future__ import annotations

from dataclasses import replace

from quant.backends.table import KERNEL_RULES, KernelRule
from quant.common.errors import SpecError
from quant.scheme import BITWIDTHS, DTYPE_BYTES, GROUP_SIZES, LinearShape, Processor

_ORDINARY_SHAPE = LinearShape(in_features=4096, out_features=4096)
"""A usual shape: hidden sizes of language models are multiples of 64."""


def rule_for(
    processor: Processor,
    bits: int,
    shape: LinearShape,
    dtype: str,
    backend: str | None = None,
    decode_rows: int = 0,
) -> KernelRule:
    """Return the rule of `backend`, or of the first that takes this weight and is not outdone in
    decode steps of `decode_rows` (0: not known); SpecError where there is none.
    """
    rules = _rules_of(bits, dtype)
    if backend is None:
        return next(
            rule
            for rule in rules
            if rule.supports(processor, shape, dtype)
            and not (rule.is_outdone and rule.is_outdone(processor, shape, dtype, decode_rows))
        )
    named = _named(rules, bits, backend)
    if not named.supports(processor, shape, dtype):
        raise SpecError(
            f"backend {backend} cannot hold a {bits}-bit weight of {shape.out_features} x "
            f"{shape.in_features} in {dtype} on {_describe(processor)}; {rules[-1].name} can"
        )
    return named


def fallback_rule(bits: int) -> KernelRule:
    return next(rule for rule in reversed(KERNEL_RULES) if rule.bits == bits)


def layer_rule(
    processor: Processor, bits: int, shape: LinearShape, dtype: str, backend: str | None = None
) -> KernelRule:
    """As `rule_for`, but where the named backend does not take the shape, that which takes every
    shape.
    """
    if backend is None:
        return rule_for(processor, bits, shape, dtype)
    named = _named(_rules_of(bits, dtype), bits, backend)
    return named if named.supports(processor, shape, dtype) else fallback_rule(bits)


def backend_name(
    processor: Processor, bits: int, dtype: str, is_stored: bool = False, decode_rows: int = 0
) -> str:
    """Name the preferred backend of ordinary shapes; `is_stored`: the checkpoint is quantized."""
    shape = replace(_ORDINARY_SHAPE, stored_group=GROUP_SIZES[0]) if is_stored else _ORDINARY_SHAPE
    return rule_for(processor, bits, shape, dtype, decode_rows=decode_rows).name


def _rules_of(bits: int, dtype: str) -> list[KernelRule]:
    if bits not in BITWIDTHS:
        raise SpecError(f"bitwidth {bits} is not one of {', '.join(map(str, BITWIDTHS))}")
    if dtype not in DTYPE_BYTES:
        raise SpecError(f"compute type {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    return [rule for rule in KERNEL_RULES if rule.bits == bits]


def _named(rules: list[KernelRule], bits: int, backend: str) -> KernelRule:
    for rule in rules:
        if rule.name == backend:
            return rule
    names = ", ".join(rule.name for rule in rules)
    raise SpecError(f"no backend {backend!r} for {bits} bits; choose one of {names}")


def _describe(processor: Processor) -> str:
    if processor.rocm_architecture is not None:
        return f"an AMD GPU ({processor.rocm_architecture})"
    if processor.compute_capability is None:
        return f"a CPU with {', '.join(sorted(processor.instruction_sets)) or 'no AVX-512'}"
    return "a GPU of compute capability {}.{}".format(*processor.compute_capability)
