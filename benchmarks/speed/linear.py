"""Speed and error of kernel backends on the linears of well-known models.

    python -m benchmarks.speed.linear [--device cuda] [--threads 1] [--dtype float32] [--quick]

Every backend that runs here, on every distinct weight of OPT-13b, OPT-30b and LLaMA-3-8B, for 1, 8,
64 and 512 rows of activations, by turns with `torch.nn.functional.linear` in the compute type. Each
call takes another copy of its weight, so that it comes from memory and not from a cache, as in a
model. Weights and activations are normal random numbers.

Backends named `super-blocks` hold the weight in such scales as K-quants of GGUF have, whose minima
are here half of the codes.

- `ratio`: how many times as fast as the plain product.
- `error`: of the output, relative to the product in float64 with the weight before quantization
  (Frobenius norms, over 256 of the outputs).
- `of own`: that error relative to the one of a float64 product with the dequantized weight.
- `GB/s`: bytes of the packed weight over the time; `of copy` relates it to the bytes that a copy
  reads and writes in a second on the same device.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median

import torch
from torch.nn import functional

from benchmarks.lab import EVICTING_BYTES, header, processor_name, seconds_of, table_row
from planner.model.finding import model_shape
from quant.backends.base import PackedWeight
from quant.backends.kernel_classes import BACKENDS, self_test
from quant.backends.kernel_rule import KernelRule
from quant.backends.table import KERNEL_RULES
from quant.common.errors import DeviceError
from quant.devices import local_processor
from quant.linear import dtype_name
from quant.rounding.canonical import CanonicalWeight, dequantize
from quant.scheme import NARROW_GROUP, SUPER_BLOCK, LinearShape, ScaleForm

MODELS = ("llama-3-8b", "opt-13b", "opt-30b")
ROWS = (1, 8, 64, 512)
PLAIN = "plain"
CACHE_BYTES = {"cpu": 1 << 26, "cuda": EVICTING_BYTES}
"""More than the last cache holds, of a CPU 32 MB of a server core's neighbours."""
CALLS = {"cpu": 4, "cuda": 20}
"""Calls between two readings of the clock, as the linears of a layer follow each other: a CPU's
caches then hold the code, and a GPU's launches hide behind its work."""
LONG_S = 0.02
"""Seconds of a call from which on one call between two readings is enough."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 60
SAMPLED_OUTPUTS = 256
GB = 1e9

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """The device and type to compute in, and about how long to measure each case.

    Weights lie in copies of `cache_bytes` together, None: more than the device's caches hold.
    """

    device: torch.device
    dtype: torch.dtype
    seconds: float
    cache_bytes: int | None = None

    def copies(self, nbytes: int) -> int:
        """Number of copies of a weight of `nbytes` that are measured in turn."""
        together = CACHE_BYTES[self.device.type] if self.cache_bytes is None else self.cache_bytes
        return max(1, math.ceil(together / nbytes))


@dataclass(frozen=True)
class Held:
    """A weight as one backend holds it: as many copies as leave the caches behind.

    `represented`: float64 `[sampled outputs, in]`, what it stands for.
    """

    backend: str
    bits: int
    nbytes: int
    products: Sequence[Product]
    represented: torch.Tensor


@dataclass(frozen=True)
class Result:
    """One backend on one shape at one number of rows; `error`s as in the module's header.

    `kernel_error`: of the output, relative to the float64 product with the dequantized weight.
    """

    shape: LinearShape
    rows: int
    backend: str
    bits: int
    seconds: float
    plain_seconds: float
    error: float
    own_error: float
    kernel_error: float
    bytes_per_s: float

    @property
    def ratio(self) -> float:
        """How many times as fast as the plain product."""
        return self.plain_seconds / self.seconds


def distinct_shapes(models: Sequence[str]) -> dict[LinearShape, list[str]]:
    """Weights of the models' decoder layers, each with the models that have it."""
    found: dict[LinearShape, list[str]] = {}
    for model in models:
        for shape in dict.fromkeys(model_shape(model).layer_linears):
            found.setdefault(shape, []).append(model)
    return found


