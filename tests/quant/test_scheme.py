from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from quant.backends.table import KERNEL_RULES, backend_name, fallback_rule, rule_for
from quant.common.errors import SpecError
from quant.scheme import (
    BITWIDTHS,
    DTYPE_BYTES,
    LinearShape,
    Processor,
    group_size,
    rounded_group,
)

CPU = Processor()
OLD_CPU = Processor(instruction_sets=frozenset())
P100 = Processor(compute_capability=(6, 0))
V100 = Processor(compute_capability=(7, 0))
T4 = Processor(compute_capability=(7, 5))
A100 = Processor(compute_capability=(8, 0))
PROCESSORS = (CPU, OLD_CPU, P100, V100, T4, A100)


@pytest.mark.parametrize(
    ("in_features", "expected"),
    [(4096, 128), (192, 64), (96, 32), (32, 32), (100, 100), (7, 7), (1, 1), (11008, 128)],
)
def test_group_size(in_features: int, expected: int) -> None:
    assert group_size(in_features) == expected
    assert rounded_group(in_features) == (expected if in_features % 32 else 32)


@pytest.mark.parametrize(
    ("processor", "dtype", "expected"),
    [
        (CPU, "bfloat16", ("int3pack", "int4pack", "onednn_w8a8", "plain")),
        (CPU, "float32", ("torch_3bit", "torch_4bit", "onednn_w8a8", "plain")),
        (OLD_CPU, "float32", ("torch_3bit", "torch_4bit", "torch_8bit", "plain")),
        (P100, "float16", ("cuda_3bit", "bnb_nf4", "cuda_8bit", "plain")),
        (P100, "bfloat16", ("torch_3bit", "bnb_nf4", "torch_8bit", "plain")),
        (V100, "float16", ("cuda_3bit", "bnb_nf4", "cuda_8bit", "plain")),
        (V100, "float32", ("torch_3bit", "bnb_nf4", "torch_8bit", "plain")),
        (T4, "float16", ("cuda_3bit", "bnb_nf4", "cuda_w8a8", "plain")),
        (A100, "bfloat16", ("cuda_3bit", "bnb_nf4", "cuda_w8a8", "plain")),
    ],
)
def test_backend_of_each_device(
    processor: Processor, dtype: str, expected: tuple[str, ...]
) -> None:
    assert tuple(backend_name(processor, bits, dtype) for bits in (3, 4, 8, 16)) == expected


@pytest.mark.parametrize(
    ("processor", "dtype", "rows", "expected"),
    [
        (V100, "float16", 3, "bnb_nf4"),  # which multiplies so few rows packed itself
        (V100, "float16", 4, "cuda_4bit"),
        (P100, "float16", 7, "bnb_nf4"),
        (P100, "float16", 24, "cuda_4bit"),
        (P100, "float16", 25, "bnb_nf4"),  # both restore the weight
        (V100, "float16", 128, "cuda_4bit"),
        (V100, "float16", 129, "bnb_nf4"),
        (V100, "float32", 16, "bnb_nf4"),  # ours computes in 16 bit
        (T4, "float16", 16, "bnb_nf4"),
        (T4, "float16", 65, "cuda_4bit"),
        (A100, "bfloat16", 5, "bnb_nf4"),
        (A100, "bfloat16", 6, "cuda_4bit"),
        (V100, "float16", 0, "bnb_nf4"),
    ],
)
def test_old_gpus_multiply_weights_packed_in_decode_steps_of_some_rows(
    processor: Processor, dtype: str, rows: int, expected: str
) -> None:
    assert backend_name(processor, 4, dtype, decode_rows=rows) == expected


def test_bits_per_weight() -> None:
    shape = LinearShape(in_features=4096, out_features=4096)
    sizes = {rule.name: 8 * rule.nbytes(shape, "bfloat16") for rule in KERNEL_RULES}
    rows = 16 * 4096
    assert sizes["torch_3bit"] == sizes["int3pack"] == 3.5 * shape.parameters + rows
    assert sizes["torch_4bit"] == sizes["int4pack"] == 4.5 * shape.parameters + rows
    assert sizes["torch_5bit"] == 5.5 * shape.parameters + rows
    assert sizes["torch_6bit"] == 6.5 * shape.parameters + rows
    assert sizes["bnb_nf4"] == 4.5 * shape.parameters + 8 * 64 + rows
    stored = replace(shape, stored_group=128)
    assert 8 * fallback_rule(4).nbytes(stored, "bfloat16") == 4.25 * shape.parameters
    assert (
        sizes["torch_8bit"]
        == sizes["int8pack"]
        == sizes["cuda_8bit"]
        == 8 * shape.parameters + 32 * 4096
    )
    assert sizes["cuda_w8a8"] == 8 * shape.parameters + 2 * 32 * 4096
    assert sizes["plain"] == 16 * shape.parameters


def test_fallback_never_needs_more_bytes() -> None:
    sides = (1, 7, 16, 32, 48, 64, 96, 100, 128, 192, 1000, 1024)
    for processor, dtype, bits, (rows, columns) in itertools.product(
        PROCESSORS, DTYPE_BYTES, BITWIDTHS, itertools.product(sides, sides)
    ):
        shape = LinearShape(in_features=columns, out_features=rows)
        preferred = rule_for(processor, bits, shape, dtype)
        assert fallback_rule(bits).nbytes(shape, dtype) <= preferred.nbytes(shape, dtype)


def test_odd_shape_falls_to_torch() -> None:
    odd = LinearShape(in_features=100, out_features=50)
    assert [rule_for(CPU, bits, odd, "bfloat16").name for bits in BITWIDTHS[:-1]] == [
        f"torch_{bits}bit" for bits in BITWIDTHS[:-1]
    ]
    assert rule_for(CPU, 4, odd, "bfloat16", "int4pack").name == "torch_4bit"


def test_cpu_without_vnni_multiplies_bfloat16_by_weights_of_8_bits() -> None:
    assert backend_name(OLD_CPU, 8, "bfloat16") == "int8pack"
    assert rule_for(CPU, 8, LinearShape(64, 72), "bfloat16").name == "int8pack"  # no whole tiles


@pytest.mark.parametrize(
    ("bits", "dtype", "backend", "message"),
    [
        (7, "bfloat16", None, "bitwidth 7 is not one of 3, 4, 5, 6, 8, 16"),
        (4, "int8", None, "compute type 'int8'"),
        (4, "bfloat16", "onednn_w8a8", "choose one of int4pack, bnb_nf4, cuda_4bit, torch_4bit"),
    ],
)
def test_impossible_combinations(bits: int, dtype: str, backend: str | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        rule_for(CPU, bits, LinearShape(64, 64), dtype, backend)
