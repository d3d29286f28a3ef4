"""What the process that workers are forks of imports: all that stages do, but for Ray, and without
what transformers imports only for training and compiling.

That is half of what importing a model's modules takes. It is imported later where it is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

_IMPORTED = (
    *("asyncio", "google.protobuf.internal.builder", "google.protobuf.json_format"),
    *("jsonschema", "msgpack", "pdb", "pydantic.v1", "requests"),
    *("transformers.models.llama.modeling_llama", "actors.importance"),
    *("actors.schedule.live_run", "actors.stage.emulation", "actors.stage.layer_stream"),
    "actors.transport.nccl_links",
)

_LEFT_OUT = (
    "torch._dynamo",
    "torch.distributed._composable",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
"""Packages of torch's that modules of transformers name as they are imported: a compiler, and
tensors and models that are divided over processes, which stages do by themselves."""

_OPTIONAL = "scipy"
"""A package that transformers does without: losses of object detection ask for it."""


def prepare() -> None:
    """Import what stages and Ray's workers do, but for Ray: that cannot be before a fork."""
    importlib.import_module("torch.distributed")
    with _left_out():
        for name in _IMPORTED:
            importlib.import_module(name)
        _build_a_model()
    from quant.numba_loops import has_numba

    if has_numba():
        registry: Any = importlib.import_module("numba.core.registry")
        registry.cpu_target.typing_context.refresh()  # half a second of each stage's first loop
        registry.cpu_target.target_context.refresh()
    assert "ray" not in sys.modules


def _build_a_model() -> None:
    """Build a model without memory, so that torch asks its compiler what to do with operations on
    the meta device, once for all forks.
    """
    from transformers import LlamaConfig

    from actors.stage.partial_model import empty_model

    empty_model(LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1))


@contextmanager
def _left_out() -> Iterator[None]:
    """Have modules that are imported meanwhile get stand-ins of what is left out."""
    finder = _StandInFinder()
    sys.meta_path.insert(0, finder)
    sys.modules[_OPTIONAL] = None  # type: ignore[assignment]  # Python's way to say: not here
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        del sys.modules[_OPTIONAL]
        for name in [name for name, each in sys.modules.items() if isinstance(each, _StandIn)]:
            del sys.modules[name]
            package, _, attribute = name.rpartition(".")
            if package in sys.modules:
                vars(sys.modules[package]).pop(attribute, None)


class _StandInFinder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(_LEFT_OUT):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty: `_StandIn` has what is asked of it."""


class _StandIn(ModuleType):
    """A module of which any name is a class, which decorates nothing and whose objects are inert as
    long as it stands here; from then on it makes what the name stands for in the module itself.
    """

    def __getattr__(self, name: str) -> type[Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        module = self.__name__

        def new(cls: type[Any], *arguments: Any, **options: Any) -> Any:
            if not isinstance(sys.modules.get(module), _StandIn):
                return getattr(importlib.import_module(module), name)(*arguments, **options)
            decorated = arguments[0] if arguments else None
            return decorated if isinstance(decorated, FunctionType) else object.__new__(cls)

        made = type(name, (_Inert,), {"__new__": new})
        setattr(self, name, made)
        return made


class _Inert:
    def __init__(self, *_: Any, **__: Any) -> None:
        """Take whatever the class is called with."""

    def __call__(self, decorated: Any) -> Any:
        return decorated