def usable_rules(setting: Setting) -> list[KernelRule]:
    """Backends that pass their self-test here; says of each other one why not."""
    processor, usual = local_processor(setting.device), LinearShape(4096, 4096)
    rules = []
    for rule in KERNEL_RULES:
        if rule.name == PLAIN or not rule.supports(processor, usual, dtype_name(setting.dtype)):
            continue
        try:
            complaint = self_test(BACKENDS[rule.name], setting.dtype, setting.device)
        except DeviceError as error:
            complaint = str(error)
        if complaint is None:
            rules.append(rule)
        else:
            print(f"- {rule.name} left out: {complaint}")
    return rules


def hold(shape: LinearShape, rules: Sequence[KernelRule], setting: Setting) -> list[Held]:
    """Hold the same random weight in each backend that accepts it, the plain one first."""
    weight = random_weight(shape, setting)
    processor, dtype = local_processor(setting.device), dtype_name(setting.dtype)
    taken = [rule for rule in rules if rule.supports(processor, shape, dtype)]
    held = [hold_plain(weight, setting), *(hold_packed(rule, weight, setting) for rule in taken)]
    if shape.in_features % SUPER_BLOCK:
        return held
    blocks = replace(shape, stored_group=NARROW_GROUP, stored_form=ScaleForm.SUPER_BLOCKS)
    known = (rule for rule in taken if rule.bits in (4, 5, 6) and rule.name.startswith("int"))
    in_blocks = (rule for rule in known if rule.supports(processor, blocks, dtype))
    return [*held, *(hold_super_blocks(rule, weight, setting) for rule in in_blocks)]


def random_weight(shape: LinearShape, setting: Setting) -> torch.Tensor:
    """Normal random numbers `[out, in]` on the device, in the compute type."""
    generator = torch.Generator(setting.device).manual_seed(shape.in_features + shape.out_features)
    size = (shape.out_features, shape.in_features)
    weight = torch.randn(size, generator=generator, device=setting.device)
    return weight.mul_(0.02).to(setting.dtype)


def hold_plain(weight: torch.Tensor, setting: Setting) -> Held:
    """Hold `weight` as `nn.Linear` does."""
    copies = range(setting.copies(weight.nbytes))
    products = [_plain_product(weight.clone()) for _ in copies]
    sample = weight[sampled(len(weight))].double()
    return Held(PLAIN, 16, weight.nbytes, products, sample)


def hold_packed(rule: KernelRule, weight: torch.Tensor, setting: Setting) -> Held:
    """Hold `weight` as the backend of `rule` does."""
    backend: type[PackedWeight] = BACKENDS[rule.name]
    shape = LinearShape(in_features=weight.shape[1], out_features=weight.shape[0])
    count = setting.copies(rule.nbytes(shape, dtype_name(setting.dtype)))
    first = backend.from_weight(weight, setting.dtype, setting.device)
    held = [each for each in vars(first).values() if torch.is_tensor(each)]
    can_copy = all(each.layout == torch.strided for each in held)  # oneDNN's layout cannot
    packed = [first]
    for _ in range(count - 1):
        another = copy.deepcopy(first) if can_copy else None
        packed.append(another or backend.from_weight(weight, setting.dtype, setting.device))
    represented = backend.represent(weight[sampled(len(weight))]).double()
    products = [each.forward for each in packed]
    return Held(rule.name, rule.bits, packed[0].nbytes, products, represented)


def hold_super_blocks(rule: KernelRule, weight: torch.Tensor, setting: Setting) -> Held:
    """Hold `weight` in scales of super-blocks as the CPU's backend of `rule` does."""
    canonical = in_super_blocks(weight.float(), rule.bits)
    first: PackedWeight = BACKENDS[rule.name].from_canonical(canonical)  # type: ignore[attr-defined]
    packed = [first, *(copy.deepcopy(first) for _ in range(setting.copies(first.nbytes) - 1))]
    represented = dequantize(canonical)[sampled(len(weight))].double()
    products = [each.forward for each in packed]
    return Held(f"{rule.name}, super-blocks", rule.bits, first.nbytes, products, represented)


