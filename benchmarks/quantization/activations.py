"""Perplexity of 8 bit where activations are rounded too, without and with large input features.

    python -m benchmarks.quantization.activations [--model FOLDER] [--text FILE] [--tokens 8192]
        [--times 50] [--part perplexity|error|seconds]

Perplexities are of the model as it is, and with two channels of each norm `--times` as large while
the columns that read them are as much smaller: the function is kept. Without `--text` the demo
model's held-out topics. Inputs are measured on 64 random token ids. Products are computed in
float32 by what the kernels round to, so that no kernel has to run here; embedding and head are not
rounded. `error`: of a linear of 4096 inputs whose first is as much larger. `seconds`: rounding a
token's activations, beside the linear in bfloat16 and, where it runs, the whole 8-bit product.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from benchmarks.machine import processor_name
from benchmarks.quality import MODEL, read_texts
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.text_windows import Document, Windows, read_documents, token_windows
from llmpq.tokenizing.requests import load_tokenizer
from quant.backends.cpu.activation_codes import round_activations
from quant.backends.cpu.onednn_w8a8 import OneDnnW8A8
from quant.backends.cpu.rotation import input_factor, rotate
from quant.canonical import dequantize, quantize
from quant.importance.statistics import InputStatistics
from quant.loading.emulated_kernels import Product, RepresentedLinear, represented_product
from quant.processor import local_processor

LENGTH = 512
RANDOM_IDS = 64
CHANNELS = 2  # of each norm
CPU = torch.device("cpu")
WIDTHS = (4096, 11008)

Scheme = Callable[[Tensor, InputStatistics], Product]


def weights_alone(weight: Tensor, inputs: InputStatistics) -> Product:
    """Round the weight, not what it is multiplied with."""
    rounded = dequantize(quantize(weight, 8))
    return lambda x: functional.linear(x, rounded)


def one_scale_a_token(weight: Tensor, inputs: InputStatistics) -> Product:
    """Round activations without a rotation."""
    rounded = dequantize(quantize(weight, 8))

    def product(x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return functional.linear((x / step).round() * step, rounded)

    return product


SCHEMES: Mapping[str, Scheme] = {
    "weights alone": weights_alone,
    "one scale a token": one_scale_a_token,
    "onednn_w8a8, no statistics": lambda w, _: represented_product("onednn_w8a8", w, torch.float32),
    "onednn_w8a8": lambda w, i: represented_product("onednn_w8a8", w, torch.float32, inputs=i),
    "bnb_int8": lambda w, _: represented_product("bnb_int8", w, torch.float32),
}


class Model:
    """A model of transformers whose decoder's linears can be replaced, and their inputs."""

    def __init__(self, folder: Path, times: float) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if times != 1:
            enlarge(self.model, times)
        decoder = self.model.get_decoder()
        self.linears = {n: m for n, m in decoder.named_modules() if isinstance(m, nn.Linear)}
        self.inputs = self._measure()

    def _measure(self) -> dict[str, InputStatistics]:
        found: dict[str, InputStatistics] = {}

        def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                rows = inputs[0].flatten(0, -2)
                found[name] = InputStatistics(rows.square().mean(0), rows.abs().amax(0))

            return hook

        hooks = [m.register_forward_pre_hook(keep(n)) for n, m in self.linears.items()]
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.model.config.vocab_size
        self.model(torch.randint(vocabulary, (1, RANDOM_IDS), generator=generator))
        for hook in hooks:
            hook.remove()
        return found

    def use(self, scheme: Scheme) -> None:
        """Compute every linear of the decoder's layers by `scheme`."""
        decoder = self.model.get_decoder()
        for name, linear in self.linears.items():
            product = scheme(linear.weight.detach(), self.inputs[name])
            parent, _, attribute = name.rpartition(".")
            filled = RepresentedLinear(product, linear.bias)
            setattr(decoder.get_submodule(parent), attribute, filled)

    def perplexity(self, name: str, windows: Windows) -> Perplexity:
        """Perplexity, the first token of a window not being scored."""
        nats = []
        counts = [int(count) for count in windows.counts]
        for row, count in zip(torch.from_numpy(windows.token_ids), counts, strict=True):
            ids = row[:count]
            logits = self.model(ids[None]).logits[0, :-1]
            loss = functional.cross_entropy(logits, ids[1:], reduction="none")
            nats.append(float(loss.double().sum()))
        scored = tuple(count - 1 for count in counts)
        return Perplexity(name, (8,), tuple(nats), scored, ("float32",))


def enlarge(model: Any, times: float) -> None:
    """Make two channels of each norm of a LLaMA larger, and their columns as much smaller."""
    generator = torch.Generator().manual_seed(1)
    for layer in model.get_decoder().layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, linears in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            chosen = torch.randperm(norm.weight.numel(), generator=generator)[:CHANNELS]
            norm.weight[chosen] *= times
            for linear in linears:
                linear.weight[:, chosen] /= times


