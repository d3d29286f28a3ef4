"""The kernel classes of all backends, and the self-test before their first use on a machine."""

from __future__ import annotations

import functools
import warnings
from importlib import import_module

import torch

from quant.backends.base import PackedWeight
from quant.backends.table import KERNEL_RULES, fallback_rule


def _kernel_class(path: str) -> type[PackedWeight]:
    module, _, name = path.rpartition(".")
    found: type[PackedWeight] = getattr(import_module(f"quant.backends.{module}"), name)
    return found


BACKENDS = {rule.name: _kernel_class(rule.kernel) for rule in KERNEL_RULES if rule.kernel}
"""The kernel class of each backend by its name; `plain` has none, it is `nn.Linear`."""

_STAND_INS = {rule.name: rule.stand_in for rule in KERNEL_RULES}

_TEST_SHAPE = (192, 256)
_TEST_TOKENS = (1, 3, 7, 12, 20, 33, 130)
_TOLERANCE = 0.03
"""Largest relative error (Frobenius norm) of a product. Rounding activations to 8 bit costs 0.009
on normal values, bfloat16 0.004; a kernel that misreads a scale, a zero or a code is beyond 0.1."""


@functools.cache
def usable_backend(
    name: str, bits: int, dtype: torch.dtype, device: torch.device
) -> type[PackedWeight]:
    """Return the backend or, warning, the one in its place if it fails its self-test (once per
    process, type and device); DeviceError if a package is missing.
    """
    backend, last = BACKENDS[name], fallback_rule(bits).name
    complaint = None if name == last else self_test(backend, dtype, device)
    if complaint is None:
        return backend
    fallback = _STAND_INS.get(name) or last
    warnings.warn(
        f"kernel backend {name} is not usable for {dtype} on {device}: {complaint}; "
        f"{fallback} takes its place and is slower",
        RuntimeWarning,
        stacklevel=2,
    )
    return usable_backend(fallback, bits, dtype, device)


def self_test(backend: type[PackedWeight], dtype: torch.dtype, device: torch.device) -> str | None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_TEST_SHAPE, generator=generator)
    try:
        packed = backend.from_weight(weight, dtype, device)
        meant = backend.represent(weight.to(device))
        for tokens in _TEST_TOKENS:
            x = torch.randn(tokens, _TEST_SHAPE[1], generator=generator).to(device, dtype)
            wanted = x.float() @ meant.t()
            for product in packed.products(x):
                error = float((product.float() - wanted).norm() / wanted.norm())
                if not error <= _TOLERANCE:
                    return f"its product of {tokens} tokens is off by {error:.1%}"
    except (RuntimeError, AttributeError, TypeError) as error:  # no such operator, or refused
        return f"{type(error).__name__}: {error}"
    return None
