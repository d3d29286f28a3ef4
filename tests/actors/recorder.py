"""Recorded steps without CUDA graphs: operations and emulated kernels are started once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quant.backends.cuda.driver import Compute, Kernels
from quant.experts import ExpertWeights
from tests.actors.attention.delta.test_cuda_delta import kernels_of as delta_kernels
from tests.actors.own_kernels import (
    layer_kernels,
    range_attention,
    use_own_kernels,
)


class Tape(TorchDispatchMode):
    """Notes what is started, as a CUDA graph does: operations with their arguments, and kernels."""

    taping: Tape | None = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.started: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.started.append(partial(_do_again, partial(func, *args, **(kwargs or {})), result))
        return result


def _do_again(operation: Callable[[], Any], result: Any) -> None:
    for kept, made in zip(tree_leaves(result), tree_leaves(operation()), strict=True):
        if isinstance(kept, Tensor) and kept.data_ptr() != made.data_ptr():
            kept.copy_(made)


@contextmanager
def taped() -> Iterator[Tape]:
    with pytest.MonkeyPatch.context() as patch, Tape() as tape:
        launch = Kernels.launch

        def taped_launch(kernels: Kernels, *arguments: Any) -> None:
            launch(kernels, *arguments)
            tape.started.append(partial(launch, kernels, *arguments))

        patch.setattr(Kernels, "launch", taped_launch)
        yield tape


def record(compute: Compute) -> Compute:
    compute()
    with taped() as tape:
        result = compute()

    def replay() -> Tensor:
        with torch.inference_mode():
            for again in tape.started:
                again()
        return result

    return replay


def use_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stages of this process compute by emulated kernels, which split every range, and record
    by `record`.
    """
    use_own_kernels(monkeypatch)
    split = partial(range_attention, blocks=1000)
    monkeypatch.setattr("actors.attention.ragged.range_attention", split)
    monkeypatch.setattr("actors.stage.decode_graphs.range_attention", split)
    monkeypatch.setattr("actors.stage.decode_graphs.layer_kernels", layer_kernels)
    for user in ("attention.delta.rule", "stage.decode_graphs"):
        monkeypatch.setattr(f"actors.{user}.delta_kernels", delta_kernels)
    monkeypatch.setattr("actors.attention.delta.rule.can_run", lambda _: False)
    monkeypatch.setattr(ExpertWeights, "asked_products", lambda *_: True)
    monkeypatch.setattr(ExpertWeights, "multiply_asked", multiplied)
    monkeypatch.setattr("actors.stage.decode_graphs.cuda_recorder", lambda _: record)
    # loops that numba compiles are none of torch's operations
    monkeypatch.setattr("quant.backends.cpu.widened.is_known", lambda _: False)


def multiplied(
    held: ExpertWeights, _: object, x: Tensor, asked: Tensor, bias: Tensor | None
) -> Tensor:
    """What the kernel for experts as they are asked computes, of plain weights."""
    weights = torch.stack([each.weight for each in held.weights])  # type: ignore[attr-defined]
    out = (weights[asked] @ x[:, None, :, None]).squeeze(-1)
    return (out if bias is None else out + bias[asked]).flatten(0, 1)