def print_perplexities(folder: Path, windows: Windows, times: Sequence[float]) -> None:
    """Every scheme on the model as it is and with large channels."""
    print(f"\n{folder.name}, {len(windows.token_ids)} windows of {LENGTH}:\n")
    print("| large channels | 8 bit | perplexity | above 16 bit | ± 1 σ |\n|---|---|---|---|---|")
    for each in times:
        model = Model(folder, each)
        full = model.perplexity("16 bit", windows)
        label = "none" if each == 1 else f"{CHANNELS} a norm, {each:g} times"
        print(f"| {label} | (16 bit) | {full.perplexity:.3f} | | |", flush=True)
        for name, scheme in SCHEMES.items():
            model.use(scheme)
            above, error = model.perplexity(name, windows).above(full)
            total = full.perplexity + above
            spread = "-" if error is None else f"{error:.3f}"
            print(f"| {label} | {name} | {total:.3f} | {above:+.3f} | {spread} |", flush=True)


def print_errors(times: float) -> None:
    """Relative error of one linear's outputs, by scheme."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(1024, 4096, generator=generator)
    x = torch.randn(256, 4096, generator=generator)
    print(f"\nError of a linear of 4096 inputs, one of which is {times:g} times the others:\n")
    print("| 8 bit | as it is | one large input | its weights as much smaller |\n|---|---|---|---|")
    cases = []
    for large, small in ((1.0, 1.0), (times, 1.0), (times, times)):
        own_x, own_weight = x.clone(), weight.clone()
        own_x[:, 0] *= large
        own_weight[:, 0] /= small
        cases.append((own_weight, own_x))
    for name, scheme in SCHEMES.items():
        cells = []
        for own_weight, own_x in cases:
            inputs = InputStatistics(own_x.square().mean(0), own_x.abs().amax(0))
            wanted = own_x.double() @ own_weight.double().t()
            out = scheme(own_weight, inputs)(own_x).double()
            cells.append(f"{float((out - wanted).norm() / wanted.norm()):.2%}")
        print(f"| {name} | {' | '.join(cells)} |")


def print_seconds(tokens: int) -> None:
    """CPU time of rounding a token, of rotating it alone, and of the products.

    The rotation alone copies its float32 input besides, which rounding does not.
    """
    runs_here = "avx512_vnni" in local_processor(CPU).instruction_sets
    print(f"\nMicroseconds of one core a token, at {tokens} tokens in bfloat16:\n")
    print("| in x out | to 8 bit | rotation of it | bfloat16 product | whole 8-bit product |")
    print("|---|---|---|---|---|")
    for width in WIDTHS:
        weight = torch.randn(4096, width).mul_(0.02).bfloat16()
        x = torch.randn(tokens, width).bfloat16()
        factor = input_factor(weight, None)
        taken = [least_us(lambda: round_activations(x, factor), tokens)]  # noqa: B023
        values = x.float()
        taken.append(least_us(lambda: rotate(values), tokens))  # noqa: B023
        taken.append(least_us(lambda: functional.linear(x, weight), tokens))  # noqa: B023
        cells = [f"{each:.2f}" for each in taken]
        if runs_here:
            packed = OneDnnW8A8.from_weight(weight, torch.bfloat16, CPU)
            cells.append(f"{least_us(lambda: packed.forward(x), tokens):.2f}")  # noqa: B023
        else:
            cells.append("needs VNNI")
        print(f"| {width} x 4096 | {' | '.join(cells)} |")


def least_us(work: Callable[[], object], tokens: int) -> float:
    """Least CPU time of `work` over a few calls, in microseconds a token."""
    work()
    return 1e6 / tokens * min(_seconds(work) for _ in range(4))


def _seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _parts(options: argparse.Namespace) -> Iterator[str]:
    yield from ("error", "seconds", "perplexity") if options.part is None else (options.part,)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a LLaMA")
    parser.add_argument("--text", type=Path, help="held-out text (default: the demo's topics)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text")
    parser.add_argument("--times", type=float, default=50.0, help="how much larger channels are")
    parser.add_argument("--part", choices=["error", "seconds", "perplexity"])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{processor_name()}, 1 thread, torch {torch.__version__}")
    with torch.no_grad():
        for part in _parts(options):
            if part == "error":
                print_errors(options.times)
            elif part == "seconds":
                print_seconds(32)
            else:
                text: Iterable[Document] = (
                    read_texts()[1] if options.text is None else read_documents([options.text])
                )
                tokenizer = load_tokenizer(options.model)
                most = math.floor(options.tokens / LENGTH) * LENGTH
                windows = token_windows(text, tokenizer, LENGTH, most)
                print_perplexities(options.model, windows, (1.0, options.times))


if __name__ == "__main__":
    main()
