from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from planner.model.finding import model_shape
from quant.backends.table import rule_for
from quant.checkpoint.codes import pack_words, unpack_words
from quant.checkpoint.formats.writing import fills_words
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError
from quant.devices import local_processor
from quant.linear import LayerForm, QuantizedLinear, linear_of_codes, quantize_linear
from quant.loading.cache_folder import ShardCache
from quant.loading.emulated_kernels import (
    LayerScheme,
    RepresentedLinear,
    load_layer_as_planned,
)
from quant.loading.layer_load import LayerLoad
from quant.loading.loader import load_layer, module_nbytes
from quant.rounding.canonical import dequantize
from quant.rounding.encoding import gptq_tensors
from quant.rounding.gptq_format import to_canonical
from quant.scheme import LinearShape, Processor
from tests.quant.rounding.gptq_weights import (
    MODULE,
    meant,
    random_codes,
    replace_by_gptq,
    replace_layer,
    save,
    stream_of,
    weight_of,
)

CPU = torch.device("cpu")
HERE = local_processor(CPU)
PLAIN_CPU = Processor(instruction_sets=frozenset())

Build = Callable[[str], PreTrainedModel]
MetaLayer = Callable[[PreTrainedModel, str], nn.Module]

# What GPTQModel 7.7 packs for codes (5 out + 3 in + 7) mod 2^bits of 32 x 32 and zeros
# (7 out + 1) mod 2^bits: words of the first output, and of all zeros in both of its formats.
PACKED_BY_GPTQMODEL = {
    3: (
        [1468477783, 827819825, -2026809465],
        [-1051828799, 1572949597, 1314767182],
        [-1205220424, -877123125, 701216809],
    ),
    4: (
        [-916255321, 1105954095, -916255321, 1105954095],
        [726495105, -1547311351, 726495105, -1547311351],
        [440163952, -1833642504, 440163952, -1833642504],
    ),
    8: (
        [269289991, 471406099, 673522207, 875638315,
         1077754423, 1279870531, 1481986639, 1684102747],
        [370083841, 841688093, 1313292345, 1784896597,
         -2038466447, -1566862195, -1095257943, -623653691],
        [353240832, 824845084, 1296449336, 1768053588,
         -2055309456, -1583705204, -1112100952, -640496700],
    ),
}  # fmt: skip


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("count", [32, 96, 160, 8, 40])
def test_words_are_a_stream_of_bits(bits: int, count: int) -> None:
    codes = random_codes(5, count, bits)
    words = torch.tensor([stream_of(row, bits) for row in codes.tolist()], dtype=torch.int32)
    assert torch.equal(unpack_words(words, bits, count), codes)
    if fills_words(32, count, bits):
        assert torch.equal(pack_words(codes, bits), words)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_what_gptqmodel_packs(bits: int, layout: str, tmp_path: Path) -> None:
    """The first format stores zeros less one, borrowed across a word where one is 0."""
    first, zeros, zeros_less_one = PACKED_BY_GPTQMODEL[bits]
    numbers = torch.arange(32)
    codes = (numbers[:, None] * 5 + numbers * 3 + 7) % 2**bits
    words = pack_words(codes.to(torch.uint8), bits)
    assert words[0].tolist() == first
    tensors = {
        "qweight": words.t().contiguous(),
        "qzeros": torch.tensor([zeros if layout == "gptq_v2" else zeros_less_one]).int(),
        "scales": torch.full((1, 32), 0.5).half(),
    }
    checkpoint = save(tmp_path, tensors, bits=bits, checkpoint_format=layout)
    weight = checkpoint.read_codes(MODULE, (32, 32))
    assert torch.equal(weight.codes.long(), codes)
    assert torch.equal(weight.zero.long(), ((numbers * 7 + 1) % 2**bits)[:, None])


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(
    ("group", "act_order", "layout"),
    [
        (32, False, "gptq"),
        (64, True, "gptq"),
        (128, True, "gptq_v2"),
        (256, False, "gptq_v2"),
        (256, True, "gptq"),
    ],
)
def test_round_trip_through_a_file(
    bits: int, group: int, act_order: bool, layout: str, tmp_path: Path
) -> None:
    weight = weight_of(bits, group=group, act_order=act_order)
    tensors = gptq_tensors(weight, zero_offset=int(layout == "gptq"))
    checkpoint = save(tmp_path, tensors, checkpoint_format=layout)
    read = checkpoint.read_codes(MODULE, (32, 256))
    assert read.bits == bits
    assert torch.equal(read.dequantize().double(), meant(weight).float().double())
    stored = to_canonical(read)
    columns = dequantize(stored.canonical)
    restored = torch.empty_like(columns)
    order = torch.arange(256) if stored.input_order is None else stored.input_order.long()
    restored[:, order] = columns
    if bits == 8:  # quantized once more: half a step of the row's own scale
        step = meant(weight).abs().amax(1, keepdim=True) / 127
        assert ((restored - meant(weight)).abs() <= step * 0.5001).all()
    else:
        assert (stored.input_order is None) == (not act_order or group == 256)
        torch.testing.assert_close(restored.double(), meant(weight), rtol=1e-6, atol=1e-9)


