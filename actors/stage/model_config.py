"""A model's configuration as transformers reads it, and what its settings say of generating."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.model.config_check import DTYPE_KEYS, check_end_tokens
from planner.model.family import LONG_TYPES
from planner.model.finding import has_own_head
from planner.model.shape import MAX_SIZE
from quant.checkpoint.gguf.folder import model_place, settings_place
from quant.checkpoint.gguf.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from quant.checkpoint.stored_config import CONFIG_FILE, CONFIG_KEY, GENERATION_CONFIG_FILE
from quant.checkpoint.text_part import TEXT_SECTION, text_entries
from quant.common.errors import CheckpointError, SpecError
from quant.common.files import MAX_BYTES, read_json_object
from quant.common.json_text import loads
from quant.common.text import library_reason, printable

if TYPE_CHECKING:  # commands read end tokens before they import torch
    from transformers import PretrainedConfig

_NUMBER = "__float__"
"""`_FLOAT_TAG_KEY` of transformers."""


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration in `folder`; raises `CheckpointError` where transformers does not take it.

    Embedding and LM head are tied only where the weights do not differ (`has_own_head`).
    """
    values = read_json_object(folder / CONFIG_FILE, "download it again", CheckpointError)
    config = config_of_values(values, settings_place(folder, CONFIG_FILE))
    config.name_or_path = str(folder)
    if getattr(config, "tie_word_embeddings", False) and has_own_head(folder, config.model_type):
        config.tie_word_embeddings = False
    return config


def config_of_values(values: Mapping[str, Any], place: str = CONFIG_FILE) -> PretrainedConfig:
    """The configuration of the text model in a parsed `config.json`, without how its weights are
    stored; messages call it `place`. Types may be written as torch shows them, `torch.bfloat16`.
    """
    from transformers import AutoConfig

    entries = text_entries(values, place)
    kept = {k: v for k, v in entries.items() if k not in (CONFIG_KEY, "names")}
    for key in kept.keys() & DTYPE_KEYS:
        kept[key] = kept[key] and str(kept[key]).removeprefix("torch.")
    with _named(place):
        return AutoConfig.for_model(**_with_infinities(kept))


def _with_infinities(value: Any) -> Any:
    """Give `value` with numbers that JSON lacks, which transformers writes as objects."""
    if isinstance(value, Mapping):
        if value.keys() == {_NUMBER}:
            return float(value[_NUMBER])
        return {key: _with_infinities(each) for key, each in value.items()}
    return [_with_infinities(each) for each in value] if isinstance(value, list) else value


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    values = config.to_dict() | {"num_hidden_layers": layers}
    if values.get("layer_types"):  # one for each layer: sliding windows or not
        values["layer_types"] = (values["layer_types"] * layers)[:layers]
    if layers != config.num_hidden_layers and values.get("num_kv_shared_layers"):
        values["num_kv_shared_layers"] = 0
    own = {int(layer): each for layer, each in (values.get("per_layer_config") or {}).items()}
    if own:
        whole = config.num_hidden_layers
        found = {layer: own.get(layer % whole) for layer in range(layers)}
        found[layers - 1] = own.get(whole - 1)  # the last one is of the same type in any Gemma 4
        values["per_layer_config"] = {layer: each for layer, each in found.items() if each}
    return type(config).from_dict(values)


_PHI3_LENGTH = 4096
"""The default of transformers for the length with which the model was trained."""


def check_frequencies_agree(folder: Path, longest: Collection[int]) -> None:
    """Raise `SpecError` where stages whose longest requests have so many tokens would turn the keys
    of one request by unlike frequencies: `actors.stage.partial_model.plan_frequencies`.
    """
    values = read_json_object(folder / CONFIG_FILE, "download it again", CheckpointError)
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not {*LONG_TYPES} & {rope.get("rope_type"), rope.get("type")}:
        return
    key = "original_max_position_embeddings"
    trained = values.get(key) or rope.get(key) or _PHI3_LENGTH
    if len({length > trained for length in longest}) > 1:
        raise SpecError(
            f"{settings_place(folder, CONFIG_FILE)}: its longrope has other frequencies for "
            f"requests of more than {trained} tokens, which prompts stay below but not whole "
            "requests, so that stages that prefill for others would have wrong ones; plan with "
            "--schedule rra, or for fewer tokens"
        )


def check_loads(folder: str, adapter: str | None, has_weights: bool) -> None:
    """Check what torch and transformers are needed for: where the weights lie in `folder` too,
    their files and the adapter's, and that transformers builds the model. Raises `CheckpointError`.
    """
    from quant.checkpoint.reader import Checkpoint

    if has_weights:
        Checkpoint(folder, adapter).check_files()
    check_transformers_builds(Path(folder))


def check_transformers_builds(folder: Path) -> None:
    """Build a model of one layer from the configuration in `folder`, without memory.

    Raises `CheckpointError` where transformers cannot.
    """
    from actors.stage.partial_model import empty_model

    config = read_config(folder)
    with _named(settings_place(folder, CONFIG_FILE)):
        empty_model(with_layers(config, 1))


@contextmanager
def _named(file: str) -> Iterator[None]:
    try:
        yield
    # Transformers raises anything at values that it did not foresee: errors of its own checks, of
    # torch's, of arithmetic and of types. The fault is in the values.
    except Exception as error:
        raise CheckpointError(
            f"{file}: transformers cannot build the model that it describes "
            f"({library_reason(error)}); mend it, or download it again"
        ) from error


