"""Reading the weights of a model one tensor at a time, from safetensors or GGUF files. Files are
mapped: a tensor is a view until it is copied, so that a stage never holds more of a checkpoint than
what it keeps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path

import torch

from quant.checkpoint.adapter import Adapter, LowRank, is_of_layer
from quant.checkpoint.coded_weights import NUMBERS, CodedWeight
from quant.checkpoint.codes import GroupCodes
from quant.checkpoint.decoding import CodedFiles, Rows
from quant.checkpoint.gguf.folder import gguf_index, model_place
from quant.checkpoint.gguf.tensors import GgufTensors
from quant.checkpoint.model_reference import resolve
from quant.checkpoint.read_ahead import READ_AHEAD_BYTES, FileRange, ReadAhead
from quant.checkpoint.stored_methods import SETTINGS_FILES, read_stored_config
from quant.checkpoint.stored_tensors import (
    other_parts,
    shard_path,
    spellings,
    stored_name,
    text_name,
    unreadable,
)
from quant.checkpoint.tensor_files import SafetensorsFiles
from quant.common.errors import CheckpointError
from quant.common.files import FileIdentity
from quant.scheme import FULL_BITS


class Checkpoint:
    """The tensors of a folder of safetensors, a GGUF file or a hub id, of quantized weights what
    they stand for. `folder` has its settings, `place` is for messages; `keeps_codes`: linears have
    integer codes, which stages keep; `is_original`: there are none, or but these of a GGUF file.
    `adapter`: the folder of one that is added to its weights.
    CheckpointError if there are no weights to read, SpecError for a quantization that is not read.
    """

    def __init__(self, path: str | Path, adapter: str | Path | None = None) -> None:
        self.folder = resolve(path)
        self.place = model_place(self.folder)
        self._identities: dict[str, FileIdentity] = {}
        self._ahead: ReadAhead | None = None
        index = gguf_index(self.folder)
        config = read_stored_config(self.folder)
        self.keeps_codes = config is not None and config.keeps_codes
        self.is_original = not self.keeps_codes or index is not None
        self._config = config
        self._files: SafetensorsFiles | CodedFiles | GgufTensors
        if index is not None:
            self._files = GgufTensors(index)
        else:
            plain = SafetensorsFiles(self.folder, before_open=self._identity)
            self._files = plain if config is None else CodedFiles(plain, config, self.folder)
        self._file_of = self._files.file_of  # below the folder, or absolute
        self._hidden = self._files.hidden if isinstance(self._files, CodedFiles) else frozenset()
        self._adapter = None if adapter is None else Adapter(adapter)
        self._added = {} if self._adapter is None else self._added_to_weights(self._adapter)

    @classmethod
    def of(cls, source: Checkpoint | str | Path) -> Checkpoint:
        return source if isinstance(source, Checkpoint) else cls(source)

    def _added_to_weights(self, adapter: Adapter) -> dict[str, LowRank]:
        """What `adapter` adds, by the names of stored weights."""
        found: dict[str, LowRank] = {}
        for module, added in adapter.modules.items():
            name = self._weight_of(module, adapter)
            if name is None:
                continue
            if self.shape_of(name) != added.shape or name in found:
                raise CheckpointError(
                    f"adapter {adapter.folder} changes {module} by {list(added.shape)}, but "
                    f"{name} in {self.place} is {list(self.shape_of(name))}; it is of another model"
                )
            found[name] = added
        return found

    def _weight_of(self, module: str, adapter: Adapter) -> str | None:
        """The stored weight of a module of training; None in a part that is not run."""
        weight, own = f"{module}.weight", text_name(f"{module}.weight")
        if other_parts((weight,)):
            return None
        tried = ((weight, module.partition(".")[0]), (own, "model"))
        found = (stored_name(self._file_of, *each) for each in tried)
        name = next(filter(None, found), None)
        if name is None or not is_of_layer(module):
            why = "has no weight of that name" if name is None else "is taken of layers alone"
            raise CheckpointError(
                f"adapter {adapter.folder} changes {module:.200}: {self.place} {why}; give its "
                "base model, or merge the adapter with peft (merge_and_unload, save_pretrained)"
            )
        return name

    def names(self) -> list[str]:
        return sorted(self._file_of.keys() - self._hidden)

    def check_files(self) -> None:
        self._files.check()
        if self._adapter is not None:
            self._adapter.check_values()

    def read(self, name: str) -> torch.Tensor:
        """Map a tensor (what is quantized is decoded to float32); copy it to keep it, and never
        write to it. CheckpointError if it is missing or damaged.
        """
        self._wait_for(name)
        stored, added = self._files.read(name), self._added.get(name)
        if added is None or self._adapter is None:
            return stored
        down, up = self._adapter.read(added)
        merged: torch.Tensor = torch.addmm(stored.float(), up, down, alpha=added.scale)
        return merged

    def read_as_stored(self, name: str) -> torch.Tensor:
        """As `read`, in the type of the file."""
        found = self.read(name)
        return found.to(self._files.read(name).dtype) if name in self._added else found

    def coded(self, module: str) -> CodedWeight | None:
        """How the weight of `module` is stored as integer codes; None where it is not."""
        name, prefix = f"{module}.weight", module.partition(".")[0]
        if isinstance(self._files, SafetensorsFiles) or not self.has(name, prefix):
            return None
        found = self._files.coded(self.find(name, prefix))
        return None if found is None or found.linear is None else found

    def stored_bits(self, module: str) -> int:
        """The bits of `module` in a layer that is kept as it is stored; 16 of plain numbers."""
        coded = self.coded(module)
        return FULL_BITS if coded is None or coded.linear is None else coded.linear.bits

    def has_codes(self, module: str) -> bool:
        """Whether the weight of `module` is had as codes; others are rounded to `stored_bits`."""
        coded = self.coded(module)
        return coded is not None and coded.form != NUMBERS and not self.is_changed(module)

    def is_changed(self, name_prefix: str) -> bool:
        """Whether the adapter changes a weight below."""
        return bool(self._added) and not self._added.keys().isdisjoint(
            self.names_below(name_prefix)
        )

    def bits_of_layer(self, weights: Mapping[int, int]) -> int:
        """As of `StoredConfig`."""
        assert self._config is not None, "asked where codes are kept"
        return self._config.bits_of_layer(weights)

    def read_codes(
        self, module: str, shape: tuple[int, int], kept: Rows = slice(None)
    ) -> GroupCodes:
        """Read the weight of `module`, of `shape` `[out, in]`, or the `kept` rows of it, to the
        host. CheckpointError for another shape.
        """
        coded = self.coded(module)
        assert coded is not None, "asked of integer codes"
        assert not isinstance(self._files, SafetensorsFiles), "which have none"
        if coded.shape != shape:
            raise CheckpointError(
                f"the codes of {coded.stem} in {self.place} are those of a weight of "
                f"{list(coded.shape or ())}, but the model's configuration wants {list(shape)}; "
                "the checkpoint is of another model"
            )
        self._wait_for(f"{coded.stem}.weight")
        return self._files.read_codes(coded, kept)

    def _wait_for(self, name: str) -> None:
        """Wait until a tensor was read ahead, where it is."""
        self._check_has(name)
        if self._ahead is None:
            return
        wanted = self._files.range_of(name)
        try:
            self._ahead.wait_for(wanted)
        except OSError as error:
            raise unreadable(wanted.path, error) from error

    def shape_of(self, name: str) -> tuple[int, ...]:
        self._check_has(name)
        return self._files.shape_of(name)

    def range_of(self, name: str) -> FileRange:
        self._check_has(name)
        return self._files.range_of(name)

    @contextmanager
    def reading_ahead(
        self, ranges: Sequence[FileRange], window_bytes: int = READ_AHEAD_BYTES
    ) -> Iterator[ReadAhead]:
        """Bring `ranges` (of other files too) into memory in order; `read` waits for its tensor."""
        with ReadAhead(ranges, window_bytes) as ahead:
            self._ahead = ahead
            try:
                yield ahead
            finally:
                self._ahead = None

    def names_below(self, name_prefix: str) -> list[str]:
        return [name for name in self._stored_below(name_prefix) if name not in self._hidden]

    def ranges_below(self, name_prefix: str) -> list[FileRange]:
        return [self._files.range_of(name) for name in self._stored_below(name_prefix)]

    def _stored_below(self, name_prefix: str) -> list[str]:
        """Names, codes and scales among them."""
        found = spellings(name_prefix, name_prefix.partition(".")[0])
        prefixes = tuple(f"{each}." for each in found)
        return sorted(name for name in self._file_of if name.startswith(prefixes))

    def fingerprint(self, name_prefix: str) -> str:
        """A digest of names, of the files that hold them (path, inode, size, times of change, one
        of which no program can set) and of those that say how they are read. Waits until the last
        change is a clock tick ago, so that a later one is noticed.
        """
        file_of = {name: self._file_of[name] for name in self._stored_below(name_prefix)}
        files = {file: self._identity(file) for file in sorted(set(file_of.values()))}
        adapter = () if self._adapter is None else self._adapter.identities
        for identity in (*files.values(), *adapter):
            identity.settle()
        settings = [self.folder / file for file in SETTINGS_FILES]
        content = [path.read_text("utf-8", "replace") for path in settings if path.is_file()]
        identities = {file: astuple(identity) for file, identity in files.items()}
        depends_on = [file_of, identities, content, *map(astuple, adapter)]
        return hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()

    def is_unchanged(self, name_prefix: str) -> bool:
        files = {self._file_of[name] for name in self._stored_below(name_prefix)}
        if self._adapter is not None and not self._adapter.is_unchanged:
            return False
        try:
            return all(FileIdentity.of(self.folder / f) == self._identity(f) for f in files)
        except OSError:  # removed, or no longer readable
            return False

    def find(self, name: str, prefix: str = "") -> str:
        """Find a stored name: `prefix.name`, `name`, or `name` without `prefix`, as checkpoints are
        saved with or without the base model's prefix (OPT's lack `model.`, BLOOM's `transformer.`).
        """
        found = stored_name(self._file_of, name, prefix)
        if found is not None:
            return found
        tried = (each for each in spellings(name, prefix) if "language_model." not in each)
        raise CheckpointError(
            f"{self.place} has no tensor {name} (tried {', '.join(dict.fromkeys(tried))}) "
            f"among its {len(self._file_of)}; it is incomplete or of another model"
        )

    def has(self, name: str, prefix: str = "") -> bool:
        return stored_name(self._file_of, name, prefix) is not None

    def _check_has(self, name: str) -> None:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.place} has no tensor {name} among its {len(self._file_of)}; "
                "it is incomplete or of another model"
            )

    def _identity(self, file: str) -> FileIdentity:
        if file not in self._identities:
            self._identities[file] = FileIdentity.of(shard_path(self.folder, file))
        return self._identities[file]