BACKENDS = [
    (bits, dtype, backend)
    for bits in (3, 4, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for backend in (None, f"torch_{bits}bit")
]


@pytest.mark.parametrize(("bits", "dtype", "backend"), BACKENDS)
@pytest.mark.parametrize("act_order", [False, True])
def test_products_and_bytes(
    bits: int, dtype: torch.dtype, backend: str | None, act_order: bool
) -> None:
    """On every backend of this machine: within the rounding of its 16-bit scales and activations.

    A scale or a zero in bfloat16 is off by 2^-9, a zero in float16 by 2^-11 of itself.
    """
    weight = weight_of(bits, rows=64, group=32, act_order=act_order)
    stored = to_canonical(weight)
    linear = linear_of_codes(
        stored.canonical, stored.input_order, LayerForm(bits, HERE, dtype, CPU, backend)
    )
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(5)).to(dtype)
    exact = x.double() @ meant(weight).t()
    error = float((linear(x).double() - exact).norm() / exact.norm())
    most = {torch.float32: 0.0005, torch.bfloat16: 0.01, torch.float16: 0.002}[dtype]
    assert error < (0.02 if bits == 8 else most)
    order_bytes = 0 if stored.input_order is None else 4 * 256
    assert module_nbytes(linear) == linear.packed.nbytes + order_bytes


def test_symmetric_zeros_are_exact_on_torch_backends() -> None:
    for bits in (3, 4):
        symmetric = weight_of(bits)
        symmetric.zero.fill_(1 << (bits - 1))
        linear = linear_of_codes(
            to_canonical(symmetric).canonical, None, LayerForm(bits, PLAIN_CPU, torch.float32, CPU)
        )
        out = linear(torch.eye(256))
        torch.testing.assert_close(out.double(), meant(symmetric).t(), rtol=1e-6, atol=0)


def test_whole_rows_are_held_in_groups_of_the_usual_size() -> None:
    """So that kernels which know groups of 128 take them, in the bytes that plans count."""
    stored = to_canonical(weight_of(4, rows=64, group=256))
    assert stored.canonical.group == 128
    linear = linear_of_codes(stored.canonical, None, LayerForm(4, HERE, torch.bfloat16, CPU))
    assert linear.packed.nbytes == 64 * (256 // 2 + 256 // 128 * 4)


def test_backend_with_codes_of_its_own_gives_way_with_a_warning() -> None:
    """A T4's plan names nf4 for 4 bit, which cannot hold the codes of a checkpoint."""
    turing = Processor((7, 5))
    canonical = to_canonical(weight_of(4, rows=64)).canonical
    preferred = rule_for(turing, 4, LinearShape(256, 64), "float16").name
    assert preferred == "bnb_nf4"
    with pytest.warns(RuntimeWarning, match="bnb_nf4 cannot hold weights that are quantized"):
        linear = linear_of_codes(
            canonical, None, LayerForm(4, turing, torch.float16, CPU, preferred)
        )
    assert isinstance(linear, QuantizedLinear)
    assert "bnb" not in repr(linear).lower()


@pytest.mark.parametrize("family", ["llama", "opt", "bloom"])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_layer_is_loaded_as_it_is_stored(
    family: str,
    bits: int,
    act_order: bool,
    tmp_path: Path,
    tiny_model: Build,
    meta_layer: MetaLayer,
    layer_list: Callable[[str], str],
) -> None:
    """The same linears as `nn.Linear` of the weights that the codes stand for, biases included."""
    model, name = tiny_model(family), f"{layer_list(family)}.1"
    layer = meta_layer(model, name)
    replace_by_gptq(tmp_path, model, name, bits, act_order)
    load_layer(
        LayerLoad(layer, name, LayerForm(bits, PLAIN_CPU, torch.float32, CPU)), Checkpoint(tmp_path)
    )
    for inner, linear in model.get_submodule(name).named_modules():
        if isinstance(linear, nn.Linear):
            x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(1))
            ours, theirs = layer.get_submodule(inner)(x).detach(), linear(x).detach()
            error = float((ours - theirs).norm() / theirs.norm())
            assert error < (0.02 if bits == 8 else 0.001)