_EOS, _EOS_ID = "eos_token", "eos_token_id"
_TOKENIZER_FILES = (TOKENIZER_CONFIG_FILE, "special_tokens_map.json")
"""Files that name a tokenizer's end token: which of them counts differs between versions of
transformers."""
_SHOWN_CHARACTERS = 40  # of a token's text


@dataclass(frozen=True)
class EndTokens:
    """The `sources` of each token that ends answers: the files that name it; `texts` of some."""

    sources: Mapping[int, tuple[str, ...]]
    texts: Mapping[int, str]

    @property
    def note(self) -> str:
        """A line that tells which tokens end answers, and which files say so."""
        by_files: dict[tuple[str, ...], list[str]] = {}
        for token, files in self.sources.items():
            by_files.setdefault(files, []).append(self.texts.get(token, f"token {token}"))
        named = (f"{', '.join(each)} ({', '.join(files)})" for files, each in by_files.items())
        return f"answers end at {' and '.join(named)}"


def read_generation_config(folder: Path) -> Mapping[str, Any]:
    """The fields that are set, none where there is no file.

    Raises `CheckpointError` for a malformed file.
    """
    path = folder / GENERATION_CONFIG_FILE
    if not path.exists():
        return {}
    content = read_json_object(path, "mend or delete it", CheckpointError)
    return {name: value for name, value in content.items() if value is not None}


def end_tokens(folder: Path) -> EndTokens:
    """The tokens at which an answer of the checkpoint in `folder` ends: all that its generation
    config, its model config and its tokenizer name, as fine-tunes for chats often change only one
    of them.

    Raises `CheckpointError` where those of the configs are no token ids.
    """
    place = model_place(folder)
    sources: dict[int, tuple[str, ...]] = {}
    for file, tokens in (
        (GENERATION_CONFIG_FILE, checked_end_tokens(folder)),
        (CONFIG_FILE, _config_end_tokens(folder)),
        *((file, _end_tokens_named_in(folder, file)) for file in _TOKENIZER_FILES),
    ):
        named = file if place == folder else place.name
        for token in tokens:
            sources[token] = tuple(dict.fromkeys((*sources.get(token, ()), named)))
    return EndTokens(sources, _texts(folder, set(sources)))


def checked_end_tokens(folder: Path, vocab_size: int = MAX_SIZE) -> tuple[int, ...]:
    """End tokens of the generation config alone; raises `CheckpointError` where they do not belong
    to a vocabulary of `vocab_size`.
    """
    found = read_generation_config(folder).get(_EOS_ID)
    place = settings_place(folder, GENERATION_CONFIG_FILE)
    return check_end_tokens(found, vocab_size, place, CheckpointError)


def _config_end_tokens(folder: Path) -> tuple[int, ...]:
    found = read_json_object(folder / CONFIG_FILE, "download it again", CheckpointError)
    place = settings_place(folder, CONFIG_FILE)
    own = found.get(TEXT_SECTION)
    entries = [found.get(_EOS_ID), own.get(_EOS_ID) if isinstance(own, Mapping) else None]
    checked = (check_end_tokens(each, MAX_SIZE, place, CheckpointError) for each in entries)
    return tuple(token for tokens in checked for token in tokens)


def _end_tokens_named_in(folder: Path, file: str) -> tuple[int, ...]:
    """The end token that a `file` of the tokenizer names, by its id; none where none tells it."""
    named = _entries(folder / file).get(_EOS)
    text = named.get("content") if isinstance(named, dict) else named
    found = (ids[text] for ids in _vocabularies(folder) if isinstance(text, str) and text in ids)
    return tuple(token for token in (next(found, None),) if type(token) is int)


def _texts(folder: Path, tokens: set[int]) -> Mapping[int, str]:
    """Texts of `tokens`, as far as the tokenizer's files have them."""
    texts: dict[int, str] = {}
    for ids in _vocabularies(folder):
        if tokens <= texts.keys():
            break
        found = {token: text for text, token in ids.items() if type(token) is int}
        new = tokens & found.keys() - texts.keys()
        texts |= {token: printable(found[token][:_SHOWN_CHARACTERS]) for token in new}
    return texts


def _vocabularies(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Ids by text, of the tokenizer's files one after the other, those that are read soonest first.

    Nothing is said of a file that is broken: loading the tokenizer does.
    """
    added = _entries(folder / TOKENIZER_CONFIG_FILE).get("added_tokens_decoder")
    yield _ids(added.items() if isinstance(added, dict) else ())
    yield _entries(folder / "added_tokens.json")
    whole = _entries(folder / TOKENIZER_FILE)
    listed, model = whole.get("added_tokens"), whole.get("model")
    tokens = (
        each for each in (listed if isinstance(listed, list) else ()) if isinstance(each, dict)
    )
    yield _ids((each.get("id"), each) for each in tokens)
    pieces = model.get("vocab") if isinstance(model, dict) else None
    yield pieces if isinstance(pieces, dict) else {}
    yield _entries(folder / "vocab.json")


def _ids(tokens: Iterable[tuple[Any, Any]]) -> Mapping[str, int]:
    """Ids by text of `tokens`, pairs of an id and what a file says of it."""
    return {
        each["content"]: int(number)
        for number, each in tokens
        if isinstance(each, dict)
        and isinstance(each.get("content"), str)
        and str(number).isdecimal()
    }


def _entries(path: Path) -> dict[str, Any]:
    """The entries of the JSON object at `path`, none where there is no such file."""
    try:
        values = loads(path.read_bytes()) if path.stat().st_size <= MAX_BYTES else None
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
