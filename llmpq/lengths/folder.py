"""The folder of a trained predictor: `predictor.json` and weights, written whole or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

from llmpq.lengths.boosting import Boosting
from llmpq.lengths.predictor import BucketModel, IntArray
from planner.assumed_predictor import PREDICTOR_FILE, PredictorFile, predictor_file
from quant.checkpoint.model_folder import new_folder
from quant.common.errors import InputError, SpecError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_DIGEST_BYTES = 8


def tokenizer_digest(model_folder: Path, vocab_size: int) -> str:
    """Digest that tells whether ids mean the same: of the tokenizer, or else of `vocab_size`."""
    seen = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in _TOKENIZER_FILES:
        path = model_folder / name
        if path.is_file():
            seen.update(name.encode() + b"\0" + path.read_bytes())
            if name == _TOKENIZER_FILES[0]:  # complete by itself, others repeat it
                break
    else:
        seen.update(f"{vocab_size} ids".encode())
    return seen.hexdigest()


def check_tokenizer(file: PredictorFile, folder: Path, digest: str, model: str) -> None:
    if file.tokenizer not in (None, digest):
        raise SpecError(
            f"the predictor in {folder} reads ids of another tokenizer ({file.tokenizer}) than "
            f"{model} has ({digest}); train one for it: llmpq lengths train --model"
        )


def load_predictor(folder: Path) -> BucketModel:
    """The predictor in `folder`; SpecError names what is wrong with it."""
    file = predictor_file(folder)
    if file.kind == "boosting":
        return Boosting.load(folder, file.buckets, file.tokenizer)
    from llmpq.lengths.classifier import Classifier

    return Classifier.load(folder, file.buckets, file.tokenizer, file.trained_rows)


def check_target(target: Path, replace: bool) -> None:
    """Raise `InputError` where none can be written; only predictors are replaced, if `replace`."""
    try:
        if not target.name or not target.parent.is_dir():
            raise InputError(f"cannot write {target}: there is no folder {target.parent}")
        taken = target.exists() and not (target.is_dir() and not any(target.iterdir()))
        is_predictor = (target / PREDICTOR_FILE).is_file()
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error
    if taken and not is_predictor:
        raise InputError(f"cannot write {target}: something else is there; name another folder")
    if taken and not replace:
        raise InputError(
            f"cannot write {target}: a predictor is there; name another folder, or pass --overwrite"
        )


def save_predictor(
    target: Path, model: BucketModel, confusion: IntArray, replace: bool = False
) -> None:
    """Write `model` and its errors `[buckets][buckets]` to the folder `target`, all or nothing."""
    check_target(target, replace)
    file = PredictorFile(
        kind=model.kind,
        buckets=model.buckets,
        trained_rows=model.trained_rows,
        confusion=tuple(tuple(row) for row in confusion.tolist()),
        tokenizer=model.tokenizer,
    )
    try:
        with new_folder(target, replace) as folder:
            model.save(folder)
            (folder / PREDICTOR_FILE).write_text(file.model_dump_json(indent=1) + "\n", "utf-8")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}") from error