def in_super_blocks(weight: torch.Tensor, bits: int) -> CanonicalWeight:
    """Round `weight` `[out, in]` to codes whose middle one stands for 0."""
    rows, group, most = len(weight), 16 if bits == 6 else NARROW_GROUP, 127 if bits == 6 else 63
    half = 1 << (bits - 1)
    grouped = weight.view(rows, -1, SUPER_BLOCK // group, group)
    scale = grouped.abs().amax(-1) / (half - 1)
    heads = (scale.amax(-1, keepdim=True) / most).half()
    factors = (scale / heads.float()).round().clamp(1, most)
    scale = (heads.float() * factors).view(rows, -1)
    codes = (weight.view(*scale.shape, group) / scale.unsqueeze(-1)).round() + half
    numbers = heads if bits == 6 else torch.cat((heads, heads * half), -1)
    bytes_ = factors.to(torch.int8).view(rows, -1)
    pairs = bytes_ if bits == 6 else bytes_.unsqueeze(-1).expand(*bytes_.shape, 2)
    parts = numbers.reshape(rows, -1).view(torch.int8), pairs.reshape(rows, -1)
    held = torch.cat(parts, 1).view(rows, -1, 2)
    codes = codes.clamp(0, 2 * half - 1).to(torch.uint8).view(weight.shape)
    return CanonicalWeight(codes, scale, torch.zeros_like(scale), bits, group, held=held)


def measure(shape: LinearShape, rows: int, held: Sequence[Held], setting: Setting) -> list[Result]:
    """Time all backends by turns, then hold their outputs against float64."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, shape.in_features, generator=generator)
    x = x.to(setting.device, setting.dtype)
    seconds = _median_seconds([each.products for each in held], x, setting)
    wanted = x.double() @ held[0].represented.t()
    results = []
    for each, taken in zip(held, seconds, strict=True):
        out = each.products[0](x)[:, sampled(shape.out_features)].double()
        meant = x.double() @ each.represented.t()
        results.append(
            Result(
                shape=shape,
                rows=rows,
                backend=each.backend,
                bits=each.bits,
                seconds=taken,
                plain_seconds=seconds[0],
                error=_relative(out, wanted),
                own_error=_relative(meant, wanted),
                kernel_error=_relative(out, meant),
                bytes_per_s=each.nbytes / taken,
            )
        )
    return results


def _median_seconds(
    candidates: Sequence[Sequence[Product]], x: torch.Tensor, setting: Setting
) -> list[float]:
    """Seconds of one call of each candidate, which takes turns with the others."""
    samples: list[list[float]] = [[] for _ in candidates]
    calls = CALLS[setting.device.type]
    _round(candidates, x, 0, calls=1)  # first calls compile and allocate
    if max(_round(candidates, x, 1, calls=1)) > LONG_S:
        calls = 1
    end = time.perf_counter() + setting.seconds
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        for taken, seconds in zip(samples, _round(candidates, x, number, calls), strict=True):
            taken.append(seconds)
    return [median(taken) for taken in samples]


def _round(
    candidates: Sequence[Sequence[Product]], x: torch.Tensor, number: int, calls: int
) -> list[float]:
    """Seconds a call of each candidate, on copies other than those of the round before."""
    taken = []
    for products in candidates:
        chosen = [products[(number * calls + call) % len(products)] for call in range(calls)]
        _finish(x.device)
        start = time.perf_counter()
        for product in chosen:
            product(x)
        _finish(x.device)
        taken.append((time.perf_counter() - start) / calls)
    return taken


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written in a second by a copy that no cache holds."""
    source = torch.ones(CACHE_BYTES[device.type], dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    taken = [seconds_of(device, lambda: target.copy_(source)) for _ in range(10)]
    return 2 * source.nbytes / median(taken)


def result_table(results: Sequence[Result], copy_rate: float) -> list[str]:
    """Markdown: every measurement."""
    lines = [
        header("out x in | rows | backend | bits | time | ratio | error | of own | GB/s | of copy")
    ]
    for each in results:
        own = f"{each.error / each.own_error:.3f}" if each.own_error else "-"
        cells = [
            f"{each.shape.out_features} x {each.shape.in_features}",
            str(each.rows),
            each.backend,
            str(each.bits),
            f"{each.seconds * 1e3:.3f} ms",
            f"{each.ratio:.2f}",
            f"{each.error:.2%}",
            own,
            f"{each.bytes_per_s / GB:.1f}",
            f"{each.bytes_per_s / copy_rate:.0%}",
        ]
        lines.append(table_row(cells))
    return lines


def summary_table(results: Sequence[Result]) -> list[str]:
    """Markdown: each backend over all shapes, least and mean ratio per number of rows."""
    rows = sorted({each.rows for each in results})
    heads = " | ".join(f"{count} rows" if count > 1 else "1 row" for count in rows)
    lines = [header(f"backend | bits | {heads} | error | of own, at most")]
    for backend in dict.fromkeys(each.backend for each in results if each.backend != PLAIN):
        own = [each for each in results if each.backend == backend]
        cells = [backend, str(own[0].bits)]
        for count in rows:
            ratios = [each.ratio for each in own if each.rows == count]
            cells.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})")
        cells.append(f"{max(each.error for each in own):.2%}")
        cells.append(f"{max(each.error / each.own_error for each in own):.3f}")
        lines.append(table_row(cells))
    return lines


