"""Experts with other bits than their layer, and in the host's memory, against the same ones where
their layer lies.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quant.backends.base import PackedWeight
from quant.backends.cpu.int4_layout import layout_is_known
from quant.backends.kernel_classes import BACKENDS
from quant.backends.table import HOST_BACKENDS, KERNEL_RULES
from quant.checkpoint.reader import Checkpoint
from quant.hosted_experts import HostedExperts
from quant.linear import HostForm, LayerForm
from quant.loading.cache_folder import ShardCache
from quant.loading.layer_load import LayerLoad
from quant.loading.loader import load_layer
from tests.quant.loading.test_expert_loading import (
    CPU,
    HERE,
    HIDDEN,
    OSS,
    PREFIX,
    QWEN,
    Layer,
    empty,
    filled,
    load,
    represented,
    stored,
)


@pytest.mark.parametrize(
    "name", [*HOST_BACKENDS.values(), "torch_3bit", "torch_4bit", "torch_8bit"]
)
def test_what_a_weight_is_restored_to_is_what_it_stands_for(name: str) -> None:
    backend: type[PackedWeight] = BACKENDS[name]
    weight, x = torch.randn(128, 256), torch.empty(1, 256)
    packed = backend.from_weight(weight, torch.bfloat16, CPU)
    restored = packed.restored_for(x)
    if name in ("int3pack", "int4pack") and not layout_is_known():  # on CPUs without AVX-512
        assert restored is None
        return
    assert restored is not None
    assert torch.allclose(restored, backend.represent(weight), rtol=1e-5, atol=1e-6)
    assert packed.restored_for(x.half()).dtype == torch.float16  # type: ignore[union-attr]


def test_layouts_of_libraries_are_not_restored_elsewhere() -> None:
    named = {rule.name for rule in KERNEL_RULES if rule.bits in HOST_BACKENDS}
    assert set(HOST_BACKENDS.values()) <= named
    assert BACKENDS["onednn_w8a8"].restored_for is PackedWeight.restored_for


@pytest.mark.parametrize("config", [QWEN, OSS])
@pytest.mark.parametrize("bits", [16, 8, 6, 4, 3])
def test_hosted_experts_compute_what_experts_of_their_bits_do(
    config: object, bits: int, tmp_path: Path
) -> None:
    layer = filled(config)
    save_file(stored(layer, "fused"), tmp_path / "model.safetensors")
    form = LayerForm(8, HERE, torch.float32, CPU)
    host = HostForm.beside(form, bits, streams_from=7)
    loaded = load(tmp_path, config, form, experts_form=host)
    experts: HostedExperts = loaded.mlp.experts
    wanted = represented(layer, host, {})
    products: list[int] = []
    multiply = experts.product
    experts.product = lambda weight, rows: products.append(1) or multiply(weight, rows)  # type: ignore
    for tokens, streams in ((1, False), (6, False), (7, True), (40, True)):
        hidden = torch.randn(tokens, HIDDEN)
        products.clear()
        found = loaded(hidden)
        assert bool(products) != streams, tokens
        assert (found - wanted(hidden)).norm() < 2e-5 * wanted(hidden).norm(), tokens
    few = torch.randn(9, HIDDEN).bfloat16()  # which routers such as DeepSeek's weigh in float32
    assert experts(few, torch.tensor([[0, 1]] * 9), torch.rand(9, 2)).dtype == few.dtype
    experts.padded_to = 32  # then no result may depend on who else is computed
    loaded(torch.randn(40, HIDDEN))
    assert len(products) > 1


def test_a_cached_layer_is_found_by_bits_and_place_of_its_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(stored(filled(OSS), "fused"), tmp_path / "model.safetensors")
    form = LayerForm(16, HERE, torch.bfloat16, CPU)
    forms = [LayerForm(bits, HERE, torch.bfloat16, CPU) for bits in (3, 4)]
    forms += [HostForm.beside(form, bits, streams_from=None) for bits in (3, 4)]

    def loaded(own: LayerForm, cache: ShardCache) -> Layer:
        return load(tmp_path, OSS, form, experts_form=own, cache=cache)

    hidden = torch.randn(9, HIDDEN, dtype=torch.bfloat16)
    written = [loaded(own, ShardCache(tmp_path / "cache")) for own in forms]
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == len(forms)
    monkeypatch.setattr(Checkpoint, "read", None)
    for own, before in zip(forms, written, strict=True):
        found = loaded(own, ShardCache(tmp_path / "cache"))
        assert repr(found) == repr(before)
        assert torch.equal(found(hidden), before(hidden))


def test_bits_apart_round_the_linears_by_one_and_the_experts_by_the_other(tmp_path: Path) -> None:
    layer = filled(QWEN)
    tensors = stored(layer, "each")
    name = f"{PREFIX}.mlp.shared_expert_gate.weight"
    save_file(tensors, tmp_path / "model.safetensors")
    weight_only = HERE if "avx512_vnni" not in HERE.instruction_sets else type(HERE)(None)
    form = LayerForm(8, weight_only, torch.float32, CPU, "torch_8bit")
    experts = LayerForm(3, weight_only, torch.float32, CPU)
    meta = empty(QWEN)
    quantized = frozenset({"mlp.shared_expert_gate"})
    load_layer(
        LayerLoad(meta, PREFIX, form, quantized=quantized, experts_form=experts),
        Checkpoint(tmp_path),
    )
    wanted, x = represented(layer, experts, {}), torch.randn(5, HIDDEN)
    assert (meta(x) - wanted(x)).norm() < 2e-5 * wanted(x).norm()
    gate: Tensor = BACKENDS["torch_8bit"].represent(tensors[name])
    assert torch.allclose(meta.mlp.shared_expert_gate(x), x @ gate.t(), atol=1e-5)