@pytest.mark.parametrize("planned", [3, 8, 16])
def test_other_bits_than_stored_are_rounded_again(
    planned: int, tmp_path: Path, tiny_model: Build, meta_layer: MetaLayer
) -> None:
    """Linears with the plan's bits keep their codes all the same, and those that were left out are
    rounded too.
    """
    model, name = tiny_model("llama"), "model.layers.1"
    layer, others = meta_layer(model, name), {"down_proj": 16, "o_proj": 3}
    replace_by_gptq(tmp_path, model, name, 4, act_order=False, others=others)
    checkpoint, form = Checkpoint(tmp_path), LayerForm(planned, PLAIN_CPU, torch.float32, CPU)
    cache = ShardCache(tmp_path / "cache")
    for each in (meta_layer(model, name), layer):  # the second one out of the cache
        with cache:
            load_layer(LayerLoad(each, name, form), checkpoint, cache)
        assert (tmp_path / "cache").is_dir() == (planned != 16), "16 bit is quickly decoded again"
    for inner, linear in model.get_submodule(name).named_modules():
        if isinstance(linear, nn.Linear):
            ours = layer.get_submodule(inner)
            assert (ours.bits if isinstance(ours, QuantizedLinear) else 16) == planned
            expected: nn.Module = linear  # of what the codes stand for
            if planned != others.get(inner.rpartition(".")[2]):
                expected = quantize_linear(linear.weight.detach(), None, form, f"{name}.{inner}")
                expected.bias = linear.bias
            x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(1))
            torch.testing.assert_close(ours(x), expected(x), rtol=1e-3, atol=1e-4)


def test_kernels_of_other_devices_are_represented_where_weights_are_rounded_again(
    tmp_path: Path, tiny_model: Build, meta_layer: MetaLayer
) -> None:
    """Codes that are kept are the same everywhere, also of a linear beside those that are not."""
    model, name = tiny_model("llama"), "model.layers.1"
    replace_by_gptq(tmp_path, model, name, 4, act_order=False, others={"o_proj": 3})
    t4, checkpoint = Processor(compute_capability=(7, 5)), Checkpoint(tmp_path)
    for bits, represented in {8: 7, 4: 0, 3: 6}.items():
        layer = meta_layer(model, name)
        load = LayerLoad(layer, name, LayerForm(bits, PLAIN_CPU, torch.float32, CPU))
        scheme = LayerScheme(bits, planned_for=t4, planned_dtype="float16")
        load_layer_as_planned(load, checkpoint, scheme)
        found = [isinstance(each, RepresentedLinear) for each in layer.modules()]
        assert sum(found) == represented
        assert sum(isinstance(each, QuantizedLinear) for each in layer.modules()) == 7 - sum(found)