def machine(setting: Setting) -> str:
    """Describe the machine that the figures were taken on."""
    if setting.device.type == "cuda":
        name = torch.cuda.get_device_name(setting.device)
    else:
        threads = torch.get_num_threads()
        name = (
            f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}, "
            f"{threads} thread{'s' if threads > 1 else ''}"
        )
    return f"{name}, torch {torch.__version__}, {dtype_name(setting.dtype)}"


def run(
    setting: Setting,
    models: Sequence[str],
    rows: Sequence[int],
    backends: Sequence[str] | None = None,
) -> None:
    """Measure and print, of some `backends` alone where they are named."""
    copy_rate = copy_bytes_per_s(setting.device)
    print(f"{machine(setting)}; a copy moves {copy_rate / GB:.1f} GB/s.\n")
    rules = [r for r in usable_rules(setting) if backends is None or r.name in backends]
    results: list[Result] = []
    for shape in distinct_shapes(models):
        held = hold(shape, rules, setting)
        for count in rows:
            results += measure(shape, count, held, setting)
    print("Ratios: geometric mean over the shapes, and the least in brackets.\n")
    print("\n".join(summary_table(results)), end="\n\n")
    for shape, owners in distinct_shapes(models).items():
        print(f"- {shape.out_features} x {shape.in_features}: {', '.join(owners)}")
    print()
    print("\n".join(result_table(results, copy_rate)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=sorted(CACHE_BYTES))
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: 1)")
    parser.add_argument("--backends", nargs="+", help="names (default: all that run here)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names of known models")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--quick", action="store_true", help="one model, 1 and 64 rows, less time")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    usual = "bfloat16" if chosen.device == "cpu" else "float16"
    dtype = getattr(torch, chosen.dtype or usual)
    setting = Setting(torch.device(chosen.device), dtype, seconds=0.3 if chosen.quick else 1.5)
    with torch.inference_mode():
        if chosen.quick:
            run(setting, MODELS[:1], (1, 64), chosen.backends)
        else:
            run(setting, chosen.models, chosen.rows, chosen.backends)


def _plain_product(weight: torch.Tensor) -> Product:
    return lambda x: functional.linear(x, weight)


def sampled(outputs: int) -> slice:
    """The outputs that errors are taken over: every n-th."""
    return slice(None, None, max(1, outputs // SAMPLED_OUTPUTS))


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
