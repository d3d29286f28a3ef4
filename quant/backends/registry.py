"""The table of backends, and the self-test that each passes before its first use on a machine."""

from __future__ import annotations

import functools
import warnings

import torch

from quant.backends.base import PackedWeight
from quant.backends.bnb import BnbInt8, BnbNf4
from quant.backends.cpu.int3pack import Int3Pack
from quant.backends.cpu.int4pack import Int4Pack
from quant.backends.cpu.int8pack import Int8Pack
from quant.backends.cpu.onednn_w8a8 import OneDnnW8A8
from quant.backends.cuda.packed import Cuda3Bit, Cuda4Bit, Cuda8Bit
from quant.backends.portable.torch_3bit import Torch3Bit
from quant.backends.portable.torch_4bit import Torch4Bit
from quant.backends.portable.torch_8bit import Torch8Bit
from quant.scheme import fallback_rule

BACKENDS: dict[str, type[PackedWeight]] = {
    "int3pack": Int3Pack,
    "int4pack": Int4Pack,
    "onednn_w8a8": OneDnnW8A8,
    "int8pack": Int8Pack,
    "bnb_nf4": BnbNf4,
    "bnb_int8": BnbInt8,
    "cuda_3bit": Cuda3Bit,
    "cuda_4bit": Cuda4Bit,
    "cuda_8bit": Cuda8Bit,
    "torch_3bit": Torch3Bit,
    "torch_4bit": Torch4Bit,
    "torch_8bit": Torch8Bit,
}
"""Backend by the name of its `quant.scheme.KernelRule`; `plain` has none, it is `nn.Linear`."""

_TEST_SHAPE = (192, 256)
_TEST_TOKENS = (1, 3, 7, 33, 130)
_TOLERANCE = 0.03
"""Relative error (Frobenius norm) of a product. Rounding activations to 8 bit costs 0.009 on normal
values, bfloat16 0.004; a kernel that misreads a scale, a zero or a code is beyond 0.1."""


@functools.cache
def usable_backend(
    name: str, bits: int, dtype: torch.dtype, device: torch.device
) -> type[PackedWeight]:
    """The backend of that name or, with a warning, the pure torch one if it fails its self-test.

    Tested once per process, compute type and device. DeviceError if it needs a missing package.
    """
    backend = BACKENDS[name]
    fallback = fallback_rule(bits).name
    complaint = None if name == fallback else self_test(backend, dtype, device)
    if complaint is None:
        return backend
    warnings.warn(
        f"kernel backend {name} is not usable for {dtype} on {device}: {complaint}; "
        f"{fallback} takes its place and is slower",
        RuntimeWarning,
        stacklevel=2,
    )
    return BACKENDS[fallback]


def self_test(backend: type[PackedWeight], dtype: torch.dtype, device: torch.device) -> str | None:
    """What is wrong with a backend here, against dequantize-and-matmul; None if all is well."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_TEST_SHAPE, generator=generator)
    try:
        packed = backend.from_weight(weight, dtype, device)
        meant = backend.represent(weight.to(device))
        for tokens in _TEST_TOKENS:
            x = torch.randn(tokens, _TEST_SHAPE[1], generator=generator).to(device, dtype)
            wanted = x.float() @ meant.t()
            error = float((packed.forward(x).float() - wanted).norm() / wanted.norm())
            if not error <= _TOLERANCE:
                return f"its product of {tokens} tokens is off by {error:.1%}"
    except (RuntimeError, AttributeError, TypeError) as error:  # no such operator, or refused
        return f"{type(error).__name__}: {error}"
    return None