def test_modules_of_other_bits_and_those_left_out_are_taken_as_they_are(
    tmp_path: Path, tiny_model: Build, meta_layer: MetaLayer
) -> None:
    """Rules of GPTQModel (`dynamic`) and optimum's `modules_in_block_to_quantize` make such layers;
    their bytes are those that plans count.
    """
    model, name = tiny_model("llama"), "model.layers.1"
    others = {"down_proj": 16, "o_proj": 8}
    replace_by_gptq(tmp_path, model, name, 4, act_order=False, others=others)
    for index in range(model.config.num_hidden_layers):  # the others as that one
        replace_layer(tmp_path, name, f"model.layers.{index}")
    layer = meta_layer(model, name)
    form = LayerForm(4, PLAIN_CPU, torch.float32, CPU)
    load_layer(LayerLoad(layer, name, form), Checkpoint(tmp_path))
    for inner, linear in model.get_submodule(name).named_modules():
        if isinstance(linear, nn.Linear):
            ours = layer.get_submodule(inner)
            stored = others.get(inner.rpartition(".")[2], 4)
            assert (ours.bits if isinstance(ours, QuantizedLinear) else 16) == stored
            x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(1))
            theirs = linear(x).detach()
            error = float((ours(x).detach() - theirs).norm() / theirs.norm())
            assert error < (0.02 if stored == 8 else 0.001)
    shape = model_shape(tmp_path)
    assert shape.stored is not None
    planned = [
        rule_for(PLAIN_CPU, each.stored_bits or 4, each, "float32").nbytes(each, "float32")
        for each in shape.layer_linears
    ]
    assert sum(planned) + 4 * shape.layer_other_parameters == module_nbytes(layer)


def test_layers_that_are_not_quantized(
    tmp_path: Path, tiny_model: Build, meta_layer: MetaLayer
) -> None:
    model = tiny_model("llama")
    replace_by_gptq(tmp_path, model, "model.layers.1", 4, act_order=False)
    checkpoint = Checkpoint(tmp_path)
    untouched = meta_layer(model, "model.layers.0")
    load_layer(
        LayerLoad(untouched, "model.layers.0", LayerForm(16, HERE, torch.float32, CPU)), checkpoint
    )
    original = model.get_submodule("model.layers.0.mlp.up_proj").weight
    assert torch.equal(untouched.get_submodule("mlp.up_proj").weight, original)


DAMAGED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "words of another width": (
        {"qweight": torch.zeros(8, 32).int()},
        r"qweight is I32 \[8, 32\], but 256 codes fill so many words at none of 3, 4, 5, 6, 8 bits",
    ),
    "words of another type": ({"qweight": torch.zeros(32, 32).long()}, "qweight is I64"),
    "too few zeros": (
        {"qzeros": torch.zeros(4, 3).int()},
        r"qzeros is I32 \[4, 3\], but .* \[4, 4\]",
    ),
    "scales of other outputs": (
        {"scales": torch.ones(4, 31).half()},
        r"\[4, 31\], but .* \[4, 32\]",
    ),
    "scales that are no numbers": (
        {"scales": torch.full((4, 32), torch.nan).half()},
        "scales hold NaN",
    ),
    "groups that are not there": (
        {"g_idx": torch.full((256,), 4).int()},
        "does not give each of 256 inputs one of 4 groups",
    ),
    "no group for some": (
        {"g_idx": torch.zeros(247).int()},
        "247 codes fill so many words at none",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_tensors(damage: str, tmp_path: Path) -> None:
    tensors, message = DAMAGED[damage]
    checkpoint = save(tmp_path, gptq_tensors(weight_of(4), 1) | tensors)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read_codes(MODULE, (32, 256))


def test_missing_tensor(tmp_path: Path) -> None:
    tensors = gptq_tensors(weight_of(4), 1)
    del tensors["scales"]
    with pytest.raises(CheckpointError, match=rf"no tensor {MODULE}\.scales"):
        save(tmp_path, tensors).read_codes(MODULE, (32, 256))


def test_groups_of_unequal_size() -> None:
    weight = weight_of(4)
    weight.group_of_column[0] = 1
    with pytest.raises(CheckpointError, match="4 groups of unequal size"):
        to_canonical(weight)


@pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is None, reason="needs GPTQModel")
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_gptqmodel_dequantizes_the_same(bits: int) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    weight = weight_of(bits, rows=64, act_order=True)
    module = TorchLinear(
        bits=bits, group_size=64, sym=False, desc_act=True, in_features=256, out_features=64,
        bias=False, pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    for part, tensor in gptq_tensors(weight, 0).items():
        module.register_buffer(part, tensor)
    module.post_init()
    restored = module.dequantize_weight().t().double()
    torch.testing.assert_close(restored, meant(weight).half().double(), rtol=1e-3, atol=1e-6)
